"""The reductions of a round at real desks in one process, over lanes that are function calls in threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.partition import deal
from shoal.collectives.traffic import PlanTraffic
from shoal.node.config import Hold
from shoal.node.holds import Holds
from shoal.node.reporting.events import EventLog
from shoal.node.rounds import reducing
from shoal.node.rounds.pace import LATE_S, STALL_S, Stall
from shoal.node.rounds.reducing import DETOUR_S, ReduceDesk
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Held, Participant, Plan, Relay, Term, Value
from shoal.protocol.planning import PlanSeat
from shoal.protocol.repair import revise_plan
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.moved import Moved
from tests.node.ledger import GRID, Ledger, finals_of, identity, plan_of, vector

LEDGER = Ledger()
STEP_S = 0.2
NOBODY: frozenset[PeerId] = frozenset()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded, strict_exception_groups=True)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.002)


@dataclass
class FakeCatchUp:
    """Knows some finals; what it does not know nobody has."""

    known: dict[bytes, Finals] = field(default_factory=dict)
    asked: list[tuple[bytes, tuple[PeerId, ...]]] = field(default_factory=list)
    error: Exception | None = None

    async def finals(self, plan_hash: bytes, peers: Sequence[PeerId]) -> Finals:
        self.asked.append((plan_hash, tuple(peers)))
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        if plan_hash not in self.known:
            raise NetworkError("no peer has the finals")
        return self.known[plan_hash]


@dataclass
class Clock:
    """A clock that only the test turns forward, so that a slow machine changes nothing."""

    ahead_s: float = 0.0
    started_at: float = field(default_factory=time.monotonic)

    def monotonic(self) -> float:
        return self.started_at + self.ahead_s

    async def pass_time(self, mesh: Mesh, seconds: float) -> None:
        """In steps in which every desk looks around."""
        ends_at = self.ahead_s + seconds
        while self.ahead_s < ends_at:
            self.ahead_s = min(self.ahead_s + STEP_S, ends_at)
            looked = [lanes.looks for lanes in mesh.lanes]
            others = len(mesh.peers) - 1
            busy = [i for i, desk in enumerate(mesh.desks) if desk._pace is not None]
            await until(lambda: all(mesh.lanes[i].looks >= looked[i] + 6 * others for i in busy))  # noqa: B023


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reducing, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(reducing, "LOOK_PERIOD_S", 0.002)
    return clock


@dataclass
class FakeLanes:
    """What a desk sees of a node's lanes; `looks` counts how often it asked what has moved."""

    ensure: Callable[..., Awaitable[None]]
    received: dict[PeerId, int] = field(default_factory=dict)
    dropped: list[PeerId] = field(default_factory=list)
    queued: dict[PeerId, int] = field(default_factory=dict)
    looks: int = 0

    def moved(self, peer: PeerId) -> Moved:
        self.looks += 1
        return Moved(received=self.received.get(peer, 0))

    def queued_bytes(self, peer: PeerId) -> int:
        return self.queued.get(peer, 0)

    def drop(self, peer: PeerId) -> None:
        self.dropped.append(peer)


