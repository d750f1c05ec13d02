"""The silent strangers of the bench of hostile peers, at a real host: they take its places and keep them."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.lab.bench.hostile_silent import Silent
from shoal.lab.bench.hostile_stranger import Links
from shoal.protocol.identity import PeerId
from shoal.swarm import dialling as dialling_module
from shoal.swarm import links as links_module
from shoal.swarm.limits import Door, Reason
from tests.swarm.test_members import MANIFEST, Node, running
from tests.waiting import until

PLACES = 6
LET_IN = 3.0
"""By the node's door, ever: the strangers' tell-tale, and two more."""


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LINK_LIMIT", PLACES)
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)
    monkeypatch.setattr(Links, "return_s", 0.5)


async def test_silent_strangers_take_all_places_however_few_are_let_in_and_keep_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(2)
    node.host._door = Door(node.host.refusals, per_s=(0.0, LET_IN), newcomers_per_s=(0.0, 0.0))
    alive: set[PeerId] = set()
    hear = node.host.pinged

    def pinged(peer: PeerId, answered: int | None) -> None:
        if answered is not None:
            alive.add(peer)
        hear(peer, answered)

    monkeypatch.setattr(node.host, "pinged", pinged)
    async with running(node) as nursery:
        attack = Links(MANIFEST.swarm_id, PLACES + 1, "", node.host.addresses)
        nursery.start_soon(attack.run)
        await until(lambda: len(node.linked()) == PLACES)
        there = node.linked()
        await until(lambda: there <= alive)
        assert node.linked() == there, "who answers its pings stays"
        assert attack.made["dialled"] >= PLACES - LET_IN
        nursery.cancel_scope.cancel()


async def test_silent_stranger_that_finds_no_place_is_told_so() -> None:
    node, made = Node(2), Counter[str]()
    async with running(node) as nursery:
        quiet = [Silent(MANIFEST.swarm_id, made) for _ in range(PLACES + 1)]
        for one in quiet:
            await nursery.start(one.run)
        for one in quiet[:PLACES]:
            nursery.start_soon(one.come, node.host.addresses[0])
            await one.until_linked(node.peer)
        with pytest.raises(Exception, match="not welcome"):
            await quiet[PLACES].come(node.host.addresses[0])
        assert made["told full"] == 1
        assert node.linked() == {one.peer_id for one in quiet[:PLACES]}
        assert node.host.refusals.counts()[Reason.LINKS.value] == 1
        nursery.cancel_scope.cancel()
