"""Reduction drivers joined by lanes in memory, and a clock, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import FinalFormat, Finals, UseFinal
from shoal.collectives.traffic import PlanTraffic
from shoal.node.holds import Holds
from shoal.node.options import Hold
from shoal.node.reporting.event_log import EventLog
from shoal.node.rounds import copying, reducing
from shoal.node.rounds.reducing import ReductionDriver
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Participant, Plan, Value
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.socket import Moved
from tests.node.ledger import GRID, Ledger, identity, plan_of, vector
from tests.waiting import until

LEDGER = Ledger()
STEP_S = 0.2
NOBODY: frozenset[PeerId] = frozenset()


@dataclass
class FakeCatchUp:
    """Knows some finals; what it does not know nobody has."""

    known: dict[bytes, Finals] = field(default_factory=dict)
    asked: list[tuple[bytes, tuple[PeerId, ...]]] = field(default_factory=list)
    copied: list[tuple[bytes, list[int], list[PeerId]]] = field(default_factory=list)
    error: Exception | None = None
    hangs: trio.Event | None = None
    cancelled: bool = False

    async def copy_finals(
        self, final_format: FinalFormat, chunks: Iterable[int], peers: Sequence[PeerId], take: UseFinal
    ) -> None:
        wanted = list(chunks)
        self.copied.append((final_format.plan.hash, wanted, list(peers)))
        try:
            await trio.lowlevel.checkpoint()
            if self.hangs is not None:
                await self.hangs.wait()
        except trio.Cancelled:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        for chunk in wanted:
            take(final_format.open(chunk, self.known[final_format.plan.hash].chunks[chunk].payload.copy()))

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
        """In steps in which every driver looks around."""
        ends_at = self.ahead_s + seconds
        while self.ahead_s < ends_at:
            self.ahead_s = min(self.ahead_s + STEP_S, ends_at)
            looked = [lanes.looks for lanes in mesh.lanes]
            others = len(mesh.peers) - 1
            busy = [i for i, driver in enumerate(mesh.drivers) if driver._pace is not None]
            await until(lambda: all(mesh.lanes[i].looks >= looked[i] + 6 * others for i in busy))  # noqa: B023


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (reducing, copying):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(reducing, "LOOK_PERIOD_S", 0.002)
    return clock


@dataclass
class FakeLane:
    """A lane to a node of this machine."""

    neighbour_waits: bool = False
    is_local: bool = True


async def _comes_not(peer: PeerId, *, within_s: float) -> bool:
    """Nobody dials by itself."""
    return False


@dataclass
class FakeLanes:
    """What a driver sees of a node's lanes; `looks` counts how often it asked what has moved."""

    ensure: Callable[..., Awaitable[None]]
    comes: Callable[..., Awaitable[bool]] = field(default=_comes_not)
    received: dict[PeerId, int] = field(default_factory=dict)
    dropped: list[PeerId] = field(default_factory=list)
    queued: dict[PeerId, int] = field(default_factory=dict)
    neighbours: dict[PeerId, FakeLane] = field(default_factory=dict)
    looks: int = 0

    def lanes_of(self, peer: PeerId) -> list[FakeLane]:
        return [self.neighbours[peer]] if peer in self.neighbours else []

    def moved(self, peer: PeerId) -> Moved:
        self.looks += 1
        return Moved(received=self.received.get(peer, 0))

    def queued_bytes(self, peer: PeerId) -> int:
        return self.queued.get(peer, 0)

    def drop(self, peer: PeerId) -> None:
        self.dropped.append(peer)


class Mesh:
    """Drivers joined by lanes. A frame for which `lose` is true is lost; who is in `unreachable` has no lane.

    `lose_between` and, for finals only, `lose_final` are of sender and receiver.
    """

    def __init__(
        self, folder: Path, count: int, *, holds: dict[int, tuple[Hold, ...]] | None = None, late_s: float = 0.0
    ) -> None:
        self.late_s = late_s
        self.events = EventLog(folder / "events.jsonl")
        self.contributions = [EncodedContribution.encode(vector(n), GRID, "int8") for n in range(count)]
        self.identities = [identity(n + 1) for n in range(count)]
        self.peers = [one.peer_id for one in self.identities]
        self.traffics = [PlanTraffic(post=self.poster(peer), waiting=lambda to, scope: ()) for peer in self.peers]
        self.catchups = [FakeCatchUp() for _ in self.peers]
        self.done: list[list[tuple[Finals, float]]] = [[] for _ in self.peers]
        self.lose: Callable[[PeerId, FrameHeader], bool] = lambda sender, header: False
        self.lose_between: Callable[[PeerId, PeerId], bool] = lambda sender, to: False
        self.lose_final: Callable[[PeerId, PeerId], bool] = lambda sender, to: False
        self.unreachable: set[PeerId] = set()
        self.broken: set[tuple[PeerId, PeerId]] = set()
        self.ensured: list[tuple[PeerId, PeerId]] = []
        self.lanes = [FakeLanes(self.ensurer(peer)) for peer in self.peers]
        self.holds = [Holds((holds or {}).get(n, ()), self.events) for n in range(count)]
        self.drivers = [self.driver(n) for n in range(count)]

    def driver(self, n: int) -> ReductionDriver:
        def done(finals: Finals, seconds: float) -> None:
            self.done[n].append((finals, seconds))

        return ReductionDriver(
            identity=self.identities[n],
            lanes=self.lanes[n],  # type: ignore[arg-type]
            traffic=self.traffics[n],
            catchup=self.catchups[n],  # type: ignore[arg-type]
            holds=self.holds[n],
            done=done,
            late_s=lambda: self.late_s,
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
            lost = header.kind is FrameKind.FINAL and self.lose_final(sender, to)
            if not (lost or self.lose(sender, header) or self.lose_between(sender, to)):
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
                for driver in self.drivers:
                    nursery.start_soon(driver.run)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.events.close()

    def start(self, plan: Plan, *nodes: int) -> None:
        for n in nodes or range(len(self.drivers)):
            self.drivers[n].start(plan, self.contributions[n])


def digests(mesh: Mesh) -> list[bytes]:
    return [done[-1][0].concatenated() for done in mesh.done]


def value_with(plan_hash: bytes) -> Value:
    genesis = LEDGER.empty_chain().head
    return msgspec.structs.replace(genesis, round=1, base=genesis.hash, plan=plan_hash)
