"""The stranger of `shoal bench hostile`, which is no member: a process of its own that does one thing to all nodes:

    python -m shoal.lab.bench.hostile_stranger KIND SWARM PLACES LANES ADDRESS…

It says "ready" when it begins and, when its standard input ends, prints what it did as one line of JSON, and ends.

    ahead        links, says that it is a million rounds ahead, and never answers who asks it about that
    push         says without end, before any hello, what it can do and where it listens (identify's push)
    multistream  announces gigabytes in place of a protocol's name, before any key is known, and sends them
    links        PLACES silent strangers at each node, which it dials; who is parted from comes back by itself
    prune        links, and says of topics which do not exist that it subscribes to them and prunes them
    flood        against the first node alone, whose lanes listen at LANES: 200 hellos a second of members of another
                 swarm, over 64 connections of as many keys; 500 half-open connections; 50 readers that do not read; and
                 100 frames a second with giant lengths, to the lanes

It connects from loopback addresses that were not seen before, as from a botnet.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec
import trio

from shoal.lab.bench.hostile_silent import GREETING, Herald, Silent, Unheard, field_of, framed, named
from shoal.node.state.state_server import FETCH_PROTOCOL
from shoal.protocol.address import parse_address
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, Ready, Term
from shoal.protocol.peering import Ack, Full, GetManifest, Hello, HelloAnswer, LinkMessage, Ping, Welcome
from shoal.protocol.planning import JOINER
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import HASH_BYTES, WIRE_VERSION, Sealer, SwarmId, canonical, decode, open_envelope
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import parse_address as parse_lane_address
from shoal.swarm.links import ENVELOPE_KIND, HELLO_PROTOCOL, MESSAGES_PROTOCOL, SWARM_KIND
from shoal.swarm.manifest_exchange import MANIFEST_PROTOCOL
from shoal.swarm.muxer import FOREIGN_ERRORS
from shoal.swarm.net_stream import encode_varint
from shoal.swarm.streams import MessageStream

FAR: Final = 1_000_000
"""Rounds."""
BOAST_PERIOD_S: Final = 0.2
DEADLINE_S: Final = 5.0
RETURN_S: Final = 1.0
SIEGE_RETURN_S: Final = 10.0
COMING_AT_ONCE: Final = 8
"""Of more at a time hardly one would get through its handshake in time."""
BUSY_S: Final = 0.02
"""Between two blocks: more would take the nodes' processors from them, where an attacker elsewhere could not."""
SOCKETS: Final = 6
BLOCK_BYTES: Final = 1 << 16
GIANT: Final = b"\xff\xff\xff\xff\x07"
"""2 GiB, as multistream says a length."""
PUSH_PROTOCOL: Final = "/ipfs/id/push/1.0.0"
GOSSIP_PROTOCOL: Final = "/meshsub/1.1.0"
PUSHED_BYTES: Final = 900_000
TOPICS_OF_A_PACKET: Final = 500
ANOTHER_SWARM: Final = SwarmId(bytes(32))
HELLOS_PER_S: Final = 200
HELLO_CONNECTIONS: Final = 64
HALF_OPEN: Final = 500
SLOW_READERS: Final = 50
STREAMS_OF_A_READER: Final = 8
LANE_FRAMES_PER_S: Final = 100
UNDER_WAY_LIMIT: Final = 64
"""Hellos of one connection that are sent and not answered."""
ANSWER_DEADLINE_S: Final = 10.0
LOOK_S: Final = 0.5
READ_BYTES: Final = 4096
HALF_OPEN_ADDRESSES: Final = tuple(f"127.0.2.{n}" for n in range(1, 9))
"""Few, so that what half-open connections spend keeps nobody else out."""
FRAME_ADDRESS: Final = "127.0.4.1"

source: ContextVar[str | None] = ContextVar("source", default=None)
"""The address from which this task connects."""


def connect_from_source() -> None:
    """Have every task of this process connect from its `source`."""
    connect: Any = trio.open_tcp_stream

    async def connect_from(host: str, port: int) -> trio.SocketStream:
        stream: trio.SocketStream = await connect(host, port, local_address=source.get())
        return stream

    trio.open_tcp_stream = connect_from  # type: ignore[assignment]  # here alone, where the host dials by it


def fresh_addresses() -> Callable[[], str]:
    """Return loopback addresses, each once, from a place that two runs hardly share."""
    numbers = count(secrets.randbelow(1 << 22))
    return lambda: f"127.{16 + (n := next(numbers)) // (1 << 16) % 128}.{n // 256 % 256}.{1 + n % 254}"


