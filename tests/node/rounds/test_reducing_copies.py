"""Finals that do not come from their owner and are had from whoever reported that it has them all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from shoal.collectives.progress import Waiting
from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.node.rounds.copying import COPY_RETRY_S
from shoal.node.rounds.pace import QUIET_S
from shoal.node.rounds.reducing import FETCH_TIMEOUT_S
from shoal.protocol.errors import NetworkError
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.frame import FrameKind
from tests.node.rounds.reducing_lab import NOBODY, STEP_S, Clock, Mesh, clock, digests, value_with
from tests.waiting import until

__all__ = ["clock"]

SHORT_S = QUIET_S - 2 * STEP_S
LONG_S = QUIET_S + 2 * STEP_S

Check = Callable[[Mesh, Plan, Clock], Awaitable[None]]
Test = Callable[[Path, Clock], Awaitable[None]]


async def lacking_finals_of_the_third(mesh: Mesh) -> Plan:
    """The first driver has nothing of what the third owns; all others have everything."""
    first, _, owner, *_ = mesh.peers
    mesh.lose_final = lambda sender, to: (sender, to) == (owner, first)
    plan = mesh.plan()
    mesh.start(plan)
    await until(lambda: all(mesh.done[1:]))
    reduction = mesh.drivers[0]._reduction
    assert reduction is not None
    await until(lambda: reduction.waiting_for() == Waiting(contributions=NOBODY, finals=frozenset({owner})))
    mesh.catchups[0].known[plan.hash] = mesh.done[1][0][0]
    return plan


def owned_by_the_third(plan: Plan) -> list[int]:
    return [chunk for one in plan.owners if one.owner == 2 for chunk in range(one.start, one.stop)]


def while_finals_are_lacking(nodes: int) -> Callable[[Check], Test]:
    """A test that begins when the first of so many drivers has nothing of what the third owns, and all others have."""

    def decorate(check: Check) -> Test:
        async def test(tmp_path: Path, clock: Clock) -> None:
            mesh = Mesh(tmp_path, nodes)
            async with mesh.running():
                await check(mesh, await lacking_finals_of_the_third(mesh), clock)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@while_finals_are_lacking(nodes=3)
async def test_finals_that_do_not_come_are_copied_from_those_who_have_them_all(
    mesh: Mesh, plan: Plan, clock: Clock
) -> None:
    mesh.drivers[0].complete_at([mesh.peers[1]])
    await clock.pass_time(mesh, SHORT_S)
    assert mesh.catchups[0].copied == []
    await clock.pass_time(mesh, LONG_S - SHORT_S)
    await until(lambda: mesh.done[0])
    assert mesh.catchups[0].copied == [(plan.hash, owned_by_the_third(plan), [mesh.peers[1]])]
    assert len(set(digests(mesh))) == 1
    assert len(mesh.done[0]) == 1
    assert mesh.drivers[0].stalled() is None


@while_finals_are_lacking(nodes=3)
async def test_nothing_is_copied_while_nobody_has_it_all(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    await clock.pass_time(mesh, LONG_S)
    assert mesh.catchups[0].copied == []
    assert mesh.done[0] == []


@while_finals_are_lacking(nodes=3)
async def test_nothing_is_copied_while_its_owner_sends(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    mesh.drivers[0].complete_at([mesh.peers[1]])
    for _ in range(4):
        mesh.lanes[0].received[mesh.peers[2]] += 1
        await clock.pass_time(mesh, SHORT_S)
    assert mesh.catchups[0].copied == []


@while_finals_are_lacking(nodes=3)
async def test_owner_that_does_not_send_is_not_asked_for_copies_of_it(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    """Be it the first to say that it has all finals."""
    mesh.drivers[0].complete_at([mesh.peers[2]])
    await clock.pass_time(mesh, 2 * LONG_S)
    assert mesh.catchups[0].copied == []
    mesh.drivers[0].complete_at([mesh.peers[2], mesh.peers[1]])
    await until(lambda: mesh.done[0])
    assert [peers for _, _, peers in mesh.catchups[0].copied] == [[mesh.peers[1]]]


@while_finals_are_lacking(nodes=4)
async def test_copying_that_lasts_begins_again_with_those_who_have_it_all_by_then(
    mesh: Mesh, plan: Plan, clock: Clock
) -> None:
    """Who was the first to say so may have died, or lie."""
    catchup = mesh.catchups[0]
    catchup.hangs = trio.Event()
    mesh.drivers[0].complete_at([mesh.peers[1]])
    while not catchup.copied:
        await clock.pass_time(mesh, STEP_S)
    mesh.drivers[0].complete_at([mesh.peers[1], mesh.peers[3]])
    await clock.pass_time(mesh, SHORT_S)
    assert len(catchup.copied) == 1
    catchup.hangs = None
    await clock.pass_time(mesh, LONG_S - SHORT_S)
    await until(lambda: mesh.done[0])
    assert catchup.cancelled
    assert [peers for _, _, peers in catchup.copied] == [[mesh.peers[1]], [mesh.peers[1], mesh.peers[3]]]
    assert len(set(digests(mesh))) == 1


@while_finals_are_lacking(nodes=3)
async def test_what_came_from_its_owner_after_all_is_not_copied_on(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    catchup = mesh.catchups[0]
    catchup.hangs = trio.Event()
    mesh.drivers[0].complete_at([mesh.peers[1]])
    await clock.pass_time(mesh, LONG_S)
    assert len(catchup.copied) == 1
    mesh.lose_final = lambda sender, to: False
    mesh.traffics[2].lane_failed(mesh.peers[0])  # so that it is sent again
    await until(lambda: catchup.cancelled and mesh.done[0])
    assert len(set(digests(mesh))) == 1


@while_finals_are_lacking(nodes=4)
async def test_finals_of_the_evicted_are_not_copied(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    """They would not be taken, and the transfer would begin again and again."""
    catchup = mesh.catchups[0]
    catchup.hangs = trio.Event()
    mesh.drivers[0].complete_at([mesh.peers[1]])
    await clock.pass_time(mesh, LONG_S)
    assert len(catchup.copied) == 1
    await mesh.drivers[0].close_off(plan.lineage, frozenset({mesh.peers[2]}))
    await until(lambda: catchup.cancelled)
    mesh.drivers[0].complete_at([mesh.peers[1], mesh.peers[3]])
    await clock.pass_time(mesh, 2 * LONG_S)
    assert len(catchup.copied) == 1


@while_finals_are_lacking(nodes=4)
async def test_nothing_is_copied_from_the_evicted(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    await mesh.drivers[0].close_off(plan.lineage, frozenset({mesh.peers[1]}))
    mesh.drivers[0].complete_at([mesh.peers[1]])
    await clock.pass_time(mesh, LONG_S)
    assert mesh.catchups[0].copied == []
    mesh.drivers[0].complete_at([mesh.peers[1], mesh.peers[3]])
    await until(lambda: mesh.done[0])
    assert [peers for _, _, peers in mesh.catchups[0].copied] == [[mesh.peers[3]]]


@pytest.mark.parametrize("hangs", [False, True], ids=["copies-come", "copies-hang"])
async def test_finals_that_a_vote_lacks_are_fetched_only_if_copying_leads_to_nothing(
    tmp_path: Path, clock: Clock, hangs: bool
) -> None:
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = await lacking_finals_of_the_third(mesh)
        catchup, driver = mesh.catchups[0], mesh.drivers[0]
        catchup.hangs = trio.Event()
        driver.complete_at([mesh.peers[1]])
        await clock.pass_time(mesh, STALL_S + LATE_S + 2 * STEP_S)
        driver.fetch(value_with(plan.hash), mesh.peers[1:])
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert (len(catchup.copied), catchup.asked) == (1, [])
        if hangs:
            await clock.pass_time(mesh, FETCH_TIMEOUT_S)
            driver.fetch(value_with(plan.hash), mesh.peers[1:])
            await until(lambda: catchup.cancelled and mesh.done[0])
            await clock.pass_time(mesh, LONG_S)
            assert (len(catchup.copied), len(catchup.asked)) == (1, 1)
        else:
            catchup.hangs.set()
            await until(lambda: mesh.done[0])
            assert catchup.asked == []
        assert len(set(digests(mesh))) == 1


@while_finals_are_lacking(nodes=3)
async def test_copying_that_fails_is_tried_again_after_a_while(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    catchup = mesh.catchups[0]
    catchup.error = NetworkError("nobody has them after all")
    mesh.drivers[0].complete_at([mesh.peers[1]])
    while not catchup.copied:
        await clock.pass_time(mesh, STEP_S)
    await clock.pass_time(mesh, COPY_RETRY_S - STEP_S)
    assert len(catchup.copied) == 1
    catchup.error = None
    await clock.pass_time(mesh, 2 * STEP_S)
    await until(lambda: mesh.done[0])
    assert len(catchup.copied) == 2
    assert len(set(digests(mesh))) == 1


@while_finals_are_lacking(nodes=3)
async def test_copying_ends_with_its_reduction(mesh: Mesh, plan: Plan, clock: Clock) -> None:
    """And another plan begins with nobody known to have anything."""
    catchup = mesh.catchups[0]
    catchup.hangs = trio.Event()
    mesh.drivers[0].complete_at([mesh.peers[1]])
    await clock.pass_time(mesh, LONG_S)
    assert len(catchup.copied) == 1
    mesh.start(mesh.plan(attempt=1))
    await until(lambda: catchup.cancelled)
    await clock.pass_time(mesh, LONG_S)
    assert len(catchup.copied) == 1
    assert mesh.done[0] == []


async def test_only_finals_are_lost_in_these_tests(tmp_path: Path) -> None:
    """The third sums what the first contributes: what is copied has it in."""
    mesh = Mesh(tmp_path, 3)
    kinds = set()
    mesh.lose = lambda sender, header: kinds.add(header.kind) is not None
    async with mesh.running():
        await lacking_finals_of_the_third(mesh)
        assert kinds == {FrameKind.CONTRIBUTION, FrameKind.FINAL}
        assert mesh.done[1][0][0].coverage == 1.0
