"""The attacker of `shoal bench flood`, a process of its own:

    python -m shoal.lab.bench.flood_attacker CONTROL LANES SWARM SCALE PROCESSORS

At SCALE 1 it sends 200 hellos a second, keeps 500 half-open connections and 50 readers that do not read, or comes again
at once where they are turned away, and sends 100 frames a second with giant lengths to the port of the lanes. It runs
on PROCESSORS (numbers, with commas) alone, says "ready" when it begins and, when its standard input ends, prints one
line of JSON and ends.

Hellos go over 64 connections at once, each with a key of its own; these and the readers come each time from a loopback
address that was not seen before, as from a botnet, so that what half-open connections spend keeps them out of nothing.
A hello is sent when it is due, whatever became of the one before, and is "answered" when the node said no in words, or
"reset" when it refused even to read it. What is neither was still waiting to be read.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

import msgspec
import trio

from shoal.protocol.address import parse_address
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.peering import GetManifest, Hello
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import WIRE_VERSION, Sealer, SwarmId, canonical
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import parse_address as parse_lane_address
from shoal.swarm.links import HELLO_PROTOCOL
from shoal.swarm.manifest_exchange import MANIFEST_PROTOCOL
from shoal.swarm.muxer import FOREIGN_ERRORS
from shoal.swarm.streams import LENGTH_BYTES

HELLOS_PER_S: Final = 200
HELLO_CONNECTIONS: Final = 64
HALF_OPEN: Final = 500
SLOW_READERS: Final = 50
STREAMS_OF_A_READER: Final = 8
LANE_FRAMES_PER_S: Final = 100
UNDER_WAY_LIMIT: Final = 64
"""Hellos of one connection that are sent and not answered."""
DIAL_DEADLINE_S: Final = 5.0
ANSWER_DEADLINE_S: Final = 10.0
PAUSE_S: Final = 0.05
RETURN_S: Final = 1.0
COUNT_PERIOD_S: Final = 0.5
GREETING: Final = b"\x13/multistream/1.0.0\n"
READ_BYTES: Final = 4096

HALF_OPEN_ADDRESSES: Final = tuple(f"127.0.2.{n}" for n in range(1, 9))
FRAME_ADDRESS: Final = "127.0.4.1"
source: ContextVar[str | None] = ContextVar("source", default=None)
"""The address from which this task connects."""


class FloodReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the attacker: its attempts, and their cost to itself.

    made: attempts by kind, and what became of them. held: the mean number of what it had open.
    """

    seconds: float
    cpu_s: float
    made: dict[str, int]
    held: dict[str, float]


def fresh_addresses() -> Callable[[], str]:
    """Return loopback addresses, each once, from a place that two runs hardly share."""
    numbers = count(secrets.randbelow(1 << 22))
    return lambda: f"127.{16 + (n := next(numbers)) // (1 << 16) % 128}.{n // 256 % 256}.{1 + n % 254}"


def _delimited(text: str) -> bytes:
    """A line of multistream-select, shorter than 127 bytes."""
    return bytes([len(text) + 1]) + text.encode() + b"\n"