async def raw_stream(host: Host, peer: PeerId) -> Any:
    """Open a stream on which nothing was said. Raises one of FOREIGN_ERRORS."""
    for connection in host._network.get_connections():
        if str(connection.muxed_conn.peer_id) == peer:
            return await connection.muxed_conn.open_stream()
    raise trio.ClosedResourceError


async def until_parted(host: Host, peer: PeerId) -> None:
    """Return once the other end is gone, which it says to nobody."""
    while peer in host.connected():  # noqa: ASYNC110
        await trio.sleep(LOOK_S)


def pruning() -> bytes:
    """A packet of gossip about topics that do not exist."""
    topics = [secrets.token_hex(16).encode() for _ in range(TOPICS_OF_A_PACKET)]
    subscriptions = b"".join(field_of(1, b"\x08\x01" + field_of(2, topic)) for topic in topics)
    prunes = b"".join(field_of(4, field_of(1, topic) + b"\x18" + encode_varint(1 << 40)) for topic in topics)
    packet = subscriptions + field_of(3, prunes)
    return encode_varint(len(packet)) + packet


class Stranger:
    """One who is no member, with a key and a host of its own. Says hello as one that has certified `round` rounds."""

    def __init__(self, swarm: SwarmId, made: Counter[str], round: int = 0) -> None:
        self.identity = Identity.generate()
        self.host = Host(identity=self.identity, listen=("/ip4/127.0.0.1/tcp/0",))
        self.swarm = swarm
        self._made = made
        self._round = round
        self.sealer = Sealer(self.identity, swarm, 1)
        self.host.serve(MESSAGES_PROTOCOL, self._read)
        self.host.serve(FETCH_PROTOCOL, self._never_answer)

    def hello(self, swarm: SwarmId) -> Hello:
        """Hello of a member of `swarm`, which it may not be."""
        record = NodeRecord(
            peer=self.identity.peer_id,
            boot=1,
            control_addresses=self.host.addresses,
            phase="training",
            round=self._round,
        )
        return Hello(wire=WIRE_VERSION, swarm=swarm, software="hostile", record=seal_record(self.sealer, record))

    async def link(self, address: str) -> tuple[PeerId, bool]:
        """Say hello at `address`: who is there, and whether it let this one in. Raises NetworkError, RemoteError."""
        peer = await self.host.dial(address, deadline_s=DEADLINE_S)
        reply = await self.host.request(peer, HELLO_PROTOCOL, canonical(self.hello(self.swarm)), deadline_s=DEADLINE_S)
        answer: HelloAnswer = decode(reply, HelloAnswer, peer=peer)  # type: ignore[arg-type]
        welcome = isinstance(answer, Welcome) and bool(answer.record)
        self._made["welcomes" if welcome else "told full" if isinstance(answer, Full) else "refusals"] += 1
        return peer, welcome

    async def _read(self, stream: MessageStream) -> None:
        """Say that it is alive, and nothing else."""
        with contextlib.suppress(NetworkError):
            answers = await self.host.open(stream.peer, MESSAGES_PROTOCOL, deadline_s=DEADLINE_S)
            while True:
                envelope = open_envelope(await stream.receive(deadline_s=None), self.swarm)
                if envelope.kind != ENVELOPE_KIND:
                    continue
                said: LinkMessage = decode(envelope.payload, LinkMessage)  # type: ignore[arg-type]
                if isinstance(said, Ping):
                    ack = Ack(nonce=said.nonce, incarnation=0)
                    await answers.send(self.sealer.seal(ENVELOPE_KIND, canonical(ack)), deadline_s=DEADLINE_S)

    async def _never_answer(self, stream: MessageStream) -> None:
        self._made["questions left open"] += 1
        await trio.sleep_forever()


class Attack(ABC):
    """An attack of one kind, against all nodes at once, until cancelled. `made` counts what it did, by what it is.

    return_s: how long one that was turned away stays away, in the mean.
    """

    return_s = RETURN_S

    def __init__(self, swarm: SwarmId, places: int, lanes: str, addresses: Sequence[str]) -> None:
        self.swarm, self.places, self.lanes, self.addresses = swarm, places, lanes, addresses
        self.made: Counter[str] = Counter()
        self._fresh = fresh_addresses()

    @abstractmethod
    async def run(self) -> None:
        """Attack."""

    async def again(self, attack: Callable[[str], Awaitable[None]], address: str) -> None:
        """Attack one node over and over."""
        while True:
            source.set(self._fresh())
            try:
                await attack(address)
            except* (NetworkError, RemoteError, Unheard, *FOREIGN_ERRORS):
                self.made["turned away"] += 1
            await trio.sleep(self.return_s * (0.5 + secrets.randbelow(100) / 100))

    async def each(self, attack: Callable[[str], Awaitable[None]], times: int = 1) -> None:
        """Attack every node so many times at once."""
        async with trio.open_nursery() as nursery:
            for address in self.addresses:
                for _ in range(times):
                    nursery.start_soon(self.again, attack, address)

    @contextlib.asynccontextmanager
    async def stranger(self, round: int = 0) -> AsyncIterator[Stranger]:
        """A new one, whose host runs in the block."""
        made = Stranger(self.swarm, self.made, round)
        async with trio.open_nursery() as nursery:
            await nursery.start(made.host.run)
            yield made
            nursery.cancel_scope.cancel()


