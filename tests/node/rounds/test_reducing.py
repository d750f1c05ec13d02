"""The reductions of a round at real drivers in one process, over lanes that are function calls in threads."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.partition import dials_first
from shoal.collectives.reduce import Reduction
from shoal.node.options import Hold
from shoal.node.rounds import reducing
from shoal.node.rounds.reducing import LANE_DEADLINE_S, LANES_AT_ONCE, ReductionDriver
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, OwnedRange, Participant, Relay
from shoal.protocol.timeouts import CROWD
from shoal.swarm.lanes.frame import FrameHeader
from tests.node.ledger import identity
from tests.node.rounds.reducing_lab import FakeLane, Mesh, digests
from tests.waiting import until

ALL_OWN = 60
"""Chunks of which everybody owns some."""


async def test_reduction_gives_all_desks_the_same_finals_once(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = mesh.plan()
        mesh.start(plan)
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1
        for (finals, seconds), *more in mesh.done:
            assert not more
            assert finals.plan == plan
            assert finals.coverage == 1.0
            assert 0 <= seconds < 15
        pairs = {(me, peer) for me in mesh.peers for peer in mesh.peers if me != peer}
        assert set(mesh.ensured) == pairs
        assert [driver.stalled() for driver in mesh.drivers] == [None] * 3


async def test_lanes_are_brought_up_ahead_by_one_of_two_each_beginning_with_who_comes_after_it(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 5)
    a, b, c, d, e = sorted(mesh.peers)
    driver = mesh.drivers[mesh.peers.index(c)]
    async with mesh.running():
        driver.bring_up_lanes(frozenset({a, b, d, e}), ALL_OWN)
        await until(lambda: len(mesh.ensured) >= 4)
        assert mesh.ensured == [(c, d), (c, e), (c, a), (c, b)]


async def test_lanes_are_brought_up_only_where_one_of_the_two_will_own_chunks(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 5)
    a, b, c, d, e = sorted(mesh.peers)
    by_peer = dict(zip(mesh.peers, mesh.drivers, strict=True))
    everybody = frozenset(mesh.peers)
    async with mesh.running():
        by_peer[b].bring_up_lanes(everybody - {b}, 2)
        await until(lambda: len(mesh.ensured) >= 4)
        by_peer[d].bring_up_lanes(everybody - {d}, 2)
        await until(lambda: len(mesh.ensured) >= 6)
        await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        assert mesh.ensured == [(b, c), (b, d), (b, e), (b, a), (d, a), (d, b)]


async def test_who_will_own_chunks_goes_by_the_rates_of_the_last_plan(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 5)
    plan = mesh.plan()
    a, b, c, d, e = sorted(mesh.peers)
    fast = {d: 1 << 30, e: 1 << 30}
    participants = tuple(
        msgspec.structs.replace(one, upload=rate, download=rate)
        for one in plan.participants
        for rate in [fast.get(one.peer, 1 << 20)]
    )
    driver = mesh.drivers[mesh.peers.index(a)]
    async with mesh.running():
        mesh.start(msgspec.structs.replace(plan, participants=participants))
        await until(lambda: all(mesh.done))
        mesh.ensured.clear()
        driver.bring_up_lanes(frozenset({b, c, d, e}), 2)
        await until(lambda: len(mesh.ensured) >= 2)
        await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        assert mesh.ensured == [(a, d), (a, e)]


async def test_who_owns_no_chunk_makes_lanes_only_to_owners(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 5)
    plan = mesh.plan()
    owner = plan.participants[2].peer
    plan = msgspec.structs.replace(plan, owners=(OwnedRange(2, 0, plan.chunks),))
    async with mesh.running():
        mesh.start(plan)
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1
        others = set(mesh.peers) - {owner}
        assert set(mesh.ensured) == {(owner, peer) for peer in others} | {(peer, owner) for peer in others}


async def test_few_lanes_are_made_at_once_and_in_a_crowd_each_is_given_longer(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2)
    lanes, driver = mesh.lanes[0], mesh.drivers[0]
    under_way, most, deadlines = 0, 0, list[float]()

    async def ensure(peer: PeerId, *, deadline_s: float) -> None:
        nonlocal under_way, most
        deadlines.append(deadline_s)
        under_way += 1
        most = max(most, under_way)
        await trio.testing.wait_all_tasks_blocked()
        under_way -= 1

    lanes.ensure = ensure
    async with mesh.running():
        async with trio.open_nursery() as nursery:
            for number in range(3 * LANES_AT_ONCE):
                nursery.start_soon(driver.ensure_lane, PeerId(f"peer {number}"))
        assert most == LANES_AT_ONCE
        assert deadlines == [LANE_DEADLINE_S] * 3 * LANES_AT_ONCE
        deadlines.clear()
        crowd = frozenset(PeerId(f"peer {number}") for number in range(3 * CROWD - 1))
        dialled = [peer for peer in crowd if dials_first(mesh.peers[0], peer, {*crowd, mesh.peers[0]})]
        assert 0.3 < len(dialled) / len(crowd) < 0.7
        driver.bring_up_lanes(crowd, ALL_OWN)
        await until(lambda: len(deadlines) >= len(dialled))
        await trio.testing.wait_all_tasks_blocked()
        assert deadlines == [3 * LANE_DEADLINE_S] * len(dialled)


async def test_in_a_crowd_one_of_two_in_a_plan_leaves_the_lane_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "CROWD", 1)
    mesh, left = Mesh(tmp_path, 2), list[PeerId]()

    async def comes(peer: PeerId, *, within_s: float) -> bool:
        left.append(peer)
        return True

    for lanes in mesh.lanes:
        lanes.comes = comes
    one, other = mesh.peers
    first, second = (one, other) if dials_first(one, other, mesh.peers) else (other, one)
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: all(mesh.done))
        assert (left, mesh.ensured) == ([first], [(first, second)])


async def test_in_a_crowd_one_of_two_dials_and_the_other_only_where_no_lane_comes(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2)
    lanes, driver, me = mesh.lanes[0], mesh.drivers[0], mesh.peers[0]
    crowd = [PeerId(f"peer {number}") for number in range(2 * CROWD - 1)]
    asked, given, left = list[PeerId](), list[float](), list[tuple[PeerId, float]]()
    comes = True

    async def ensure(peer: PeerId, *, deadline_s: float) -> None:
        asked.append(peer)
        given.append(deadline_s)

    async def comes_by_itself(peer: PeerId, *, within_s: float) -> bool:
        left.append((peer, within_s))
        return comes

    lanes.ensure, lanes.comes = ensure, comes_by_itself
    async with mesh.running():
        driver.bring_up_lanes(frozenset(crowd), 2)  # this node and another own all
        await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        other = next(iter(driver._owners - {me}))
        assert me in driver._owners
        assert asked == [peer for peer in [other] if dials_first(me, peer, driver._owners)]
        asked.clear()
        stranger = next(peer for peer in crowd if peer != other)
        driver.unreachable = {stranger}
        await driver._have_lanes({stranger}, trio.Event(), {stranger})
        assert (asked, left, driver.unreachable) == ([], [(stranger, pytest.approx(LANE_DEADLINE_S))], set())
        assert await driver.ensure_lane(stranger), "something is to be sent"
        assert (asked, len(left)) == ([stranger], 1)
        assert given.pop() == pytest.approx(2 * LANE_DEADLINE_S)
        comes = False
        await driver._have_lanes({stranger}, trio.Event(), {stranger})
        assert (asked, len(left)) == ([stranger] * 2, 2)
        assert given.pop() == pytest.approx(LANE_DEADLINE_S), "no more than the rest of what a lane is given"


@pytest.mark.parametrize("owners", ["ab", "a", ""])
def test_of_two_one_is_first_to_dial_and_who_owns_nothing_where_the_other_owns(owners: str) -> None:
    names = [PeerId(f"{first}{last}") for first in "ab" for last in "0123456789"]
    own = {name for name in names if name[0] in owners}
    pairs = [(one, other) for one in names for other in names if one != other]
    assert all(dials_first(one, other, own) != dials_first(other, one, own) for one, other in pairs)
    assert all(dials_first(one, other, own) for one, other in pairs if other in own and one not in own)
    if owners != "a":
        share = [sum(dials_first(one, other, own) for other in names if other != one) for one in names]
        assert 5 <= min(share) <= max(share) <= 14


async def test_lanes_that_cannot_be_brought_up_ahead_keep_nobody_from_the_others_nor_count_as_out_of_reach(
    tmp_path: Path,
) -> None:
    mesh = Mesh(tmp_path, 3)
    a, b, c = sorted(mesh.peers)
    mesh.unreachable = {b}
    driver = mesh.drivers[mesh.peers.index(a)]
    async with mesh.running():
        driver.bring_up_lanes(frozenset({b, c}), ALL_OWN)
        await until(lambda: (a, c) in mesh.ensured)
        assert not driver.unreachable


async def test_peer_to_which_a_lane_came_up_ahead_is_within_reach_again(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2)
    driver, other = mesh.drivers[0], mesh.peers[1]
    async with mesh.running():
        mesh.unreachable = {other}
        assert not await driver.ensure_lane(other)
        assert driver.unreachable == {other}
        mesh.unreachable = set()
        driver.bring_up_lanes(frozenset({other}), ALL_OWN)
        await until(lambda: len(mesh.ensured) == 2)
        assert not driver.unreachable


async def test_lanes_asked_for_anew_take_the_place_of_those_not_come_to(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    a, b, c = sorted(mesh.peers)
    lanes, driver = mesh.lanes[mesh.peers.index(a)], mesh.drivers[mesh.peers.index(a)]
    ensure, hung = lanes.ensure, trio.Event()

    async def hang(peer: PeerId, *, deadline_s: float) -> None:
        hung.set()
        await trio.sleep_forever()

    async with mesh.running():
        lanes.ensure = hang
        driver.bring_up_lanes(frozenset({b, c}), ALL_OWN)
        await hung.wait()
        lanes.ensure = ensure
        driver.bring_up_lanes(frozenset({c}), ALL_OWN)
        await until(lambda: (a, c) in mesh.ensured)
        with trio.fail_after(30):
            await trio.testing.wait_all_tasks_blocked(cushion=0.02)
        assert mesh.ensured == [(a, c)]


async def test_lane_that_takes_longer_than_it_is_waited_for_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "LANE_HEAD_START_S", 0.01)
    mesh = Mesh(tmp_path, 3)
    a, b = mesh.peers[:2]
    ensure, begun, goes_on, cancelled = mesh.lanes[0].ensure, trio.Event(), trio.Event(), []

    async def take_long(peer: PeerId, *, deadline_s: float) -> None:
        begun.set()
        try:
            await goes_on.wait()
        except trio.Cancelled:
            cancelled.append(peer)
            raise
        await ensure(peer, deadline_s=deadline_s)

    mesh.lanes[0].ensure = take_long
    mesh.broken |= {(a, b)}
    async with mesh.running():
        mesh.start(mesh.plan())
        await begun.wait()
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        await until(lambda: mesh.traffics[0].owed() == {b})  # it has begun without
        assert not cancelled
        goes_on.set()
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1


async def test_a_driver_looks_around_while_a_reduction_is_under_way_and_at_no_other_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[ReductionDriver] = []
    monkeypatch.setattr(ReductionDriver, "_look", lambda driver: looks.append(driver))
    monkeypatch.setattr(reducing, "LOOK_PERIOD_S", 0.001)
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        for _ in range(2):
            mesh.start(mesh.plan())
            await until(lambda: set(looks) == set(mesh.drivers))
            for driver in mesh.drivers:
                driver.stop()
            with trio.fail_after(30):  # while a timer runs there is no such moment
                await trio.testing.wait_all_tasks_blocked(cushion=0.02)
            looks.clear()


async def test_a_driver_asks_for_room_at_relays_only_while_something_is_relayed(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    driver = mesh.drivers[0]

    async def asks() -> bool:
        with trio.move_on_after(0.05) as waiting:
            await driver.until_relayed()
        return not waiting.cancelled_caught

    async with mesh.running():
        plan = mesh.plan()
        relayed = msgspec.structs.replace(plan, relays=(Relay(0, 1, via=2),))
        driver.start(plan, mesh.contributions[0])
        assert not await asks(), "all are reached"
        driver.repair(msgspec.structs.replace(relayed, origin=plan.lineage, attempt=1), mesh.contributions[0], {})
        assert await asks()
        driver.stop()
        assert not await asks()
        driver.start(plan, mesh.contributions[0])
        assert not await asks(), "nor for a plan that was left"
        driver.start(relayed, mesh.contributions[0])
        assert await asks()


async def test_who_waits_through_a_plan_without_relays_asks_for_room_under_the_next_with_some(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    driver, asks = mesh.drivers[0], trio.Event()

    async def wait() -> None:
        await driver.until_relayed()
        asks.set()

    async with mesh.running(), trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        driver.start(mesh.plan(), mesh.contributions[0])
        driver.stop()
        assert not asks.is_set()
        relayed = msgspec.structs.replace(mesh.plan(), relays=(Relay(0, 1, via=2),))
        driver.start(relayed, mesh.contributions[0])
        with trio.fail_after(5):
            await asks.wait()


async def test_who_is_through_leaves_the_processor_to_neighbours_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "NEIGHBOUR_SHARE", 1e6)
    monkeypatch.setattr(reducing, "NEIGHBOUR_LIMIT_S", 60.0)
    mesh = Mesh(tmp_path, 3)
    waits = mesh.lanes[0].neighbours[mesh.peers[1]] = FakeLane(neighbour_waits=True)
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: mesh.done[1] and mesh.done[2])
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        await until(lambda: reduction.final_chunks == reduction.plan.chunks)
        with trio.move_on_after(0.1):
            await until(lambda: mesh.done[0])
        assert not mesh.done[0], "its neighbour has yet to take something"
        waits.neighbour_waits = False
        await until(lambda: mesh.done[0])
        assert len(set(digests(mesh))) == 1


async def test_a_neighbour_that_takes_nothing_is_not_waited_for_long(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    mesh.lanes[0].neighbours[mesh.peers[1]] = FakeLane(neighbour_waits=True)
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1


async def test_finals_are_told_of_before_their_check_and_each_after_it(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    begun: list[Finals] = []
    used: list[tuple[int, bool]] = []

    def begin(finals: Finals) -> UseFinal:
        assert not finals.sound, "not checked yet"
        begun.append(finals)
        return lambda final: used.append((final.chunk, final.sound))

    mesh.drivers[1].begin = begin
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: all(mesh.done))
    ((finals, _),) = mesh.done[1]
    assert [one.plan for one in begun] == [finals.plan]
    assert all(ours is other for ours, other in zip(begun[0].chunks, finals.chunks, strict=True))
    assert sorted(used) == [(chunk, True) for chunk in range(finals.plan.chunks)]


def test_neighbours_are_peers_with_a_lane_within_the_machine(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 4)
    mesh.lanes[0].neighbours[mesh.peers[1]] = FakeLane()
    mesh.lanes[0].neighbours[mesh.peers[2]] = FakeLane(is_local=False)
    assert mesh.drivers[0].neighbours(mesh.peers) == {mesh.peers[1]}
    assert mesh.drivers[0].neighbours(mesh.peers[2:]) == frozenset()
    mesh.events.close()


async def test_memory_of_a_reduction_is_free_as_soon_as_it_is_over(tmp_path: Path) -> None:
    """Payloads' memory is used again by the next reduction; a cycle of references would keep it for some rounds."""

    gc.collect()
    gc.disable()
    try:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            mesh.start(mesh.plan())
            await until(lambda: all(mesh.done))
            reductions = [weakref.ref(driver._reduction) for driver in mesh.drivers if driver._reduction is not None]
            for driver in mesh.drivers:
                driver.stop()
            await until(lambda: not any(ref() for ref in reductions))
            assert len(reductions) == 3
    finally:
        gc.enable()


