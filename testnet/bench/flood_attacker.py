"""The attacker of `shoal bench flood`, a process of its own:

    python -m shoal.testnet.bench.flood_attacker CONTROL LANES SWARM SECONDS SCALE

At SCALE 1 it sends 200 hellos a second, holds 500 half-open connections and 50 readers that do not read, and sends 100
frames a second with giant lengths to the port of the lanes. Each of these groups comes from loopback addresses of its
own, none of them the attacked swarm's, so that no group spends what another is let in. It prints one line of JSON when
it is done. With CONTROL "-" it makes no connection and computes for SCALE of the time, which shows what its use of the
processor costs alone.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

import msgspec
import trio

from shoal.protocol.address import parse_address
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.peering import GetManifest, Hello
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import WIRE_VERSION, Sealer, SwarmId, canonical
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import parse_address as parse_lane_address
from shoal.swarm.links import HELLO_PROTOCOL
from shoal.swarm.manifest_exchange import MANIFEST_PROTOCOL

HELLOS_PER_S: Final = 200
HALF_OPEN: Final = 500
SLOW_READERS: Final = 50
STREAMS_OF_A_READER: Final = 8
LANE_FRAMES_PER_S: Final = 100
HELLO_TASKS: Final = 4
HELLOS_OF_A_KEY: Final = 50
"""After so many it comes as somebody else."""
DIAL_DEADLINE_S: Final = 5.0
PAUSE_S: Final = 0.05
GREETING: Final = b"\x13/multistream/1.0.0\n\x07/noise\n"
SPIN_S: Final = 0.01

HELLO_ADDRESSES: Final = tuple(f"127.0.1.{n}" for n in range(1, 9))
HALF_OPEN_ADDRESSES: Final = tuple(f"127.0.2.{n}" for n in range(1, 9))
READER_ADDRESSES: Final = tuple(f"127.0.3.{n}" for n in range(1, 9))
FRAME_ADDRESSES: Final = ("127.0.4.1",)
_source: ContextVar[str | None] = ContextVar("source", default=None)
"""The address from which this task connects."""


class FloodReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the attacker did, and what that cost it. made: attempts by kind."""

    seconds: float
    cpu_s: float
    made: dict[str, int]


class Attacker:
    """Everything at once against one node."""

    def __init__(self, control: str, lanes: str, swarm: SwarmId, scale: float) -> None:
        self._control = control
        self._lanes = parse_lane_address(lanes)
        self._swarm = swarm
        self._scale = scale
        self.made: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Attack for so long."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for number in range(HELLO_TASKS):
                    nursery.start_soon(self._again, self._say_hello, HELLO_ADDRESSES, number)
                for number in range(max(1, round(SLOW_READERS * self._scale))):
                    nursery.start_soon(self._again, self._read_nothing, READER_ADDRESSES, number)
                for number in range(max(1, round(HALF_OPEN * self._scale))):
                    nursery.start_soon(self._again, self._half_open, HALF_OPEN_ADDRESSES, number)
                _source.set(FRAME_ADDRESSES[0])
                await self._every(1 / (LANE_FRAMES_PER_S * self._scale), self._giant_frame, nursery)

    async def _again(self, attack: Callable[[], Awaitable[None]], addresses: Sequence[str], first: int) -> None:
        """Over and over, from one address after the other."""
        for number in count(first):
            _source.set(addresses[number % len(addresses)])
            try:
                await attack()
            except* (OSError, NetworkError, RemoteError, trio.BrokenResourceError):
                self.made["turned away"] += 1
            await trio.sleep(PAUSE_S * (1 + secrets.randbelow(20)))

    async def _every(self, period_s: float, attack: Callable[[], Awaitable[None]], nursery: trio.Nursery) -> None:
        async def once() -> None:
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                await attack()

        while True:
            nursery.start_soon(once)
            await trio.sleep(period_s)

    async def _half_open(self) -> None:
        """Begin a handshake and say no more."""
        address = parse_address(self._control)
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            self.made["half-open connections"] += 1
            await stream.send_all(GREETING)
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
        async with self._host() as host:
            self.made["dials of slow readers"] += 1
            peer = await host.dial(self._control, deadline_s=DIAL_DEADLINE_S)
            self.made["slow readers"] += 1
            request = canonical(GetManifest(swarm=self._swarm))
            for _ in range(STREAMS_OF_A_READER):
                stream = await host.open(peer, MANIFEST_PROTOCOL, deadline_s=DIAL_DEADLINE_S)
                await stream.send(request, deadline_s=DIAL_DEADLINE_S)
            while peer in host.connected():  # noqa: ASYNC110  # until it is parted from
                await trio.sleep(1.0)

    async def _say_hello(self) -> None:
        """Hellos of a key that is not admitted, as fast as is wanted, until the connection is lost."""
        async with self._host() as host:
            self.made["dials to say hello"] += 1
            peer = await host.dial(self._control, deadline_s=DIAL_DEADLINE_S)
            sealer = Sealer(Identity.generate(), SwarmId(bytes(32)), 1)  # a member of another swarm
            record = seal_record(sealer, NodeRecord(peer=sealer.peer_id, boot=1))
            hello = Hello(wire=WIRE_VERSION, swarm=SwarmId(bytes(32)), software="flood", record=record)
            data = canonical(hello)

            async def one() -> None:
                with contextlib.suppress(NetworkError, RemoteError):
                    self.made["hellos"] += 1
                    await host.request(peer, HELLO_PROTOCOL, data, deadline_s=DIAL_DEADLINE_S)

            async with trio.open_nursery() as nursery:
                for _ in range(HELLOS_OF_A_KEY):
                    if peer not in host.connected():
                        break
                    nursery.start_soon(one)
                    await trio.sleep(HELLO_TASKS / (HELLOS_PER_S * self._scale))

    @contextlib.asynccontextmanager
    async def _host(self) -> AsyncIterator[Host]:
        """A host of a key of its own."""
        host = Host(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            try:
                yield host
            finally:
                nursery.cancel_scope.cancel()


async def compute(seconds: float, share: float) -> None:
    """Use so much of one processor and nothing else."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        stops_at = time.thread_time() + SPIN_S * share
        while time.thread_time() < stops_at:
            pass
        await trio.sleep(SPIN_S * max(0.0, 1 - share))


def main() -> None:
    control, lanes, swarm, seconds, scale = sys.argv[1:6]
    began = time.monotonic()
    made: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF)
    connect: Any = trio.open_tcp_stream

    async def connect_from_source(host: str, port: int) -> trio.SocketStream:
        stream: trio.SocketStream = await connect(host, port, local_address=_source.get())
        return stream

    trio.open_tcp_stream = connect_from_source  # type: ignore[assignment]  # here alone, where the host dials by it
    if control == "-":
        trio.run(compute, float(seconds), float(scale))
    else:
        attacker = Attacker(control, lanes, SwarmId(bytes.fromhex(swarm)), float(scale))
        trio.run(attacker.run, float(seconds))
        made = attacker.made
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = FloodReport(seconds=time.monotonic() - began, cpu_s=cpu_s, made=dict(made))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
