"""Reduction drivers that repair a reduction, go round a broken pair, and take finals that others have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from shoal.collectives.finals import UnsoundFinal
from shoal.collectives.partition import deal
from shoal.collectives.progress import Waiting
from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.node.rounds.pace import Stall
from shoal.node.rounds.reducing import FETCH_TIMEOUT_S, RELAYED_PATH_LIMIT_S, RELAYED_PATH_S, UNREACHABLE_LIMIT
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Held, Plan, Relay, Term
from shoal.protocol.planning import PlanOrder, revise_plan
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from tests.node.ledger import Ledger, finals_of, plan_of
from tests.node.rounds.reducing_lab import NOBODY, Clock, Mesh, clock, digests, value_with
from tests.waiting import until

__all__ = ["clock"]


# -- repair --------------------------------------------------------------------------------------------------


async def revised(mesh: Mesh, plan: Plan, *gone: int) -> tuple[Plan, dict[PeerId, Held]]:
    """What the lead makes of it when these are lost and the others have closed them off."""
    evicted = frozenset(mesh.peers[n] for n in gone)
    helds = {
        peer: Held(
            term=plan.term,
            round=plan.round,
            base=plan.base,
            lineage=plan.lineage,
            evicted=tuple(sorted(evicted)),
            chunks=await mesh.drivers[n].close_off(plan.lineage, evicted),
        )
        for n, peer in enumerate(mesh.peers)
        if peer not in evicted
    }
    plan_order = PlanOrder(view=0, attempt=plan.attempt + 1, planner=plan.planner, evicted=tuple(sorted(evicted)))
    return revise_plan(plan, plan_order, helds, deal), helds


async def test_repair_goes_on_without_the_lost_from_what_is_there(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    mute = mesh.peers[2]
    sent: list[FrameHeader] = []

    def lose(sender: PeerId, header: FrameHeader) -> bool:
        sent.append(header)
        return sender == mute

    mesh.lose = lose
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan)
        reduction, others = mesh.drivers[0]._reduction, mesh.drivers[1]._reduction
        assert reduction is not None
        assert others is not None
        await until(lambda: reduction.waiting_for().contributions == others.waiting_for().contributions == {mute})
        again, helds = await revised(mesh, plan, 2)
        assert [lanes.dropped for lanes in mesh.lanes[:2]] == [[mute], [mute]]
        mesh.drivers[0]._stall = Stall(frozenset({mute}), NOBODY)
        for n in (0, 1):
            mesh.drivers[n].repair(again, mesh.contributions[n], helds)
        assert mesh.drivers[0].stalled() is None, "that was under another plan"
        await until(lambda: mesh.done[0] and mesh.done[1])
        assert mesh.drivers[0]._reduction is reduction, "the same reduction goes on"
        assert [mesh.done[n][0][0].plan for n in (0, 1)] == [again, again]
        assert len({mesh.done[n][0][0].concatenated() for n in (0, 1)}) == 1
        assert mesh.done[0][0][0].bitmaps == (b"\x03",) * 3
        # Of the two contributions of those who stay only the lost owner's chunk travels again.
        again_sent = [h.chunk for h in sent if h.kind is FrameKind.CONTRIBUTION and h.attempt == 1]
        assert len(again_sent) == 1


async def test_repair_of_a_reduction_that_is_not_under_way_starts_it(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    mesh.lose = lambda sender, header: sender == mesh.peers[2]
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan, 0)
        again, helds = await revised(mesh, plan, 2)
        for n in (0, 1):
            mesh.drivers[n].repair(again, mesh.contributions[n], helds)
        await until(lambda: mesh.done[0] and mesh.done[1])
        assert len({mesh.done[n][0][0].concatenated() for n in (0, 1)}) == 1


async def test_reduction_that_begins_again_signs_nothing_anew(tmp_path: Path) -> None:
    """A lead may plan anew and lose its view to one who repairs the first plan: all take that up again."""
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan)
        await until(lambda: all(mesh.done))
        before = mesh.done[0][0][0]
        again, _ = await revised(mesh, plan, 2)
        mesh.drivers[0].start(mesh.plan(attempt=1), mesh.contributions[0])
        mesh.lose = lambda sender, header: sender == mesh.peers[2]  # its contributions are in what was signed
        for n in (0, 1):
            mesh.drivers[n].repair(again, mesh.contributions[n], {})
        await until(lambda: all(len(mesh.done[n]) == 2 for n in (0, 1)))
        mine = [c.chunk for c in before.chunks if c.owner == mesh.peers[0]]
        for n in (0, 1):
            after = mesh.done[n][1][0]
            assert mine
            assert all(bytes(after.chunks[c].payload) == bytes(before.chunks[c].payload) for c in mine)
        mesh.drivers[0].forget()
        assert not mesh.drivers[0]._kept, "the next round has other lineages"


async def test_eviction_that_is_heard_before_its_plan_binds(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    me, _, gone = mesh.peers
    delivered: set[FrameKind] = set()
    deliver = mesh.deliver

    def noted(sender: PeerId, to: PeerId, header: FrameHeader, payload: bytes) -> None:
        deliver(sender, to, header, payload)
        if (sender, to) == (gone, me):
            delivered.add(header.kind)

    mesh.deliver = noted  # type: ignore[method-assign]
    async with mesh.running():
        plan = mesh.plan()
        assert await mesh.drivers[0].close_off(plan.lineage, frozenset({gone})) == ()
        mesh.start(plan)
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        await until(lambda: reduction.waiting_for().contributions == {gone})
        await until(lambda: FrameKind.CONTRIBUTION in delivered)
        assert gone not in reduction.received_bytes


# -- peers that are reached through another ------------------------------------------------------------------


def relayed(plan: Plan, *, attempt: int, round: int = 1) -> Plan:
    """The plan with participants 0 and 1 reaching each other through 2."""
    origin = plan.lineage if attempt else NO_HASH
    return msgspec.structs.replace(plan, relays=(Relay(0, 1, 2),), attempt=attempt, origin=origin, round=round)


async def test_pair_over_whose_lane_nothing_moves_is_known_to_be_apart(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    one, other, _ = mesh.peers
    apart = {one, other}
    mesh.lose_between = lambda sender, to: {sender, to} == apart
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan)
        await until(lambda: all(driver._reduction.waiting_for().contributions for driver in mesh.drivers[:2]))  # type: ignore[union-attr]
        for n, driver in enumerate(mesh.drivers):
            driver.repair(relayed(plan, attempt=1), mesh.contributions[n], {})
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1
        assert mesh.done[0][0][0].bitmaps == (b"\x07",) * 3, "all contributions are in all chunks"
        assert [driver.unreachable for driver in mesh.drivers] == [{other}, {one}, set()]
        assert [lanes.dropped for lanes in mesh.lanes] == [[other], [one], []]


async def test_pair_that_is_relayed_is_dialled_again_after_a_while(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    one, other, third = mesh.peers
    driver = mesh.drivers[0]

    async def dials_in(round: int) -> int:
        """How often the driver dials the other in a round whose plan relays the two from the start."""
        before, dialled = mesh.ensured.count((one, other)), mesh.ensured.count((one, third))
        driver.start(relayed(mesh.plan(), attempt=0, round=round), mesh.contributions[0])
        await until(lambda: mesh.ensured.count((one, third)) > dialled)  # which is done after the other
        return mesh.ensured.count((one, other)) - before

    async with mesh.running():
        mesh.unreachable = {other}
        driver._give_up_on(other)
        assert await dials_in(2) == 0
        clock.ahead_s += RELAYED_PATH_S
        assert await dials_in(3) == 1
        assert driver.unreachable == {other}, "it failed"
        clock.ahead_s += RELAYED_PATH_S
        assert await dials_in(4) == 0, "twice as long this time"
        clock.ahead_s += RELAYED_PATH_S
        mesh.unreachable = set()
        assert await dials_in(5) == 1
        assert driver.unreachable == set(), "the next plan may do without the relay"


async def test_pair_that_is_relayed_is_not_dialled_with_every_round_that_begins(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    one, other, third = mesh.peers
    driver = mesh.drivers[0]
    async with mesh.running():
        driver._give_up_on(other)
        driver.bring_up_lanes(frozenset({other, third}), 60)
        await until(lambda: (one, third) in mesh.ensured)
        with trio.fail_after(30):
            await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        assert mesh.ensured == [(one, third)]


def test_who_is_out_of_reach_is_not_remembered_for_ever(tmp_path: Path, clock: Clock) -> None:
    """An open swarm meets peers without end."""
    mesh = Mesh(tmp_path, 2)
    mesh.events.close()
    driver = mesh.drivers[0]
    for number in range(UNREACHABLE_LIMIT + 1):
        driver._give_up_on(PeerId(f"peer {number}"))
        if number in (0, UNREACHABLE_LIMIT - 1):
            driver.forget()
            assert len(driver.unreachable) == len(driver._relayed_paths) == number + 1
    driver.forget()
    assert (driver.unreachable, len(driver._relayed_paths)) == (set(), UNREACHABLE_LIMIT + 1)
    clock.ahead_s += RELAYED_PATH_S + RELAYED_PATH_LIMIT_S - 1
    driver.forget()
    assert len(driver._relayed_paths) == UNREACHABLE_LIMIT + 1
    clock.ahead_s += 2
    driver.forget()
    assert driver._relayed_paths == {}


# -- finals that are fetched ---------------------------------------------------------------------------------


async def test_fetched_finals_are_handed_over_once(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.certify()
    finals = ledger.finals[1]
    mesh = Mesh(tmp_path, 2)
    mesh.catchups[0].known[finals.plan.hash] = finals
    async with mesh.running():
        for _ in range(3):
            mesh.drivers[0].fetch(value_with(finals.plan.hash), mesh.peers[1:])
        await until(lambda: mesh.done[0])
        mesh.drivers[0].fetch(value_with(finals.plan.hash), mesh.peers[1:])
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert [finals for finals, _ in mesh.done[0]] == [finals]
        assert mesh.catchups[0].asked == [(finals.plan.hash, (mesh.peers[1],))]


@pytest.mark.parametrize("field", ["term", "round", "base"])
async def test_fetched_finals_of_another_round_are_dropped(tmp_path: Path, field: str) -> None:
    """A lead may propose the hash of any plan; what it leads to cannot follow this node's state."""
    ledger = Ledger()
    plan = plan_of(ledger.founders, ledger.chain.head)
    other = {"term": Term(1, 0), "round": 2, "base": bytes(32)}[field]
    strange = finals_of(msgspec.structs.replace(plan, **{field: other}), ledger.founders, seed=1)
    mesh = Mesh(tmp_path, 2)
    mesh.catchups[0].known[strange.plan.hash] = strange
    async with mesh.running():
        mesh.drivers[0].fetch(value_with(strange.plan.hash), mesh.peers[1:])
        await until(lambda: mesh.catchups[0].asked)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert mesh.done[0] == []