async def test_member_without_weight_gives_nothing_and_gets_the_finals(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    async with mesh.running():
        plan = mesh.plan(weightless=(2,))
        mesh.start(plan)  # the driver is handed its contribution, and does not use it
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1
        finals = mesh.done[2][0][0]
        assert finals.bitmaps == (b"\x03",) * 3


async def test_new_plan_replaces_the_reduction_under_way(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    mesh.lose = lambda sender, header: header.attempt == 0
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: len(mesh.ensured) >= 6)
        again = mesh.plan(attempt=1)
        mesh.start(again)
        await until(lambda: all(mesh.done))
        assert [done[0][0].plan for done in mesh.done] == [again] * 3
        assert len(set(digests(mesh))) == 1


def pass_gate(reduction: Reduction) -> None:
    """Wait for whoever is behind the gate, and hold nobody up who comes after."""
    with reduction._gate:
        pass


async def test_stopped_reduction_reports_nothing(tmp_path: Path) -> None:
    hold = Hold(round=1, phase="reduce", progress=1.0)
    mesh = Mesh(tmp_path, 2, holds={0: (hold,)})
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: mesh.done[1] and "holding" in (tmp_path / "events.jsonl").read_text())
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        mesh.drivers[0].stop()
        mesh.holds[0].release()
        await trio.to_thread.run_sync(pass_gate, reduction)  # who was held has said all that it will say
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert mesh.done[0] == []


