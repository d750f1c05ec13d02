"""Lanes to spare that are retired while the other side does not read: how long they are waited for."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.pool import RETIRE_DEADLINE_S, LanePool
from tests.swarm.lane_net import ALICE, BOB, WAIT_S, Net, lanes_of, open_net, until

FRAMES = 64
"""More than the buffers of two connections on loopback take, so that both lanes stop in the midst of a frame."""
BULK = FrameHeader(kind=FrameKind.STATE, length=FRAME_LIMIT_BYTES, total=FRAME_LIMIT_BYTES)


@dataclass
class ManualClock:
    """The time by which lanes' ends are waited for; it goes on when the test says so."""

    now: float = 0.0
    deadlines_s: list[float] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def join(self, lane: Lane, deadline_s: float) -> bool:
        """As `Lane.join`."""
        with self.changed:
            self.deadlines_s.append(deadline_s)
            until = self.now + deadline_s
            while any(thread.is_alive() for thread in lane._threads) and self.now < until:
                self.changed.wait(0.01)  # threads that end tell nobody
        return not any(thread.is_alive() for thread in lane._threads)

    def go_to(self, now: float) -> None:
        """Let it be so late."""
        with self.changed:
            self.now = now
            self.changed.notify_all()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual = ManualClock()
    monkeypatch.setattr(Lane, "join", lambda lane, deadline_s: manual.join(lane, deadline_s))
    return manual


@asynccontextmanager
async def stuck_lanes() -> AsyncIterator[tuple[Net, LanePool, threading.Event]]:
    """Alice's two lanes to Bob, full of frames that he reads once the event is set."""
    reads = threading.Event()
    async with open_net() as net:
        alice = await net.add(ALICE, limits=LaneLimits(lanes_per_peer=2, lanes_per_peer_limit=2))
        await net.add(BOB, limits=LaneLimits(lanes_per_peer_limit=2))
        take = net.sinks[BOB].received

        def received(peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
            reads.wait(WAIT_S)
            take(peer, header, payload[:1])

        net.sinks[BOB].received = received  # type: ignore[method-assign]
        try:
            await alice.ensure(BOB, deadline_s=WAIT_S)
            payload = bytes(FRAME_LIMIT_BYTES)
            for _ in range(FRAMES):
                alice.post(BOB, BULK, payload)
            await until(lambda: all(lane._in_hand for lane in lanes_of(alice, BOB)))
            yield net, alice, reads
        finally:
            reads.set()


async def test_a_retired_lane_that_is_not_read_is_ended_at_its_deadline_and_not_before(clock: ManualClock) -> None:
    async with stuck_lanes() as (net, alice, _):
        retired, kept = lanes_of(alice, BOB)
        alice._retire(retired)
        assert not retired.usable
        await until(lambda: clock.deadlines_s[:1] == [RETIRE_DEADLINE_S])
        clock.go_to(RETIRE_DEADLINE_S - 0.1)
        assert not retired._died.wait(0.1)
        assert retired in lanes_of(alice, BOB)
        clock.go_to(RETIRE_DEADLINE_S)
        peer, error = await net.sinks[ALICE].next_closed()
        assert peer == BOB
        assert isinstance(error, NetworkError)
        assert f"no orderly close within {RETIRE_DEADLINE_S} s" in str(error)
        assert retired not in lanes_of(alice, BOB)
        assert kept in lanes_of(alice, BOB)
        assert kept.usable


async def test_a_retired_lane_that_is_read_before_its_deadline_ends_in_order(clock: ManualClock) -> None:
    async with stuck_lanes() as (net, alice, reads):
        retired, kept = lanes_of(alice, BOB)
        alice._retire(retired)
        await until(lambda: clock.deadlines_s[:1] == [RETIRE_DEADLINE_S])
        clock.go_to(RETIRE_DEADLINE_S - 0.1)
        reads.set()
        assert await net.sinks[ALICE].next_closed() == (BOB, None)
        assert retired not in lanes_of(alice, BOB)
        assert kept in lanes_of(alice, BOB)
        for _ in range(FRAMES):  # nothing of what it had was lost
            await net.sinks[BOB].next_frame()
