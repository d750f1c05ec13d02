"""Claims to be ahead, and peers that do not answer: they cost the members' rounds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from shoal.node.state.state_server import REQUEST_DEADLINE_S
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.protocol.newcomers import coming
from tests.node import box_life, box_net
from tests.node import swarm_in_a_box as box_module
from tests.node.ledger import identity

disks = box_module.disks

OUTSIDER = identity(77).peer_id
SPAN_S = 10.0
FAR = 1_000_000


class Boaster:
    """Somebody who claims to be far ahead, again and again, to every node of a box, and answers nothing."""

    def __init__(self, box: Any, peer: PeerId, monkeypatch: pytest.MonkeyPatch) -> None:
        self.box = box
        self.peer = peer
        self.asked_at: list[float] = []
        ask, linked = box_life.Life._ask, box_net.BoxLinks.linked

        async def never_answered(life: Any, to: PeerId, request: bytes) -> bytes:
            if to != peer:
                answer: bytes = await ask(life, to, request)
                return answer
            self.asked_at.append(trio.current_time())
            await trio.sleep(REQUEST_DEADLINE_S)
            raise NetworkError(f"{to} does not answer")

        monkeypatch.setattr(box_life.Life, "_ask", never_answered)
        if peer == OUTSIDER:
            life_of = box_module.Box.life_of
            monkeypatch.setattr(box_net.BoxLinks, "linked", lambda links: linked(links) | {OUTSIDER})
            monkeypatch.setattr(
                box_module.Box, "life_of", lambda box, peer: None if peer == OUTSIDER else life_of(box, peer)
            )

    async def boast(self) -> None:
        """Link, and speak of a round that nobody else has heard of, until cancelled."""
        while True:
            for life in self.box.living():
                if life.peer != self.peer:
                    others = (other.peer for other in self.box.lives_linked_to(life))
                    life.engine.alive(frozenset({self.peer, *others}))
                    life.engine.linked(self.peer, (Term(), FAR))
                    life.engine.hear(self.peer, msgspec.structs.replace(coming(life.chain.head), round=FAR))
            await trio.sleep(0.2)


def rounds_in_a_while(box: Any, boaster: Boaster | None) -> int:
    certified = 0

    async def course(box: Any) -> None:
        nonlocal certified
        box.start_all()
        await box.until_round(1)
        async with trio.open_nursery() as nursery:
            if boaster is not None:
                nursery.start_soon(boaster.boast)
            await trio.sleep(SPAN_S)
            certified = min(life.round for life in box.living()) - 1
            nursery.cancel_scope.cancel()

    box.run(course)
    return certified


@pytest.mark.parametrize("who", ["an outsider", "a member"])
def test_claims_of_who_never_answers_cost_no_round(
    tmp_path: Path, disks: Any, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    undisturbed = rounds_in_a_while(box_module.Box(tmp_path / "alone", disks), None)
    assert undisturbed >= 5
    box = box_module.Box(tmp_path / "boasted to", disks)
    boaster = Boaster(box, OUTSIDER if who == "an outsider" else box.peers[2], monkeypatch)
    found = rounds_in_a_while(box, boaster)
    assert found >= 0.9 * undisturbed, (found, undisturbed)
    # It is asked, but by each node once at a time, and less and less often.
    assert 0 < len(boaster.asked_at) <= 3 * len(box.peers)
