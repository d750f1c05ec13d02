"""Strangers that cost their attacker next to nothing: linked, and silent but for a word that they are alive.

A thousand of them run in one process beside the nodes that they besiege, on the same processors. A libp2p host each
would be slower than the nodes and late with its signs of life, for which it would be parted from. So this is the least
that a node takes for a peer: one task for each connection, Noise and yamux by hand, and nothing checked of what comes.

    who dials    ── multistream, Noise (XX), multistream, yamux ──►  who listens      of the two either may be the node
    who dials    ── a stream with its Hello                     ──►  Welcome
    either       ── a stream of messages                        ──►  pings are answered, all else is dropped
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from noise.connection import Keypair, NoiseConnection  # type: ignore[import-untyped]

from shoal.protocol.address import parse_address
from shoal.protocol.identity import Identity, PeerId, peer_id_of, public_key_of
from shoal.protocol.peering import Ack, Announce, Full, Hello, HelloAnswer, LinkMessage, Ping, Welcome
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.wire import WIRE_VERSION, Envelope, Sealer, SwarmId, canonical, decode
from shoal.swarm.links import ENVELOPE_KIND, HELLO_PROTOCOL, MESSAGES_PROTOCOL
from shoal.swarm.net_stream import encode_varint
from shoal.swarm.streams import LENGTH_BYTES

DEADLINE_S: Final = 10.0
RECEIVE_BYTES: Final = 1 << 16
HEADER: Final = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
CREDIT_BYTES: Final = 1 << 16
NOISE_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
SIGNED_PREFIX: Final = b"noise-libp2p-static-key:"
KEY_HEADER: Final = b"\x08\x01\x12\x20"
"""Before an Ed25519 key, as libp2p writes one."""
KEY_BYTES: Final = 32
NOT_SERVED: Final = "na"


class Unheard(Exception):  # no error of a user's
    """The connection is over, or what came is nothing that a node says."""


def line_of(text: str) -> bytes:
    """A message of multistream."""
    return encode_varint(len(text) + 1) + text.encode() + b"\n"


GREETING: Final = line_of("/multistream/1.0.0")


def named(protocol: str) -> bytes:
    """Everything that a client says to open a stream of `protocol`."""
    return GREETING + line_of(protocol)


def field_of(number: int, payload: bytes) -> bytes:
    """A field of bytes as protobuf encodes it."""
    return encode_varint(number << 3 | 2) + encode_varint(len(payload)) + payload


def framed(message: bytes) -> bytes:
    """A message of ours, after its length."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


class Silent:
    """One stranger: its keys, where it listens, and with whom it is linked. `run` it."""

    def __init__(self, swarm: SwarmId, made: Counter[str]) -> None:
        identity = Identity.generate()
        self.swarm, self.made, self.peer_id = swarm, made, identity.peer_id
        self.sealer = Sealer(identity, swarm, 1)
        static = X25519PrivateKey.generate()
        self.static_key = static.private_bytes_raw()
        signature = Ed25519PrivateKey.from_private_bytes(identity.private_bytes()).sign(
            SIGNED_PREFIX + static.public_key().public_bytes_raw()
        )
        self.handshake = field_of(1, KEY_HEADER + public_key_of(self.peer_id)) + field_of(2, signature)
        self.links: set[PeerId] = set()
        self._address = ""
        self._changed = trio.Event()  # set, and replaced, whenever a link comes up or ends

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        self._address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{self.peer_id}"
        task_status.started()
        await trio.serve_listeners(self._accept, listeners)

    async def _accept(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(Unheard):
            await Line(self, stream, dials=None).run()

    async def come(self, address: str) -> None:
        """Say hello at `address`, and stay until the node parts. Raises Unheard, OSError."""
        at = parse_address(address)
        await Line(self, await trio.open_tcp_stream(at.host, at.port), dials=at.peer).run()

    def record(self) -> bytes:
        """Return its own record, sealed."""
        record = NodeRecord(peer=self.peer_id, boot=1, control_addresses=(self._address,), phase="training")
        return seal_record(self.sealer, record)

    def linked(self, line: Line) -> None:
        """Note that a link is up."""
        self.links.add(line.peer)
        self._note_change()

    def parted(self, line: Line) -> None:
        """Note that a line has ended, if there was one."""
        self.links.discard(line.peer)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def until_linked(self, peer: PeerId, linked: bool = True) -> None:
        """Return when there is, or is no, link with a peer."""
        while (peer in self.links) is not linked:
            await self._changed.wait()


class Herald(Silent):
    """One that is not silent: whoever is linked with it hears from it where the others are."""

    def __init__(self, swarm: SwarmId, made: Counter[str], nursery: trio.Nursery) -> None:
        super().__init__(swarm, made)
        self._nursery = nursery
        self._told: list[bytes] = []
        self._more = trio.Event()  # set, and replaced, whenever there is more to tell

    def tell(self, record: bytes) -> None:
        """Say to everybody, now or as soon as it is linked, where another one is."""
        self._told.append(record)
        self._more.set()
        self._more = trio.Event()

    def linked(self, line: Line) -> None:
        """Begin to tell."""
        super().linked(line)
        self._nursery.start_soon(self._tell, line)

    async def _tell(self, line: Line) -> None:
        with contextlib.suppress(Unheard):
            for number in count():
                while number >= len(self._told):
                    await self._more.wait()
                await line.say(Announce(record=self._told[number]))


class _Stream:
    """One of yamux, of a known protocol where the stranger opened it; spent: bytes not credited to the node again."""

    def __init__(self, protocol: str | None = None) -> None:
        self.protocol = protocol
        self.is_mine = protocol is not None
        self.agreed = False
        self.received = bytearray()
        self.spent = 0

    def line(self) -> str | None:
        """The next message of multistream, if it is there."""
        if not self.received or len(self.received) <= (size := self.received[0]):
            return None
        line = bytes(self.received[1 : 1 + size])
        del self.received[: 1 + size]
        return line.decode(errors="replace").rstrip("\n")

    def message(self) -> bytes | None:
        """The next message of ours, if it is there."""
        end = LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "big")
        if len(self.received) < max(end, LENGTH_BYTES):
            return None
        message = bytes(self.received[LENGTH_BYTES:end])
        del self.received[:end]
        return message