async def test_hold_stops_the_reduction_where_it_says(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 2, holds={0: (Hold(round=1, phase="reduce", progress=0.5),)})
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: '"progress":0.667' in (tmp_path / "events.jsonl").read_text())
        assert mesh.done[0] == []
        mesh.holds[0].release()
        await until(lambda: all(mesh.done))
        assert len(set(digests(mesh))) == 1


async def test_broken_lanes_are_mended_and_nothing_is_missing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    lost: list[FrameHeader] = []

    def lose_first(sender: PeerId, header: FrameHeader) -> bool:
        if len(lost) < 3:
            lost.append(header)
            mesh.broken.update((a, b) for a in mesh.peers for b in mesh.peers if a != b)
            return True
        return False

    mesh.lose = lose_first
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: lost)
        for traffic in mesh.traffics:
            for peer in mesh.peers:
                traffic.lane_failed(peer)
        while not all(mesh.done):
            for traffic in mesh.traffics:  # they go on failing until all three were lost
                for peer in mesh.peers:
                    traffic.lane_failed(peer)
            await trio.sleep(0.05)
        assert len(set(digests(mesh))) == 1
        assert mesh.done[0][0][0].coverage == 1.0


async def test_plans_full_of_relays_that_come_one_after_the_other_are_followed(tmp_path: Path) -> None:
    """A lead may have a member reach everybody through others, and plan again at once: it is still only a plan."""
    mesh = Mesh(tmp_path, 2)
    strangers = [Participant(identity(100 + n).peer_id, 0, 0, NO_HASH) for n in range(62)]
    async with mesh.running():
        for attempt in range(8):
            plan = mesh.plan(attempt=attempt)
            seats = (*plan.participants, *strangers)
            me = plan.number(mesh.peers[1])
            relays = tuple(Relay(*sorted((n, me)), via=1 - me) for n in range(2, len(seats)))
            mesh.drivers[1].start(
                msgspec.structs.replace(plan, participants=seats, relays=relays), mesh.contributions[1]
            )
            for _ in range(4):
                await trio.lowlevel.checkpoint()