class Attacker:
    """Attack in all ways at once against one node."""

    def __init__(self, control: str, lanes: str, swarm: SwarmId, scale: float) -> None:
        self._control = control
        self._lanes = parse_lane_address(lanes)
        self._swarm = swarm
        self._scale = scale
        self._fresh = fresh_addresses()
        self._saying: list[trio.MemorySendChannel[None]] = []
        self.made: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._counts = 0

    @property
    def held(self) -> dict[str, float]:
        """The mean number of what was open, by kind."""
        return {kind: total / self._counts for kind, total in sorted(self._sums.items())}

    async def run(self) -> None:
        """Attack until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(max(1, round(HELLO_CONNECTIONS * self._scale))):
                nursery.start_soon(self._again, self._say_hellos)
            for _ in range(max(1, round(SLOW_READERS * self._scale))):
                nursery.start_soon(self._again, self._read_nothing)
            for number in range(max(1, round(HALF_OPEN * self._scale))):
                source.set(HALF_OPEN_ADDRESSES[number % len(HALF_OPEN_ADDRESSES)])  # which the task inherits
                nursery.start_soon(self._again, self._half_open)
            nursery.start_soon(self._count)
            nursery.start_soon(self._every, 1 / (HELLOS_PER_S * self._scale), self._order_hello)
            source.set(FRAME_ADDRESS)
            await self._every(
                1 / (LANE_FRAMES_PER_S * self._scale), lambda: nursery.start_soon(self._quietly, self._giant_frame)
            )

    async def _again(self, attack: Callable[[], Awaitable[None]]) -> None:
        """Repeat an attack for ever."""
        while True:
            await self._quietly(attack)
            await trio.sleep(PAUSE_S * (1 + secrets.randbelow(20)))

    async def _quietly(self, attack: Callable[[], Awaitable[None]]) -> None:
        try:
            await attack()
        except* (NetworkError, RemoteError, *FOREIGN_ERRORS):
            self.made["turned away"] += 1

    async def _every(self, period_s: float, act: Callable[[], None]) -> None:
        """Act every `period_s`, and more often for a while where this process was late."""
        due = trio.current_time()
        while True:
            await trio.sleep_until(due := due + period_s)
            act()

    async def _count(self) -> None:
        while True:
            await trio.sleep(COUNT_PERIOD_S)
            self._counts += 1
            self._sums.update(self._open)

    @contextlib.contextmanager
    def _holding(self, kind: str) -> Any:
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1

    async def _half_open(self) -> None:
        """Begin a handshake and say no more."""
        address = parse_address(self._control)
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            self.made["half-open connections"] += 1
            await stream.send_all(GREETING + b"\x07/noise\n")
            if await stream.receive_some():
                with self._holding("half-open connections"):
                    while await stream.receive_some():
                        pass

    async def _giant_frame(self) -> None:
        """An id that nobody agreed on, and a header that announces gigabytes."""
        async with await trio.open_tcp_stream(*self._lanes) as stream:
            self.made["giant frames"] += 1
            await stream.send_all(secrets.token_bytes(16) + b"\x01\x00\x01\x00" + b"\xff" * 200)
            await stream.receive_some()

    async def _read_nothing(self) -> None:
        """Ask for the manifest on many streams, and read none of the answers."""
        async with self._connected() as (host, peer):
            with self._holding("slow readers"):
                request = canonical(GetManifest(swarm=self._swarm))
                for _ in range(STREAMS_OF_A_READER):
                    stream = await host.open(peer, MANIFEST_PROTOCOL, deadline_s=DIAL_DEADLINE_S)
                    await stream.send(request, deadline_s=DIAL_DEADLINE_S)
                await _parted(host, peer)

    def _order_hello(self) -> None:
        """Have the connection that waited longest say hello, if there is any."""
        self.made["hellos due"] += 1
        if not self._saying:
            self.made["hellos without a connection"] += 1
            return
        self._saying.append(turn := self._saying.pop(0))
        try:
            turn.send_nowait(None)
        except (trio.WouldBlock, trio.BrokenResourceError):
            self.made["hellos that a connection did not take"] += 1

    async def _say_hellos(self) -> None:
        """Say hello whenever it is this connection's turn, as a member of another swarm, until it is parted from."""
        sealer = Sealer(Identity.generate(), SwarmId(bytes(32)), 1)
        record = seal_record(sealer, NodeRecord(peer=sealer.peer_id, boot=1))
        hello = canonical(Hello(wire=WIRE_VERSION, swarm=SwarmId(bytes(32)), software="flood", record=record))
        framed = len(hello).to_bytes(LENGTH_BYTES, "big") + hello
        async with self._connected() as (host, peer), trio.open_nursery() as nursery:
            mine, turns = trio.open_memory_channel[None](0)
            self._saying.append(mine)
            try:
                with self._holding("connections for hellos"):
                    nursery.start_soon(self._say, host, peer, GREETING + _delimited(HELLO_PROTOCOL) + framed, turns)
                    await _parted(host, peer)
            finally:
                self._saying.remove(mine)
                nursery.cancel_scope.cancel()

    async def _say(self, host: Host, peer: PeerId, opening: bytes, turns: trio.MemoryReceiveChannel[None]) -> None:
        async with trio.open_nursery() as nursery:
            places = trio.Semaphore(UNDER_WAY_LIMIT)
            while True:
                await places.acquire()
                await turns.receive()
                nursery.start_soon(self._one_hello, host, peer, opening, places)

    async def _one_hello(self, host: Host, peer: PeerId, opening: bytes, places: trio.Semaphore) -> None:
        """All that a client says to open a stream and to say hello there, at once."""
        echoed = len(GREETING) + len(_delimited(HELLO_PROTOCOL))
        received = 0
        try:
            with contextlib.suppress(*FOREIGN_ERRORS), trio.move_on_after(ANSWER_DEADLINE_S):
                stream = await raw_stream(host, peer)
                await stream.write(opening)
                self.made["hellos"] += 1
                try:
                    while received <= echoed and (more := await stream.read(READ_BYTES)):
                        received += len(more)
                    await stream.reset()
                except FOREIGN_ERRORS:
                    self.made["hellos reset"] += received <= echoed
        finally:
            self.made["hellos answered"] += received > echoed
            places.release()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Host, PeerId]]:
        """A host of a key of its own, connected to the node, however often it has to come for that."""
        host = Host(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            try:
                yield host, await self._dial(host)
            finally:
                nursery.cancel_scope.cancel()

    async def _dial(self, host: Host) -> PeerId:
        while True:
            source.set(self._fresh())
            self.made["dials"] += 1
            try:
                return await host.dial(self._control, deadline_s=DIAL_DEADLINE_S)
            except NetworkError:
                self.made["dials refused"] += 1
            await trio.sleep(RETURN_S * (0.5 + secrets.randbelow(100) / 100))


async def _parted(host: Host, peer: PeerId) -> None:
    while peer in host.connected():  # noqa: ASYNC110  # the other end parts without a word
        await trio.sleep(COUNT_PERIOD_S)


async def raw_stream(host: Host, peer: PeerId) -> Any:
    """Open a stream on which nothing was said. Raises one of FOREIGN_ERRORS."""
    for connection in host._network.get_connections():
        if str(connection.muxed_conn.peer_id) == peer:
            return await connection.muxed_conn.open_stream()
    raise trio.ClosedResourceError


async def attack_until_told(attack: Callable[[], Awaitable[None]]) -> None:
    """Attack until the standard input ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack)
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.buffer.flush()
        await trio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def connect_from_source() -> None:
    """Have every task of this process connect from its `source`."""
    connect: Any = trio.open_tcp_stream

    async def connect_from(host: str, port: int) -> trio.SocketStream:
        stream: trio.SocketStream = await connect(host, port, local_address=source.get())
        return stream

    trio.open_tcp_stream = connect_from  # type: ignore[assignment]  # here alone, where the host dials by it


def main() -> None:
    control, lanes, swarm, scale, processors = sys.argv[1:6]
    os.sched_setaffinity(0, set(map(int, processors.split(","))))
    connect_from_source()
    attacker = Attacker(control, lanes, SwarmId(bytes.fromhex(swarm)), float(scale))
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    trio.run(attack_until_told, attacker.run)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = time.monotonic() - began
    report = FloodReport(seconds=seconds, cpu_s=cpu_s, made=dict(attacker.made), held=attacker.held)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