class Mesh:
    """Desks joined by lanes. A frame for which `lose` is true is lost; who is in `unreachable` has no lane.

    `lose_between` is of sender and receiver.
    """

    def __init__(self, folder: Path, count: int, *, holds: dict[int, tuple[Hold, ...]] | None = None) -> None:
        self.events = EventLog(folder / "events.jsonl")
        self.contributions = [EncodedContribution.encode(vector(n), GRID, "int8") for n in range(count)]
        self.identities = [identity(n + 1) for n in range(count)]
        self.peers = [one.peer_id for one in self.identities]
        self.traffics = [PlanTraffic(post=self.poster(peer), waiting=lambda to, scope: ()) for peer in self.peers]
        self.catchups = [FakeCatchUp() for _ in self.peers]
        self.done: list[list[tuple[Finals, float]]] = [[] for _ in self.peers]
        self.lose: Callable[[PeerId, FrameHeader], bool] = lambda sender, header: False
        self.lose_between: Callable[[PeerId, PeerId], bool] = lambda sender, to: False
        self.unreachable: set[PeerId] = set()
        self.broken: set[tuple[PeerId, PeerId]] = set()
        self.ensured: list[tuple[PeerId, PeerId]] = []
        self.lanes = [FakeLanes(self.ensurer(peer)) for peer in self.peers]
        self.holds = [Holds((holds or {}).get(n, ()), self.events) for n in range(count)]
        self.desks = [self.desk(n) for n in range(count)]

    def desk(self, n: int) -> ReduceDesk:
        def done(finals: Finals, seconds: float) -> None:
            self.done[n].append((finals, seconds))

        return ReduceDesk(
            identity=self.identities[n],
            lanes=self.lanes[n],  # type: ignore[arg-type]
            traffic=self.traffics[n],
            catchup=self.catchups[n],  # type: ignore[arg-type]
            holds=self.holds[n],
            done=done,
        )

    def ensurer(self, me: PeerId) -> Callable[..., Awaitable[None]]:
        async def ensure(peer: PeerId, *, deadline_s: float) -> None:
            await trio.lowlevel.checkpoint()
            self.ensured.append((me, peer))
            if peer in self.unreachable:
                raise NetworkError(f"no lane to {peer}")
            self.broken.discard((me, peer))

        return ensure

    def poster(self, sender: PeerId) -> Callable[[PeerId, FrameHeader, memoryview | bytes], None]:
        def post(to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
            if to in self.unreachable or (sender, to) in self.broken:
                raise NetworkError(f"there is no lane to {to}")
            if not self.lose(sender, header) and not self.lose_between(sender, to):
                threading.Thread(target=self.deliver, args=(sender, to, header, bytes(payload)), daemon=True).start()

        return post

    def deliver(self, sender: PeerId, to: PeerId, header: FrameHeader, payload: bytes) -> None:
        traffic, lanes = self.traffics[self.peers.index(to)], self.lanes[self.peers.index(to)]
        lanes.received[sender] = lanes.received.get(sender, 0) + len(payload)
        if header.kind is FrameKind.LACKING:
            traffic.received(sender, header, memoryview(payload))
            return
        region = traffic.region(sender, header)
        if region is not None:
            region[:] = payload
            traffic.received(sender, header, region)

    def plan(self, *, attempt: int = 0, weightless: tuple[int, ...] = ()) -> Plan:
        plan = plan_of(self.identities, LEDGER.chain.head)
        seats = tuple(
            Participant(p, 0, 0, NO_HASH) if n in weightless else Participant(p, 1, 10, self.contributions[n].root)
            for n, p in enumerate(self.peers)
        )
        return msgspec.structs.replace(plan, participants=seats, attempt=attempt)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with trio.open_nursery() as nursery:
                for desk in self.desks:
                    nursery.start_soon(desk.run)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.events.close()

    def start(self, plan: Plan, *nodes: int) -> None:
        for n in nodes or range(len(self.desks)):
            self.desks[n].start(plan, self.contributions[n])


def digests(mesh: Mesh) -> list[bytes]:
    return [done[-1][0].concatenated() for done in mesh.done]


def test_reduction_gives_all_desks_the_same_finals_once(tmp_path: Path) -> None:
    async def main() -> None:
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
            assert [desk.stalled() for desk in mesh.desks] == [None] * 3

    run(main)


def test_memory_of_a_reduction_is_free_as_soon_as_it_is_over(tmp_path: Path) -> None:
    """Payloads' memory is used again by the next reduction; a cycle of references would keep it for some rounds."""

    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            mesh.start(mesh.plan())
            await until(lambda: all(mesh.done))
            reductions = [weakref.ref(desk._reduction) for desk in mesh.desks if desk._reduction is not None]
            for desk in mesh.desks:
                desk.stop()
            await until(lambda: not any(ref() for ref in reductions))
            assert len(reductions) == 3

    gc.collect()
    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


def test_member_without_weight_gives_nothing_and_gets_the_finals(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            plan = mesh.plan(weightless=(2,))
            mesh.start(plan)  # the desk is handed its contribution, and does not use it
            await until(lambda: all(mesh.done))
            assert len(set(digests(mesh))) == 1
            finals = mesh.done[2][0][0]
            assert finals.bitmaps == (b"\x03",) * 3

    run(main)


def test_new_plan_replaces_the_reduction_under_way(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_stopped_reduction_reports_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        hold = Hold(round=1, phase="reduce", progress=1.0)
        mesh = Mesh(tmp_path, 2, holds={0: (hold,)})
        async with mesh.running():
            mesh.start(mesh.plan())
            await until(lambda: mesh.done[1] and "holding" in (tmp_path / "events.jsonl").read_text())
            reduction = mesh.desks[0]._reduction
            assert reduction is not None
            mesh.desks[0].stop()
            mesh.holds[0].release()
            await trio.to_thread.run_sync(reduction._gate.acquire)  # it has said all that it will say
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert mesh.done[0] == []

    run(main)


def test_hold_stops_the_reduction_where_it_says(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 2, holds={0: (Hold(round=1, phase="reduce", progress=0.5),)})
        async with mesh.running():
            mesh.start(mesh.plan())
            await until(lambda: '"progress":0.667' in (tmp_path / "events.jsonl").read_text())
            assert mesh.done[0] == []
            mesh.holds[0].release()
            await until(lambda: all(mesh.done))
            assert len(set(digests(mesh))) == 1

    run(main)


def test_broken_lanes_are_mended_and_nothing_is_missing(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


# -- stalls --------------------------------------------------------------------------------------------------


def test_who_owes_a_contribution_and_is_silent_is_accused(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        mute = mesh.peers[2]
        mesh.lose = lambda sender, header: sender == mute
        async with mesh.running():
            mesh.start(mesh.plan())
            desk = mesh.desks[0]
            reduction = desk._reduction
            assert reduction is not None
            await until(lambda: reduction.waiting_for().contributions == {mute})
            assert desk.stalled() is None
            await clock.pass_time(mesh, STALL_S - 0.5)
            assert desk.stalled() is None
            await clock.pass_time(mesh, 1.0)
            # The other's finals are missing too, since it waits for the mute one itself; they are late only later.
            assert desk.stalled() == Stall(frozenset({mute}), NOBODY)
            assert desk.stalled() is None  # not told again at once
            await clock.pass_time(mesh, LATE_S)
            assert desk.stalled() == Stall(frozenset({mute}), frozenset({mesh.peers[1]}))
            await clock.pass_time(mesh, STALL_S)
            assert desk.stalled() == Stall(frozenset({mute}), frozenset({mesh.peers[1]}))
            desk.stop()
            assert desk.stalled() is None

    run(main)


def test_who_takes_nothing_of_what_is_queued_is_accused(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        deaf = mesh.peers[2]
        mesh.lose = lambda sender, header: sender == deaf
        async with mesh.running():
            mesh.start(mesh.plan(weightless=(2,)))  # it owes no contribution
            mesh.lanes[0].queued[deaf] = 1
            await clock.pass_time(mesh, STALL_S + 0.5)
            stall = mesh.desks[0].stalled()
            assert stall is not None
            assert stall.peers == {deaf}

    run(main)


def test_who_owes_only_finals_gets_longer(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        owner = mesh.peers[1]
        mesh.lose = lambda sender, header: sender == owner and header.kind is FrameKind.FINAL
        async with mesh.running():
            mesh.start(mesh.plan())
            desk = mesh.desks[0]
            reduction = desk._reduction
            assert reduction is not None
            await until(lambda: reduction.final_chunks == 2)
            assert reduction.waiting_for().finals == {owner}
            await clock.pass_time(mesh, STALL_S + LATE_S - 0.5)
            assert desk.stalled() is None
            await clock.pass_time(mesh, 1.0)
            assert desk.stalled() == Stall(NOBODY, frozenset({owner}))

    run(main)


def test_plans_of_other_leads_double_the_stall_deadline_until_the_round_is_over(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        mesh.lose = lambda sender, header: sender == mesh.peers[2]
        desk, mute = mesh.desks[0], {mesh.peers[2]}

        async def accuses_after(plan: Plan) -> float:
            mesh.start(plan)
            await until(lambda: desk._reduction is not None and desk._reduction.waiting_for().contributions == mute)
            began = clock.ahead_s
            while not desk._stall.peers:
                await clock.pass_time(mesh, STEP_S)
            return clock.ahead_s - began

        async with mesh.running():
            assert await accuses_after(mesh.plan()) < STALL_S + 0.5
            second = msgspec.structs.replace(mesh.plan(), view=1)
            assert 2 * STALL_S - 0.5 < await accuses_after(second) < 2 * STALL_S + 0.5
            for one in mesh.desks:
                one.forget()
            assert await accuses_after(msgspec.structs.replace(mesh.plan(), round=2)) < STALL_S + 0.5

    run(main)


def test_finished_reduction_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 2)
        async with mesh.running():
            assert mesh.desks[0].stalled() is None
            mesh.start(mesh.plan())
            await until(lambda: all(mesh.done))
            await clock.pass_time(mesh, STALL_S + LATE_S + 1)
            assert [desk.stalled() for desk in mesh.desks] == [None, None]

    run(main)


def test_peer_without_a_lane_stalls_and_others_go_on(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        mesh.unreachable = {mesh.peers[2]}
        mesh.lose = lambda sender, header: sender == mesh.peers[2]
        async with mesh.running():
            mesh.start(mesh.plan())
            reduction = mesh.desks[0]._reduction
            assert reduction is not None
            await until(lambda: reduction.waiting_for().contributions == {mesh.peers[2]})
            assert mesh.desks[0].unreachable == {mesh.peers[2]}
            await clock.pass_time(mesh, STALL_S + 0.5)
            assert mesh.desks[0].stalled() == Stall(frozenset({mesh.peers[2]}), NOBODY)

    run(main)


def test_peer_to_whom_a_lane_takes_long_keeps_the_others_waiting_for_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        slow, dials = mesh.peers[2], mesh.lanes[0].ensure

        async def ensure(peer: PeerId, *, deadline_s: float) -> None:
            if peer == slow and not arrived:
                await trio.sleep(deadline_s)
                raise NetworkError("no lane yet")
            await dials(peer, deadline_s=deadline_s)

        arrived: list[PeerId] = []
        mesh.lanes[0].ensure = ensure

        def note(sender: PeerId, header: FrameHeader) -> bool:
            if sender == mesh.peers[0] and header.kind is FrameKind.CONTRIBUTION:
                arrived.append(sender)
            return False

        mesh.lose = note
        async with mesh.running():
            began = time.monotonic()
            mesh.start(mesh.plan())
            await until(lambda: arrived)
            assert time.monotonic() - began < reducing.LANE_DEADLINE_S / 2, "it posts to who is there"

    run(main)


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
            chunks=await mesh.desks[n].close_off(plan.lineage, evicted),
        )
        for n, peer in enumerate(mesh.peers)
        if peer not in evicted
    }
    seat = PlanSeat(view=0, attempt=plan.attempt + 1, planner=plan.planner, evicted=tuple(sorted(evicted)))
    return revise_plan(plan, seat, helds, deal), helds


def test_repair_goes_on_without_the_lost_from_what_is_there(tmp_path: Path) -> None:
    async def main() -> None:
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
            reduction = mesh.desks[0]._reduction
            assert reduction is not None
            await until(lambda: reduction.waiting_for().contributions == {mute})
            again, helds = await revised(mesh, plan, 2)
            assert [lanes.dropped for lanes in mesh.lanes[:2]] == [[mute], [mute]]
            mesh.desks[0]._stall = Stall(frozenset({mute}), NOBODY)
            for n in (0, 1):
                mesh.desks[n].repair(again, mesh.contributions[n], helds)
            assert mesh.desks[0].stalled() is None, "that was under another plan"
            await until(lambda: mesh.done[0] and mesh.done[1])
            assert mesh.desks[0]._reduction is reduction, "the same reduction goes on"
            assert [mesh.done[n][0][0].plan for n in (0, 1)] == [again, again]
            assert len({mesh.done[n][0][0].concatenated() for n in (0, 1)}) == 1
            assert mesh.done[0][0][0].bitmaps == (b"\x03",) * 3
            # Of the two contributions of those who stay only the lost owner's chunk travels again.
            again_sent = [h.chunk for h in sent if h.kind is FrameKind.CONTRIBUTION and h.attempt == 1]
            assert len(again_sent) == 1

    run(main)


def test_repair_of_a_reduction_that_is_not_under_way_starts_it(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        mesh.lose = lambda sender, header: sender == mesh.peers[2]
        async with mesh.running():
            plan = mesh.plan()
            mesh.start(plan, 0)
            again, helds = await revised(mesh, plan, 2)
            for n in (0, 1):
                mesh.desks[n].repair(again, mesh.contributions[n], helds)
            await until(lambda: mesh.done[0] and mesh.done[1])
            assert len({mesh.done[n][0][0].concatenated() for n in (0, 1)}) == 1

    run(main)


def test_reduction_that_begins_again_signs_nothing_anew(tmp_path: Path) -> None:
    """A lead may plan anew and lose its view to one who repairs the first plan: all take that up again."""

    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        async with mesh.running():
            plan = mesh.plan()
            mesh.start(plan)
            await until(lambda: all(mesh.done))
            before = mesh.done[0][0][0]
            again, _ = await revised(mesh, plan, 2)
            mesh.desks[0].start(mesh.plan(attempt=1), mesh.contributions[0])
            mesh.lose = lambda sender, header: sender == mesh.peers[2]  # its contributions are in what was signed
            for n in (0, 1):
                mesh.desks[n].repair(again, mesh.contributions[n], {})
            await until(lambda: all(len(mesh.done[n]) == 2 for n in (0, 1)))
            mine = [c.chunk for c in before.chunks if c.owner == mesh.peers[0]]
            for n in (0, 1):
                after = mesh.done[n][1][0]
                assert mine
                assert all(bytes(after.chunks[c].payload) == bytes(before.chunks[c].payload) for c in mine)
            mesh.desks[0].forget()
            assert not mesh.desks[0]._kept, "the next round has other lineages"

    run(main)


def test_eviction_that_is_heard_before_its_plan_binds(tmp_path: Path) -> None:
    async def main() -> None:
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
            assert await mesh.desks[0].close_off(plan.lineage, frozenset({gone})) == ()
            mesh.start(plan)
            reduction = mesh.desks[0]._reduction
            assert reduction is not None
            await until(lambda: reduction.waiting_for().contributions == {gone})
            await until(lambda: FrameKind.CONTRIBUTION in delivered)
            assert gone not in reduction.received_bytes

    run(main)


# -- peers that are reached through another ------------------------------------------------------------------


def relayed(plan: Plan, *, attempt: int, round: int = 1) -> Plan:
    """The plan with participants 0 and 1 reaching each other through 2."""
    origin = plan.lineage if attempt else NO_HASH
    return msgspec.structs.replace(plan, relays=(Relay(0, 1, 2),), attempt=attempt, origin=origin, round=round)


def test_pair_over_whose_lane_nothing_moves_is_known_to_be_apart(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        one, other, _ = mesh.peers
        apart = {one, other}
        mesh.lose_between = lambda sender, to: {sender, to} == apart
        async with mesh.running():
            plan = mesh.plan()
            mesh.start(plan)
            await until(lambda: all(desk._reduction.waiting_for().contributions for desk in mesh.desks[:2]))  # type: ignore[union-attr]
            for n, desk in enumerate(mesh.desks):
                desk.repair(relayed(plan, attempt=1), mesh.contributions[n], {})
            await until(lambda: all(mesh.done))
            assert len(set(digests(mesh))) == 1
            assert mesh.done[0][0][0].bitmaps == (b"\x07",) * 3, "all contributions are in all chunks"
            assert [desk.unreachable for desk in mesh.desks] == [{other}, {one}, set()]
            assert [lanes.dropped for lanes in mesh.lanes] == [[other], [one], []]

    run(main)


def test_pair_that_is_relayed_is_dialled_again_after_a_while(tmp_path: Path, clock: Clock) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 3)
        one, other, third = mesh.peers
        desk = mesh.desks[0]

        async def dials_in(round: int) -> int:
            """How often the desk dials the other in a round whose plan relays the two from the start."""
            before, dialled = mesh.ensured.count((one, other)), mesh.ensured.count((one, third))
            desk.start(relayed(mesh.plan(), attempt=0, round=round), mesh.contributions[0])
            await until(lambda: mesh.ensured.count((one, third)) > dialled)  # which is done after the other
            return mesh.ensured.count((one, other)) - before

        async with mesh.running():
            mesh.unreachable = {other}
            desk._give_up_on(other)
            assert await dials_in(2) == 0
            clock.ahead_s += DETOUR_S
            assert await dials_in(3) == 1
            assert desk.unreachable == {other}, "it failed"
            clock.ahead_s += DETOUR_S
            assert await dials_in(4) == 0, "twice as long this time"
            clock.ahead_s += DETOUR_S
            mesh.unreachable = set()
            assert await dials_in(5) == 1
            assert desk.unreachable == set(), "the next plan may do without the relay"

    run(main)


# -- finals that are fetched ---------------------------------------------------------------------------------


def value_with(plan_hash: bytes) -> Value:
    genesis = LEDGER.empty_chain().head
    return msgspec.structs.replace(genesis, round=1, base=genesis.hash, plan=plan_hash)


def test_fetched_finals_are_handed_over_once(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = Ledger()
        ledger.certify()
        finals = ledger.finals[1]
        mesh = Mesh(tmp_path, 2)
        mesh.catchups[0].known[finals.plan.hash] = finals
        async with mesh.running():
            for _ in range(3):
                mesh.desks[0].fetch(value_with(finals.plan.hash), mesh.peers[1:])
            await until(lambda: mesh.done[0])
            mesh.desks[0].fetch(value_with(finals.plan.hash), mesh.peers[1:])
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert [finals for finals, _ in mesh.done[0]] == [finals]
            assert mesh.catchups[0].asked == [(finals.plan.hash, (mesh.peers[1],))]

    run(main)


@pytest.mark.parametrize("field", ["term", "round", "base"])
def test_fetched_finals_of_another_round_are_dropped(tmp_path: Path, field: str) -> None:
    """A lead may propose the hash of any plan; what it leads to cannot follow this node's state."""

    async def main() -> None:
        ledger = Ledger()
        plan = plan_of(ledger.founders, ledger.chain.head)
        other = {"term": Term(1, 0), "round": 2, "base": bytes(32)}[field]
        strange = finals_of(msgspec.structs.replace(plan, **{field: other}), ledger.founders, seed=1)
        mesh = Mesh(tmp_path, 2)
        mesh.catchups[0].known[strange.plan.hash] = strange
        async with mesh.running():
            mesh.desks[0].fetch(value_with(strange.plan.hash), mesh.peers[1:])
            await until(lambda: mesh.catchups[0].asked)
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert mesh.done[0] == []

    run(main)


@pytest.mark.parametrize("error", [NetworkError("nobody has them"), RemoteError("nonsense", peer="x")])
def test_fetch_that_fails_may_be_tried_again(tmp_path: Path, error: Exception) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 2)
        catchup = mesh.catchups[0]
        catchup.error = error
        async with mesh.running():
            for count in (1, 2, 3):
                mesh.desks[0].fetch(value_with(bytes(32)), [])
                await until(lambda n=count: len(catchup.asked) == n)  # type: ignore[misc]
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            assert mesh.done[0] == []
            mesh.start(mesh.plan())  # and the desk is none the worse for it
            await until(lambda: all(mesh.done))

    run(main)


def test_finals_of_the_reduction_under_way_are_not_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 2)
        mesh.lose = lambda sender, header: True
        async with mesh.running():
            plan = mesh.plan()
            mesh.start(plan)
            mesh.desks[0].fetch(value_with(plan.hash), mesh.peers[1:])
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert mesh.catchups[0].asked == []
            mesh.desks[0].forget()
            mesh.desks[0].fetch(value_with(plan.hash), mesh.peers[1:])
            await until(lambda: mesh.catchups[0].asked)

    run(main)


def test_cancelled_run_closes_the_reduction(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = Mesh(tmp_path, 2)
        mesh.lose = lambda sender, header: True
        async with mesh.running():
            mesh.start(mesh.plan())
            reduction = mesh.desks[0]._reduction
            assert reduction is not None
            await until(lambda: reduction.waiting_for().finals)
        assert reduction.waiting_for().finals == frozenset()
        assert mesh.desks[0]._reduction is None

    run(main)
