"""Pools of lanes joined in memory, their lanes real, for tests."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio
import trio.testing

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.pool import LanePool

# Alice's PeerId is the lower: where both dialled, she settles which lane stays.
ALICE, BOB, CAROL, DAVE = (PeerId(f"12D3KooW{name}") for name in ("alice", "bob", "carol", "dave"))
WAIT_S = 30.0
LOOPBACK = ("127.0.0.1", 0)
NOTE = FrameHeader(kind=FrameKind.REQUEST, length=5)
DEAD_ADDRESS = "127.0.0.1:1"  # nothing listens there


@dataclass
class RecordingSink:
    frames: queue.Queue[tuple[PeerId, FrameHeader, bytes]] = field(default_factory=queue.Queue)
    closed: queue.Queue[tuple[PeerId, NetworkError | RemoteError | None]] = field(default_factory=queue.Queue)

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return memoryview(bytearray(header.length))

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self.frames.put((peer, header, bytes(payload)))

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        self.closed.put((peer, error))

    async def next_frame(self) -> tuple[PeerId, FrameHeader, bytes]:
        return await trio.to_thread.run_sync(partial(self.frames.get, timeout=WAIT_S))

    async def next_closed(self) -> tuple[PeerId, NetworkError | RemoteError | None]:
        return await trio.to_thread.run_sync(partial(self.closed.get, timeout=WAIT_S))


class Net:
    """Pools whose handshakes travel in memory and whose lanes are real connections over loopback."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.pools: dict[PeerId, LanePool] = {}
        self.sinks: dict[PeerId, RecordingSink] = {}
        self.scopes: dict[PeerId, trio.CancelScope] = {}
        self.requests = 0

    async def add(self, me: PeerId, *, advertise: tuple[str, ...] = (), limits: LaneLimits | None = None) -> LanePool:
        async def request(peer: PeerId, data: bytes) -> bytes:
            self.requests += 1
            await trio.lowlevel.checkpoint()
            return await self.pools[peer].answer(me, data)

        self.sinks[me] = RecordingSink()
        pool = LanePool(
            me=me,
            swarm_id=b"swarm",
            sink=self.sinks[me],
            listen=LOOPBACK,
            request=request,
            limits=limits,
        )
        self.pools[me] = pool
        self.scopes[me] = await self._nursery.start(self._run, pool)
        pool.addresses = advertise or pool.addresses
        return pool

    async def _run(self, pool: LanePool, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(pool.run)
                task_status.started(scope)


@asynccontextmanager
async def open_net() -> AsyncIterator[Net]:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            yield Net(nursery)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def alice_and_bob() -> AsyncIterator[tuple[Net, LanePool, LanePool]]:
    async with open_net() as net:
        yield net, await net.add(ALICE), await net.add(BOB)


def lanes_of(pool: LanePool, peer: PeerId) -> list[Lane]:
    return pool.lanes_of(peer)


async def until(condition: Callable[[], bool], *, deadline_s: float = WAIT_S, look_s: float = 0.0) -> None:
    """Wait for something that lane threads do; each look costs a turn of the event loop."""
    with trio.fail_after(deadline_s):
        while not condition():  # noqa: ASYNC110  # threads set no trio event
            await trio.sleep(look_s)  # threads set no trio event


def run(test: Callable[[], Awaitable[None]], clock: trio.abc.Clock | None = None) -> None:
    trio.run(test, clock=clock)