class Ahead(Attack):
    """One stranger, linked with all, that claims to be far ahead."""

    async def run(self) -> None:
        async with self.stranger(FAR) as boaster:
            await self.each(lambda address: self._boast(boaster, address))

    async def _boast(self, boaster: Stranger, address: str) -> None:
        peer, welcome = await boaster.link(address)
        if not welcome:
            return
        stream = await boaster.host.open(peer, MESSAGES_PROTOCOL, deadline_s=DEADLINE_S)
        for number in range(FAR):
            ready = Ready(
                term=Term(),
                round=FAR + number,
                base=secrets.token_bytes(HASH_BYTES),
                role=JOINER,
                state=NO_HASH,
                root=NO_HASH,
                squares=(),
                tokens=0,
                upload=0,
                download=0,
                reaches=(),
            )
            await stream.send(boaster.sealer.seal(SWARM_KIND, canonical(ready)), deadline_s=DEADLINE_S)
            self.made["claims"] += 1
            await trio.sleep(BOAST_PERIOD_S)


class Push(Attack):
    """Strangers that push names of protocols by the megabyte (identify's push)."""

    async def run(self) -> None:
        await self.each(self._push, times=2)

    async def _push(self, address: str) -> None:
        async with self.stranger() as one:
            peer = await one.host.dial(address, deadline_s=DEADLINE_S)
            while peer in one.host.connected():
                names = b"".join(field_of(3, secrets.token_hex(50).encode()) for _ in range(PUSHED_BYTES // 102))
                stream = await raw_stream(one.host, peer)
                self.made["pushes"] += 1
                with contextlib.suppress(*FOREIGN_ERRORS):
                    await stream.write(named(PUSH_PROTOCOL) + encode_varint(len(names)) + names)
                    self.made["pushed bytes"] += len(names)
                    await stream.close()
                await trio.sleep(BUSY_S)


class Multistream(Attack):
    """Strangers that announce gigabytes before they say anything else."""

    async def run(self) -> None:
        await self.each(self._announce, times=SOCKETS)

    async def _announce(self, address: str) -> None:
        at = parse_address(address)
        async with await trio.open_tcp_stream(at.host, at.port) as stream:
            self.made["giant lengths"] += 1
            await stream.send_all(secrets.choice((b"", GREETING)) + GIANT)
            while True:
                await stream.send_all(bytes(BLOCK_BYTES))
                self.made["bytes of them"] += BLOCK_BYTES
                await trio.sleep(BUSY_S)


class Links(Attack):
    """Silent strangers at each node, as many as it has places. They come one after the other, and cost little.

    A node lets few in, but dials whom it hears of: one that is not silent says where the others are. Where a node has
    not dialled one of them for a while, or parted from it, that one comes by itself.
    """

    return_s = SIEGE_RETURN_S

    async def run(self) -> None:
        coming = trio.Semaphore(COMING_AT_ONCE)
        async with trio.open_nursery() as nursery:
            herald = Herald(self.swarm, self.made, nursery)
            await nursery.start(herald.run)
            nursery.start_soon(self.each, partial(self._stay, herald, 0.0))
            for _ in range(self.places - 1):
                await coming.acquire()
                nursery.start_soon(self._besiege, herald, coming)

    async def _besiege(self, herald: Herald, coming: trio.Semaphore) -> None:
        silent = Silent(self.swarm, self.made)
        async with trio.open_nursery() as nursery:
            await nursery.start(silent.run)
            nursery.start_soon(self.each, partial(self._stay, silent, self.return_s))
            herald.tell(silent.record())
            with trio.move_on_after(self.return_s):
                for address in self.addresses:
                    await silent.until_linked(parse_address(address).peer)
            coming.release()

    async def _stay(self, silent: Silent, timeout_s: float, address: str) -> None:
        peer = parse_address(address).peer
        with trio.move_on_after(timeout_s) as waiting:
            await silent.until_linked(peer)
        if waiting.cancelled_caught:
            await silent.come(address)
        await silent.until_linked(peer, linked=False)


class Prune(Attack):
    """A stranger that sends control messages of gossip about topics that do not exist."""

    async def run(self) -> None:
        await self.each(self._prune)

    async def _prune(self, address: str) -> None:
        async with self.stranger() as one:
            peer, _ = await one.link(address)
            stream = await raw_stream(one.host, peer)
            await stream.write(named(GOSSIP_PROTOCOL))
            while peer in one.host.connected():
                packet = pruning()
                await stream.write(packet)
                self.made["prunes"] += TOPICS_OF_A_PACKET
                await trio.sleep(BUSY_S)


class Flood(Attack):
    """Strangers that do a little of everything to one node, and much of it."""

    async def run(self) -> None:
        ways = ((self._half_open, HALF_OPEN), (self._read_nothing, SLOW_READERS), (self._say_hellos, HELLO_CONNECTIONS))
        async with trio.open_nursery() as nursery:
            for attack, times in ways:
                for _ in range(times):
                    nursery.start_soon(self.again, attack, self.addresses[0])
            while True:
                await trio.sleep(1 / LANE_FRAMES_PER_S)
                nursery.start_soon(self._giant_frame)

    async def _half_open(self, address: str) -> None:
        """Begin a handshake and say no more."""
        source.set(secrets.choice(HALF_OPEN_ADDRESSES))
        at = parse_address(address)
        async with await trio.open_tcp_stream(at.host, at.port) as stream:
            self.made["half-open connections"] += 1
            await stream.send_all(named("/noise"))
            while await stream.receive_some():
                pass

    async def _giant_frame(self) -> None:
        """An id that nobody agreed on, and a header that announces gigabytes."""
        source.set(FRAME_ADDRESS)
        with contextlib.suppress(*FOREIGN_ERRORS):
            async with await trio.open_tcp_stream(*parse_lane_address(self.lanes)) as stream:
                self.made["giant frames"] += 1
                await stream.send_all(secrets.token_bytes(16) + b"\x01\x00\x01\x00" + b"\xff" * 200)
                await stream.receive_some()

    async def _read_nothing(self, address: str) -> None:
        """Ask for the manifest on many streams, and read none of the answers."""
        async with self.stranger() as one:
            peer = await one.host.dial(address, deadline_s=DEADLINE_S)
            request = canonical(GetManifest(swarm=self.swarm))
            for _ in range(STREAMS_OF_A_READER):
                stream = await one.host.open(peer, MANIFEST_PROTOCOL, deadline_s=DEADLINE_S)
                await stream.send(request, deadline_s=DEADLINE_S)
                self.made["answers not read"] += 1
            await until_parted(one.host, peer)

    async def _say_hellos(self, address: str) -> None:
        """Say hello when it is due, whatever became of the one before, until the node parts."""
        async with self.stranger() as one, trio.open_nursery() as nursery:
            peer = await one.host.dial(address, deadline_s=DEADLINE_S)
            hello = canonical(one.hello(ANOTHER_SWARM))
            opening = named(HELLO_PROTOCOL) + framed(hello)
            places = trio.Semaphore(UNDER_WAY_LIMIT)
            while peer in one.host.connected():
                await places.acquire()
                nursery.start_soon(self._one_hello, one.host, peer, opening, places)
                await trio.sleep(HELLO_CONNECTIONS / HELLOS_PER_S)
            nursery.cancel_scope.cancel()

    async def _one_hello(self, host: Host, peer: PeerId, opening: bytes, places: trio.Semaphore) -> None:
        """All that a client says to open a stream and to say hello there, at once."""
        echoed, received = len(named(HELLO_PROTOCOL)), 0
        try:
            with contextlib.suppress(*FOREIGN_ERRORS), trio.move_on_after(ANSWER_DEADLINE_S):
                stream = await raw_stream(host, peer)
                await stream.write(opening)
                self.made["hellos"] += 1
                while received <= echoed and (more := await stream.read(READ_BYTES)):
                    received += len(more)
                await stream.reset()
        finally:
            self.made["hellos answered"] += received > echoed
            places.release()


ATTACKS: Final[dict[str, type[Attack]]] = {
    "ahead": Ahead,
    "push": Push,
    "multistream": Multistream,
    "links": Links,
    "prune": Prune,
    "flood": Flood,
}


async def attack_until_told(attack: Callable[[], Awaitable[None]]) -> None:
    """Attack until the standard input ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack)
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.buffer.flush()
        await trio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def main() -> None:
    kind, swarm, places, lanes, *addresses = sys.argv[1:]
    connect_from_source()
    attack = ATTACKS[kind](SwarmId(bytes.fromhex(swarm)), int(places), lanes, addresses)
    trio.run(attack_until_told, attack.run)
    sys.stdout.buffer.write(msgspec.json.encode(dict(attack.made)) + b"\n")


if __name__ == "__main__":
    main()