@pytest.mark.parametrize("error", [NetworkError("nobody has them"), RemoteError("nonsense", peer="x")])
async def test_fetch_that_fails_may_be_tried_again(tmp_path: Path, error: Exception) -> None:
    mesh = Mesh(tmp_path, 2)
    catchup = mesh.catchups[0]
    catchup.error = error
    async with mesh.running():
        for count in (1, 2, 3):
            mesh.drivers[0].fetch(value_with(bytes(32)), [])
            await until(lambda n=count: len(catchup.asked) == n)  # type: ignore[misc]
            for _ in range(5):
                await trio.lowlevel.checkpoint()
        assert mesh.done[0] == []
        mesh.start(mesh.plan())  # and the driver is none the worse for it
        await until(lambda: all(mesh.done))


async def test_finals_of_the_reduction_under_way_are_not_fetched(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2)
    mesh.lose = lambda sender, header: True
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan)
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert mesh.catchups[0].asked == []
        mesh.drivers[0].forget()
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        await until(lambda: mesh.catchups[0].asked)


async def lacking_finals_of_the_second(mesh: Mesh) -> Plan:
    """Drivers of which all but the second have nothing of what it owns; it has everything."""
    owner = mesh.peers[1]
    mesh.lose = lambda sender, header: sender == owner and header.kind is FrameKind.FINAL
    plan = mesh.plan()
    mesh.start(plan)
    await until(lambda: mesh.done[1])
    reduction = mesh.drivers[0]._reduction
    assert reduction is not None
    await until(lambda: reduction.waiting_for() == Waiting(contributions=NOBODY, finals=frozenset({owner})))
    return plan


