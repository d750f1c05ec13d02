"""What one member says ends nobody's node, nor has anything signed that the settings forbid: with real engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.grid import Grid
from shoal.protocol.identity import Identity
from shoal.protocol.messages import (
    PROPOSE_DOMAIN,
    VOTE_DOMAIN,
    Certificate,
    Message,
    OwnedRange,
    Participant,
    Prepare,
    Propose,
    Target,
    Value,
    step_preimage,
)
from shoal.protocol.terms import make_consent, make_rollback
from shoal.protocol.voting import lead
from tests.node.box_life import Life
from tests.node.ledger import identity
from tests.node.simulated_disk import Disks
from tests.node.swarm_in_a_box import Box, disks
from tests.round_messages import plan_with, value_with

__all__ = ["disks"]

INVENTED = 3.0


def key_of(box: Box, life: Life) -> Identity:
    return identity(box.peers.index(life.peer) + 1)


@pytest.mark.parametrize("round", [1, 10**6])
def test_certificate_of_a_rollback_to_nowhere_ends_no_node(tmp_path: Path, disks: Disks, round: int) -> None:
    """Of two, the planner of the last round is a quorum by itself, and may certify what no chain can follow."""
    box = Box(tmp_path, disks, nodes=2)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        head = box.node(0).chain.head
        liar = next(life for life in box.living() if life.peer == head.planner)
        victim = next(life for life in box.living() if life is not liar)
        key, head, target = key_of(box, liar), victim.chain.head, Target(round, bytes(range(32)))
        consents = {key.peer_id: make_consent(key, head, target, asked=True)}
        value = make_rollback(head, key.peer_id, target, consents, digest=bytes(32))
        vote = key.sign(VOTE_DOMAIN, step_preimage(0, value.hash))
        victim.engine.hear(key.peer_id, Certificate(value=value, view=0, signers=(key.peer_id,), signatures=(vote,)))
        await box.until_round(4)
        assert victim.up

    box.run(course)


def invention(box: Box, liar: Life, head: Value) -> Finals:
    """Finals of a plan that nobody was sent, in which its lead weighs a thousand times what the others do."""
    settings, key, peers = liar.engine.member._settings, key_of(box, liar), sorted(box.peers)
    grid, place = Grid(settings.numel, settings.chunk_values), peers.index(liar.peer)
    plan = plan_with(
        (
            Participant(peer, 1000 if peer == liar.peer else 1, 10**6 if peer == liar.peer else 1000, bytes([7]) * 32)
            for peer in peers
        ),
        grid,
        after=head,
        planner=liar.peer,
        owners=(OwnedRange(place, 0, grid.chunks),),
        codec=settings.codec,
    )
    final_format = FinalFormat(plan)
    means = [np.full(final_format.grid.length(chunk), INVENTED, np.float32) for chunk in range(grid.chunks)]
    return Finals(
        plan=plan, chunks=tuple(final_format.sign(key, chunk, mean, [place]) for chunk, mean in enumerate(means))
    )


def test_finals_of_a_plan_that_the_settings_forbid_are_signed_by_nobody(tmp_path: Path, disks: Disks) -> None:
    """A plan that comes with finals, because a proposal names it, is looked at like one that a lead sent."""
    box, signed = Box(tmp_path, disks, nodes=4), list[bytes]()

    def let_out(life: Life, message: Message) -> None:
        if isinstance(message, Prepare):
            signed.append(message.value)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        await box.until(lambda: all(life.engine.machine and life.engine.machine.round == 3 for life in box.living()))
        head = box.node(0).chain.head
        liar = next(life for life in box.living() if life.peer == lead(head, 0))
        finals = invention(box, liar, head)
        liar.cache.put_finals(finals)
        report = await liar.engine._transition.work_out(finals, 0.1)
        value = value_with(head, report, liar.peer, box.peers)
        signature = key_of(box, liar).sign(PROPOSE_DOMAIN, step_preimage(0, value.hash))
        proposal = Propose(
            term=value.term, round=value.round, base=value.base, view=0, value=value, signature=signature
        )
        box.let_out = let_out
        for life in box.living():
            if life is not liar:
                life.engine.hear(liar.peer, proposal)
        await trio.sleep(5.0)
        assert value.hash not in signed
        await box.until_round(4)

    box.run(course)
