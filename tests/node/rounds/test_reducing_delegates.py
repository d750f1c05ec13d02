"""Reductions of which one participant has a delegate: owners send it nothing, and it has all from that one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio
import trio.testing

from shoal.node.rounds.copying import DELEGATE_S
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Delegated, OwnedRange, Plan
from tests.node.rounds.reducing_lab import STEP_S, Clock, Mesh, clock, digests
from tests.waiting import until

__all__ = ["clock"]

TEST_DEADLINE_S = 30.0
OTHER, DELEGATE, RIDER = 0, 1, 2
SHORT_S, LONG_S = DELEGATE_S - 2 * STEP_S, DELEGATE_S + 3 * STEP_S


def plan_with_a_delegate(mesh: Mesh) -> Plan:
    """Of three, the last has the second for its delegate."""
    plan = mesh.plan(weightless=(RIDER,))
    owners = (OwnedRange(OTHER, 0, 1), OwnedRange(DELEGATE, 1, plan.chunks))
    return msgspec.structs.replace(plan, owners=owners, delegated=(Delegated(RIDER, DELEGATE),))


def finals_to_the_rider(mesh: Mesh) -> list[PeerId]:
    """Who sends it one, from now on."""
    senders: list[PeerId] = []

    def note(sender: PeerId, to: PeerId) -> bool:
        if to == mesh.peers[RIDER]:
            senders.append(sender)
        return False

    mesh.lose_final = note
    return senders


@asynccontextmanager
async def running(mesh: Mesh) -> AsyncIterator[None]:
    with trio.fail_after(TEST_DEADLINE_S):
        async with mesh.running():
            yield


async def begun(mesh: Mesh) -> Plan:
    """The two others have all finals."""
    plan = plan_with_a_delegate(mesh)
    mesh.start(plan)
    await until(lambda: mesh.done[OTHER] and mesh.done[DELEGATE])
    mesh.catchups[RIDER].known[plan.hash] = mesh.done[OTHER][0][0]
    return plan


async def test_who_has_a_delegate_is_sent_nothing_and_has_all_from_it_once_it_reported(
    tmp_path: Path, clock: Clock
) -> None:
    mesh = Mesh(tmp_path, 3)
    sent = finals_to_the_rider(mesh)
    async with running(mesh):
        plan = await begun(mesh)
        await clock.pass_time(mesh, LONG_S)
        assert sent == []
        assert mesh.catchups[RIDER].copied == [], "nobody said yet that it has all"
        assert mesh.drivers[RIDER].stalled() is None, "it is owed nothing"
        mesh.drivers[RIDER].complete_at([mesh.peers[OTHER], mesh.peers[DELEGATE]])
        await until(lambda: mesh.done[RIDER])
        assert mesh.catchups[RIDER].copied == [(plan.hash, list(range(plan.chunks)), [mesh.peers[DELEGATE]])]
        assert len(set(digests(mesh))) == 1


async def test_others_are_asked_where_the_delegate_has_not_all_in_time(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    async with running(mesh):
        plan = await begun(mesh)
        mesh.drivers[RIDER].complete_at([mesh.peers[OTHER]])
        await clock.pass_time(mesh, SHORT_S)
        assert mesh.catchups[RIDER].copied == []
        await clock.pass_time(mesh, LONG_S - SHORT_S)
        await until(lambda: mesh.done[RIDER])
        assert mesh.catchups[RIDER].copied == [(plan.hash, list(range(plan.chunks)), [mesh.peers[OTHER]])]
        assert len(set(digests(mesh))) == 1


async def test_owners_send_finals_to_who_had_a_delegate_that_was_evicted(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    async with running(mesh):
        plan = await begun(mesh)
        evicted, finals = mesh.peers[DELEGATE], mesh.done[OTHER][0][0]
        for node in (RIDER, OTHER):
            await mesh.drivers[node].close_off(plan.lineage, frozenset({evicted}))
        standing = ChunkResults.of(OTHER, {chunk: finals.chunks[chunk].result for chunk in range(1, plan.chunks)})
        revised = msgspec.structs.replace(
            plan, attempt=1, origin=plan.lineage, evicted=(evicted,), standing=(standing,)
        )
        for node in (RIDER, OTHER):
            mesh.drivers[node].repair(revised, mesh.contributions[node], {})
        await until(lambda: mesh.done[RIDER])
        assert mesh.catchups[RIDER].copied == []
        assert digests(mesh)[RIDER] == digests(mesh)[OTHER]


async def test_no_lanes_are_made_between_owners_and_who_has_another_delegate(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    async with running(mesh):
        await begun(mesh)
        await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        pairs = {frozenset(pair) for pair in mesh.ensured}
        assert frozenset((mesh.peers[OTHER], mesh.peers[RIDER])) not in pairs
        assert {frozenset((mesh.peers[OTHER], mesh.peers[DELEGATE]))} <= pairs