class Line:
    """One connection of a stranger with a node, which it `dials`, or which dialled it."""

    def __init__(self, me: Silent, stream: trio.SocketStream, *, dials: PeerId | None) -> None:
        self.peer = dials or PeerId("")
        self._me, self._stream, self._dials = me, stream, dials is not None
        self._raw, self._plain = bytearray(), bytearray()
        self._noise = NoiseConnection.from_name(NOISE_NAME)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, me.static_key)
        self._streams: dict[int, _Stream] = {}
        self._numbers = count(1 if self._dials else 2, 2)
        self._messages: int | None = None  # the stream on which it speaks
        self._sending = trio.Lock()

    async def run(self) -> None:
        """Shake hands, and be linked until the node parts. Raises Unheard."""
        try:
            with trio.fail_after(DEADLINE_S):
                await self._shake_hands()
            if self._dials:
                hello = Hello(wire=WIRE_VERSION, swarm=self._me.swarm, software="hostile", record=self._me.record())
                await self._open(HELLO_PROTOCOL, framed(canonical(hello)))
            while True:
                await self._hear(*HEADER.unpack(await self._take(HEADER.size)))
        except Exception as error:  # the boundary: whatever ends it, the stranger has this connection no more
            raise Unheard(repr(error)) from error
        finally:
            self._messages = None
            self._me.parted(self)
            await trio.aclose_forcefully(self._stream)

    async def say(self, message: LinkMessage) -> None:
        """Send a message, once linked. Raises Unheard."""
        if self._messages is None:
            raise Unheard("no link")
        sealed = self._me.sealer.seal(ENVELOPE_KIND, canonical(message))
        try:
            await self._write(DATA, 0, self._messages, framed(sealed))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Unheard(repr(error)) from error

    # -- the handshake ---------------------------------------------------------------------------------------

    async def _shake_hands(self) -> None:
        await self._agree("/noise", self._receive, self._stream.send_all)
        if self._dials:
            self._noise.set_as_initiator()
            self._noise.start_handshake()
            await self._send_packet(self._noise.write_message(b""))
            self._noise.read_message(await self._receive_packet())
            await self._send_packet(self._noise.write_message(self._me.handshake))
        else:
            self._noise.set_as_responder()
            self._noise.start_handshake()
            self._noise.read_message(await self._receive_packet())
            await self._send_packet(self._noise.write_message(self._me.handshake))
            said = bytes(self._noise.read_message(await self._receive_packet()))
            self.peer = peer_id_of(said.partition(KEY_HEADER)[2][:KEY_BYTES])
        await self._agree("/yamux/1.0.0", self._take, self._send)

    async def _agree(
        self, name: str, take: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Agree on a protocol: who dials names it, and the other says it again."""
        await send(named(name) if self._dials else GREETING)
        for _ in range(2):
            await take((await take(1))[0])
        if not self._dials:
            await send(line_of(name))

    async def _receive(self, size: int) -> bytes:
        while len(self._raw) < size:
            more = await self._stream.receive_some(RECEIVE_BYTES)
            if not more:
                raise Unheard("the node closed the connection")
            self._raw += more
        taken = bytes(self._raw[:size])
        del self._raw[:size]
        return taken

    async def _receive_packet(self) -> bytes:
        return await self._receive(int.from_bytes(await self._receive(2), "big"))

    async def _send_packet(self, data: bytes) -> None:
        await self._stream.send_all(len(data).to_bytes(2, "big") + data)

    async def _take(self, size: int) -> bytes:
        """Receive `size` bytes of what was said under the cipher."""
        while len(self._plain) < size:
            self._plain += self._noise.decrypt(await self._receive_packet())
        taken = bytes(self._plain[:size])
        del self._plain[:size]
        return taken

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            await self._send_packet(self._noise.encrypt(data))

    # -- streams ---------------------------------------------------------------------------------------------

    async def _write(self, kind: int, flags: int, number: int, data: bytes = b"", value: int | None = None) -> None:
        await self._send(HEADER.pack(0, kind, flags, number, len(data) if value is None else value) + data)

    async def _open(self, protocol: str, data: bytes = b"") -> int:
        number = next(self._numbers)
        self._streams[number] = _Stream(protocol)
        await self._write(DATA, SYN, number, named(protocol) + data)
        return number

    async def _hear(self, version: int, kind: int, flags: int, number: int, value: int) -> None:
        """Take one frame of yamux."""
        if kind == PING:
            if flags & SYN:
                await self._write(PING, ACK, 0, value=value)
            return
        if kind == GO_AWAY:
            raise Unheard("the node says goodbye")
        data = await self._take(value) if kind == DATA else b""
        if flags & SYN:
            self._streams[number] = _Stream()
            await self._write(WINDOW, ACK, number)
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.received += data
        await self._listen(number, stream)
        stream.spent += len(data)
        if stream.spent >= CREDIT_BYTES:
            await self._write(WINDOW, 0, number, value=stream.spent)
            stream.spent = 0
        if flags & (FIN | RST):
            self._streams.pop(number, None)
            if stream.agreed and stream.protocol == MESSAGES_PROTOCOL:
                raise Unheard("the node parts")

    async def _listen(self, number: int, stream: _Stream) -> None:
        while not stream.agreed and (line := stream.line()) is not None:
            if line == GREETING[1:-1].decode():
                continue
            if stream.is_mine:  # the node agrees
                stream.agreed = True
            else:
                await self._serve(number, stream, line)
        while stream.agreed and (message := stream.message()) is not None:
            await self._answer(number, stream, message)

    async def _serve(self, number: int, stream: _Stream, protocol: str) -> None:
        """Agree to speak a protocol on a stream that the node opened."""
        if protocol not in (HELLO_PROTOCOL, MESSAGES_PROTOCOL):
            await self._write(DATA, 0, number, named(NOT_SERVED))
            return
        stream.protocol, stream.agreed = protocol, True
        await self._write(DATA, 0, number, named(protocol))
        if protocol == MESSAGES_PROTOCOL:
            self._messages = await self._open(MESSAGES_PROTOCOL)
            self._me.linked(self)

    async def _answer(self, number: int, stream: _Stream, message: bytes) -> None:
        if stream.protocol == HELLO_PROTOCOL and not stream.is_mine:
            self._me.made["dialled"] += 1
            welcome = Welcome(record=self._me.record(), others=())
            await self._write(DATA, FIN, number, framed(canonical(welcome)))
        elif stream.protocol == HELLO_PROTOCOL:
            answer: HelloAnswer = decode(message, HelloAnswer)  # type: ignore[arg-type]
            if isinstance(answer, Welcome) and answer.record:
                self._me.made["welcomes"] += 1
                return
            self._me.made["told full" if isinstance(answer, Full) else "refusals"] += 1
            raise Unheard("not welcome")
        elif (envelope := decode(message, Envelope)).kind == ENVELOPE_KIND:
            said: LinkMessage = decode(envelope.payload, LinkMessage)  # type: ignore[arg-type]
            if isinstance(said, Ping):
                await self.say(Ack(nonce=said.nonce, incarnation=0))