async def test_finals_that_nobody_sends_any_more_are_fetched(tmp_path: Path, clock: Clock) -> None:
    """Their owner died after others had them, and those others are no quorum without this node's vote."""
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = await lacking_finals_of_the_second(mesh)
        mesh.catchups[0].known[plan.hash] = mesh.done[1][0][0]
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        await clock.pass_time(mesh, STALL_S)
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        assert mesh.catchups[0].asked == []
        await clock.pass_time(mesh, LATE_S + 0.5)
        for _ in range(2):
            mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        await until(lambda: mesh.done[0])
        assert mesh.catchups[0].asked == [(plan.hash, tuple(mesh.peers[1:]))]
        assert mesh.done[0][0][0] is mesh.done[1][0][0]


async def test_finals_that_a_reduction_keeps_waiting_for_are_fetched_in_the_end(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = await lacking_finals_of_the_second(mesh)
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        for _ in range(int(FETCH_TIMEOUT_S)):
            mesh.lanes[0].received[mesh.peers[1]] += 1  # something else comes over its lanes
            mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
            assert mesh.catchups[0].asked == []
            await clock.pass_time(mesh, 1.0)
        mesh.drivers[0].fetch(value_with(plan.hash), mesh.peers[1:])
        await until(lambda: mesh.catchups[0].asked)


@pytest.mark.parametrize("slow", [False, True], ids=["at-once", "first-check-ends-last"])
async def test_final_that_comes_while_others_are_checked_is_checked_too(tmp_path: Path, slow: bool) -> None:
    """And all of them are handed over once, whichever of the checks that overlap ends last."""
    mesh = Mesh(tmp_path, 2)
    async with mesh.running():
        await lacking_finals_of_the_second(mesh)
        driver, owner, finals = mesh.drivers[0], mesh.peers[1], mesh.done[1][0][0]
        reduction = driver._reduction
        assert reduction is not None
        lacking = [final for final in finals.chunks if final.owner == owner]
        coming = [bytes(31), bytes(32), b""]  # what takes the place of the end of its signature
        verify, checked = reduction.verify, threading.Event()

        def send() -> None:
            end = coming.pop(0)
            for final in lacking:
                payload = final.payload.tobytes()
                payload = payload[: len(payload) - len(end)] + end
                region = reduction.final_region(owner, final.chunk, 0, len(payload))
                if region is not None:
                    region[:] = payload
                    reduction.final_received(owner, final.chunk, 0, region)

        def verify_and_send(*arguments: Any) -> list[UnsoundFinal]:
            first, unsound = len(coming) == 2, verify(*arguments)
            if unsound:
                send()
            else:
                checked.set()
            if first and slow:
                assert checked.wait(30)
            return unsound

        conclude, concluded = driver._conclude, []

        async def conclude_and_count(*arguments: Any) -> None:
            await conclude(*arguments)
            concluded.append(arguments)

        reduction.verify = verify_and_send  # type: ignore[method-assign]
        driver._conclude = conclude_and_count  # type: ignore[method-assign]
        await trio.to_thread.run_sync(send)
        await until(lambda: len(concluded) == 3)
        assert coming == []
        assert [taken.sound for taken, _ in mesh.done[0]] == [True]
        assert len(set(digests(mesh))) == 1


async def test_cancelled_run_closes_the_reduction(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2)
    mesh.lose = lambda sender, header: True
    async with mesh.running():
        mesh.start(mesh.plan())
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        await until(lambda: reduction.waiting_for().finals)
    assert reduction.waiting_for().finals == frozenset()
    assert mesh.drivers[0]._reduction is None
