"""Finals that do not come from their owner and are had from whoever reported that it has them all."""

from __future__ import annotations

from pathlib import Path

import trio

from shoal.collectives.progress import Waiting
from shoal.node.rounds.pace import QUIET_S
from shoal.node.rounds.reducing import MEND_RETRY_S
from shoal.protocol.errors import NetworkError
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.frame import FrameKind
from tests.node.rounds.reducing_lab import NOBODY, STEP_S, Clock, Mesh, clock, digests, run, until

__all__ = ["clock"]

SHORT_S = QUIET_S - 2 * STEP_S
LONG_S = QUIET_S + 2 * STEP_S


async def lacking_finals_of_the_last(mesh: Mesh) -> Plan:
    """The first desk has nothing of what the last owns; all others have everything."""
    first, *_, owner = mesh.peers
    mesh.lose_final = lambda sender, to: (sender, to) == (owner, first)
    plan = mesh.plan()
    mesh.start(plan)
    await until(lambda: all(mesh.done[1:]))
    reduction = mesh.desks[0]._reduction
    assert reduction is not None
    await until(lambda: reduction.waiting_for() == Waiting(contributions=NOBODY, finals=frozenset({owner})))
    mesh.catchups[0].known[plan.hash] = mesh.done[1][0][0]
    return plan


def owned_by_the_last(plan: Plan) -> list[int]:
    last = len(plan.participants) - 1
    return [chunk for one in plan.owners if one.owner == last for chunk in range(one.start, one.stop)]


def test_finals_that_do_not_come_are_copied_from_those_who_have_them_all(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            plan = await lacking_finals_of_the_last(mesh)
            mesh.desks[0].complete_at([mesh.peers[1]])
            await clock.pass_time(mesh, SHORT_S)
            assert mesh.catchups[0].copied == []
            await clock.pass_time(mesh, LONG_S - SHORT_S)
            await until(lambda: mesh.done[0])
            assert mesh.catchups[0].copied == [(plan.hash, owned_by_the_last(plan), [mesh.peers[1]])]
            assert len(set(digests(mesh))) == 1
            assert len(mesh.done[0]) == 1
            assert mesh.desks[0].stalled() is None

    run(main)


def test_nothing_is_copied_while_nobody_has_it_all(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            await lacking_finals_of_the_last(mesh)
            await clock.pass_time(mesh, LONG_S)
            assert mesh.catchups[0].copied == []
            assert mesh.done[0] == []

    run(main)


def test_nothing_is_copied_while_its_owner_sends(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            await lacking_finals_of_the_last(mesh)
            mesh.desks[0].complete_at([mesh.peers[1]])
            for _ in range(4):
                mesh.lanes[0].received[mesh.peers[2]] += 1
                await clock.pass_time(mesh, SHORT_S)
            assert mesh.catchups[0].copied == []

    run(main)


def test_copying_that_fails_is_tried_again_after_a_while(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            await lacking_finals_of_the_last(mesh)
            catchup = mesh.catchups[0]
            catchup.error = NetworkError("nobody has them after all")
            mesh.desks[0].complete_at([mesh.peers[1]])
            while not catchup.copied:
                await clock.pass_time(mesh, STEP_S)
            await clock.pass_time(mesh, MEND_RETRY_S - STEP_S)
            assert len(catchup.copied) == 1
            catchup.error = None
            await clock.pass_time(mesh, 2 * STEP_S)
            await until(lambda: mesh.done[0])
            assert len(catchup.copied) == 2
            assert len(set(digests(mesh))) == 1

    run(main)


def test_copying_ends_with_its_reduction(tmp_path: Path, clock: Clock) -> None:
    """And another plan begins with nobody known to have anything."""

    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            await lacking_finals_of_the_last(mesh)
            catchup = mesh.catchups[0]
            catchup.hangs = trio.Event()
            mesh.desks[0].complete_at([mesh.peers[1]])
            await clock.pass_time(mesh, LONG_S)
            assert len(catchup.copied) == 1
            mesh.start(mesh.plan(attempt=1))
            await until(lambda: catchup.cancelled)
            await clock.pass_time(mesh, LONG_S)
            assert len(catchup.copied) == 1
            assert mesh.done[0] == []

    run(main)


def test_only_finals_are_lost_in_these_tests(tmp_path: Path) -> None:
    """The last sums what the first contributes: what is copied has it in."""

    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        kinds = set()
        mesh.lose = lambda sender, header: kinds.add(header.kind) is not None
        async with mesh.running():
            await lacking_finals_of_the_last(mesh)
            assert kinds == {FrameKind.CONTRIBUTION, FrameKind.FINAL}
            assert mesh.done[1][0][0].coverage == 1.0

    run(main)
