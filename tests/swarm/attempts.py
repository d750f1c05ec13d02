"""Attempts to be taken for somebody, or to be heard, without the right to it, made at a real node and counted.

`python -m tests.swarm.attempts --count 1000` prints the table. Every kind has its control: the honest twin of its
attempts, which is accepted. The node's rates are lifted, so what refuses an attempt is what it breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import msgspec
import trio

from shoal.protocol.address import parse_address
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import Hello, Refusal, Welcome
from shoal.protocol.records import NodeRecord
from shoal.protocol.wire import WIRE_VERSION, Envelope, Sealer, SwarmId, canonical, decode
from shoal.swarm import limits, links
from shoal.swarm.lanes import listener as lane_listener
from shoal.swarm.lanes.frame import HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES, open_hello, receive_exactly, seal_hello
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.seal import LaneAnswer, LaneKeys, LaneProposal, Opener, decode_answer, encode_handshake
from shoal.swarm.lanes.seal import Sealer as FrameSealer
from shoal.swarm.links import ENVELOPE_KIND, HELLO_PROTOCOL, MESSAGES_PROTOCOL, SWARM_KIND
from shoal.swarm.streams import MessageStream
from tests.swarm.test_members import MANIFEST, Node, Stranger, identity, manifest, running
from tests.waiting import until

LANE_PROTOCOL = "/shoal/lane/1"
FOREIGN = manifest("another").swarm_id
HONEST, ATTACKER = 2, 9
FIRST_FORGED = 1_000_000
"""Rounds from here on are named only by what must not be heard."""
WAIT_S = 30.0
RETRIES = 20
MULTISTREAM = "/multistream/1.0.0"
OTHER_SECURITY = ("/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0", "/plaintext/1.0.0")


class Nowhere:
    """A sink that counts what came."""

    def __init__(self) -> None:
        self.frames = 0

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return None

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self.frames += 1

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """It does not matter here."""


class Attacker(Stranger):
    """Its record names no addresses, so nobody dials it."""

    def record(self) -> NodeRecord:
        return msgspec.structs.replace(super().record(), control_addresses=())


@dataclass
class Lab:
    """The node under attack, an honest peer, and an attacker with a host and a key of its own."""

    node: Node
    honest: Node
    attacker: Stranger
    lanes: LanePool
    sink: Nowhere
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    forged: int = FIRST_FORGED

    @property
    def port(self) -> int:
        return parse_address(self.node.host.addresses[0]).port

    @property
    def lane_port(self) -> int:
        return int(self.lanes.addresses[0].rpartition(":")[2])

    def word(self) -> Leave:
        """A message that nobody has the right to send."""
        self.forged += 1
        return Leave(term=Term(), round=self.forged, base=bytes(32), signature=bytes(64))

    def heard(self) -> int:
        """How many of those the node took."""
        return sum(getattr(message, "round", 0) >= FIRST_FORGED for _, message in self.node.heard)

    async def connect(self) -> None:
        """Connect, again where the last connection is still on its way out."""
        with trio.fail_after(WAIT_S):
            while True:
                try:
                    await self.attacker.host.dial(self.node.host.addresses[0], deadline_s=WAIT_S)
                    return
                except NetworkError:
                    await trio.sleep(0.01)

    async def ask(self, hello: Hello) -> Welcome | Refusal:
        await self.connect()
        reply = await self.attacker.host.request(
            self.node.peer, HELLO_PROTOCOL, canonical(hello), deadline_s=WAIT_S, limit_bytes=1 << 20
        )
        return decode(reply, Welcome | Refusal)  # type: ignore[arg-type]

    async def link(self) -> MessageStream:
        """The attacker's own link, to which it has the right; the stream to send on."""
        assert isinstance(await self.ask(self.attacker.hello()), Welcome)
        return await self.attacker.host.open(self.node.peer, MESSAGES_PROTOCOL, deadline_s=WAIT_S)

    async def say(self, *sealed: bytes) -> None:
        """Send these on a link of the attacker's own, and wait until they were dealt with."""
        stream = await self.link()
        marker = Leave(term=Term(), round=1, base=self.rng.randbytes(32), signature=bytes(64))
        await stream.send(sealed[0], deadline_s=WAIT_S)
        with contextlib.suppress(NetworkError):
            for one in sealed[1:]:
                await stream.send(one, deadline_s=WAIT_S)
            await stream.send(self.attacker.sealer.seal(ENVELOPE_KIND, canonical(marker)), deadline_s=WAIT_S)
        await until(
            lambda: (
                self.attacker.peer not in self.node.linked() or self.node.heard[-1:] == [(self.attacker.peer, marker)]
            )
        )
        await stream.abort()
        self.node.members.links.drop(self.attacker.peer)
        await until(lambda: self.attacker.peer not in self.node.host.connected())

    async def agree(self, swarm: SwarmId = MANIFEST.swarm_id) -> tuple[LaneKeys, LaneAnswer]:
        """What the honest peer has agreed on with the node for a lane; with another swarm, what a foreigner has."""
        proposal = LaneProposal(me=self.honest.peer, peer=self.node.peer, swarm_id=swarm)
        reply = await self.lanes.answer(self.honest.peer, encode_handshake(proposal.offer))
        answer = decode_answer(reply, peer=self.node.peer)
        return proposal.keys(answer), answer

    async def open_lane(self, data: bytes) -> bool:
        """Whether a connection to the lanes' port that says this is answered."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.lane_port)
        async with stream:
            with trio.fail_after(WAIT_S), contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data)
                await stream.send_eof()
                return bool(await stream.receive_some(1))
        return False

    async def negotiate(self, protocol: str, then: bytes = b"") -> bool:
        """Whether the node's control port agrees on this way to secure a connection."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            with trio.fail_after(WAIT_S), contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(_delimited(MULTISTREAM) + _delimited(protocol) + then)
                answer = b""
                while protocol.encode() not in answer and b"na\n" not in answer:
                    more = await stream.receive_some()
                    if not more:
                        break
                    answer += more
                return protocol.encode() + b"\n" in answer
        return False


def _delimited(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode() + b"\n"


Attempt = Callable[[Lab, int], Awaitable[bool]]
"""Makes the attempt of this number; whether its maker saw it accepted."""


async def unauthenticated(lab: Lab, number: int) -> bool:
    """Nobody has said hello: messages, requests for lanes, and lanes that nobody agreed on."""
    if number % 3 == 0:
        return await lab.open_lane(lab.rng.randbytes(16 + HELLO_WIRE_BYTES))
    await lab.connect()
    host, node = lab.attacker.host, lab.node.peer
    if number % 3 == 1:
        proposal = LaneProposal(me=lab.attacker.peer, peer=node, swarm_id=MANIFEST.swarm_id)
        with contextlib.suppress(NetworkError):
            return bool(await host.request(node, LANE_PROTOCOL, encode_handshake(proposal.offer), deadline_s=WAIT_S))
        return False
    stream = await host.open(node, MESSAGES_PROTOCOL, deadline_s=WAIT_S)
    await stream.send(lab.attacker.sealer.seal(SWARM_KIND, canonical(lab.word())), deadline_s=WAIT_S)
    with contextlib.suppress(NetworkError):
        await stream.receive(deadline_s=WAIT_S)
    await stream.abort()
    return False


async def plaintext(lab: Lab, number: int) -> bool:
    """Without encryption: libp2p's plaintext transports, and lane hellos that are not sealed."""
    if number % 2 == 0:
        exchange = lab.honest.peer.encode() + canonical(lab.attacker.hello())
        return await lab.negotiate(OTHER_SECURITY[number // 2 % 2 * 3], exchange)
    _, answer = await lab.agree()
    header = FrameHeader(kind=FrameKind.HELLO, length=HELLO_WIRE_BYTES - HEADER_BYTES - 16)
    text = (b"shoal lane hello" + answer.lane_id).ljust(header.length, b"\0")
    accepted = await lab.open_lane(answer.lane_id + header.encode() + text + bytes(16))
    lab.lanes.drop(lab.honest.peer)
    return accepted


async def forged(lab: Lab, number: int) -> bool:
    """In another's name: records, messages and lanes of the honest peer, by a key that is not its own."""
    theirs = lab.honest.sealer.seal(SWARM_KIND, canonical(lab.word()))
    if number % 4 == 0:
        record = lab.attacker.sealer.seal("node-record", canonical(lab.honest.record()))
        return isinstance(await lab.ask(lab.attacker.hello(record=record)), Welcome)
    if number % 4 == 1:
        named = msgspec.msgpack.decode(lab.attacker.sealer.seal(SWARM_KIND, canonical(lab.word())), type=Envelope)
        await lab.say(canonical(msgspec.structs.replace(named, sender=lab.honest.peer)))
        return False
    if number % 4 == 2:
        at = lab.rng.randrange(len(theirs))
        await lab.say(theirs[:at] + bytes([theirs[at] ^ 1 << lab.rng.randrange(8)]) + theirs[at + 1 :])
        return False
    keys, answer = await lab.agree()
    hello = bytearray(seal_hello(FrameSealer(keys.send_key), keys))
    hello[lab.rng.randrange(len(hello))] ^= 1 << lab.rng.randrange(8)
    accepted = await lab.open_lane(answer.lane_id + bytes(hello))
    lab.lanes.drop(lab.honest.peer)
    return accepted


async def replayed(lab: Lab, number: int) -> bool:
    """What was true once, again: messages, another's hello, and the first bytes of a lane."""
    if number % 3 == 0:
        before = len(lab.node.heard)
        word = Leave(term=Term(), round=2, base=lab.rng.randbytes(32), signature=bytes(64))
        sealed = lab.honest.sealer.seal(SWARM_KIND, canonical(word))
        lab.node.members.links._hear(lab.honest.peer, sealed)
        assert lab.node.heard[before:] == [(lab.honest.peer, word)]
        await lab.say(sealed, sealed)
        return lab.node.heard.count((lab.honest.peer, word)) != 1
    if number % 3 == 1:
        hello = lab.attacker.hello(record=lab.honest.members._sealed_record())
        return isinstance(await lab.ask(hello), Welcome)
    keys, answer = await lab.agree()
    said = answer.lane_id + seal_hello(FrameSealer(keys.send_key), keys)
    assert await lab.open_lane(said)  # its owner's own
    accepted = await lab.open_lane(said)
    lab.lanes.drop(lab.honest.peer)
    return accepted


async def downgraded(lab: Lab, number: int) -> bool:
    """By older or weaker means than are spoken here: versions, ways to secure a connection, and to share one."""
    kind = number % 5
    if kind == 0:
        return isinstance(await lab.ask(lab.attacker.hello(wire=WIRE_VERSION - 1)), Welcome)
    if kind == 1:
        return await lab.negotiate(OTHER_SECURITY[number // 5 % len(OTHER_SECURITY)])
    if kind == 2:
        return await _shares_by(lab, "/mplex/6.7.0")
    if kind == 3:
        await lab.say(_of_version(lab, 0))
        return False
    keys, answer = await lab.agree()
    hello = seal_hello(FrameSealer(keys.send_key), keys)
    accepted = await lab.open_lane(answer.lane_id + b"\0\0" + hello[2:])
    lab.lanes.drop(lab.honest.peer)
    return accepted


def _of_version(lab: Lab, version: int) -> bytes:
    """A message of the attacker's own, well signed, in another version of the wire."""
    from shoal.protocol import wire

    with mock.patch.object(wire, "WIRE_VERSION", version):
        return lab.attacker.sealer.seal(SWARM_KIND, canonical(lab.word()))


async def _shares_by(lab: Lab, muxer: str) -> bool:
    """Whether the node agrees on this muxer once the connection is secured as it should be."""
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.utils import encode_delim

    from shoal.swarm.muxer import Wire

    stream = await trio.open_tcp_stream("127.0.0.1", lab.port)
    upgrader = lab.attacker.host._network.upgrader
    try:
        with trio.fail_after(WAIT_S):
            secured = await upgrader.upgrade_security(
                RawConnection(Wire(stream), True), True, ID.from_base58(lab.node.peer)
            )
            await secured.write(encode_delim(MULTISTREAM.encode()) + encode_delim(muxer.encode()))
            answers = MultiselectCommunicator(secured)
            return [await answers.read(), await answers.read()] == [MULTISTREAM, muxer]
    finally:
        await trio.aclose_forcefully(stream)


async def foreign_swarm(lab: Lab, number: int) -> bool:
    """As a member of another swarm: its hello, its messages, and lanes whose keys are bound to it."""
    if number % 3 == 0:
        other = Sealer(identity(ATTACKER), FOREIGN, 1)
        record = other.seal("node-record", canonical(lab.attacker.record()))
        answer = await lab.ask(lab.attacker.hello(swarm=FOREIGN, record=record))
        assert isinstance(answer, Welcome) or "yours is" in answer.reason
        return isinstance(answer, Welcome)
    if number % 3 == 1:
        newest = Sealer(identity(ATTACKER), FOREIGN, 10 + number)  # so that it is not refused as old
        await lab.say(newest.seal(SWARM_KIND, canonical(lab.word())))
        return False
    keys, answer = await lab.agree(FOREIGN)
    accepted = await lab.open_lane(answer.lane_id + seal_hello(FrameSealer(keys.send_key), keys))
    lab.lanes.drop(lab.honest.peer)
    return accepted


KINDS: dict[str, Attempt] = {
    "unauthenticated": unauthenticated,
    "plaintext": plaintext,
    "forged": forged,
    "replayed": replayed,
    "downgraded": downgraded,
    "foreign swarm": foreign_swarm,
}


async def controls(lab: Lab) -> dict[str, bool]:
    """The honest twin of each kind, and whether it was accepted."""
    word = Leave(term=Term(), round=3, base=lab.rng.randbytes(32), signature=bytes(64))
    hello = isinstance(await lab.ask(lab.attacker.hello()), Welcome)
    await lab.say(lab.attacker.sealer.seal(SWARM_KIND, canonical(word)))
    message = (lab.attacker.peer, word) in lab.node.heard
    keys, answer = await lab.agree()
    stream = await trio.open_tcp_stream("127.0.0.1", lab.lane_port)
    async with stream:
        await stream.send_all(answer.lane_id + seal_hello(FrameSealer(keys.send_key), keys))
        open_hello(Opener(keys.receive_key, peer=lab.node.peer), keys, await receive_exactly(stream, HELLO_WIRE_BYTES))
    lab.lanes.drop(lab.honest.peer)
    noise, yamux = await lab.negotiate("/noise"), await _shares_by(lab, "/yamux/1.0.0")
    return {
        "unauthenticated": message,
        "plaintext": noise,
        "forged": message,
        "replayed": message,
        "downgraded": yamux and hello,
        "foreign swarm": hello,
    }


@dataclass(frozen=True)
class Row:
    kind: str
    attempts: int
    accepted: int
    control: bool


@contextlib.contextmanager
def without_rates() -> Iterator[None]:
    """Let everybody come as often as they like, so that not their number is what is refused."""
    lifted = {name: 1e9 for name in dir(limits) if name.endswith(("_PER_S", "_BURST")) and name.isupper()}
    with contextlib.ExitStack() as stack:
        for name, value in lifted.items():
            stack.enter_context(mock.patch.object(limits, name, value))
        for name in ("LANE_CONNECTIONS", "LANE_ADDRESS_CONNECTIONS"):
            for end in ("_PER_S", "_BURST"):
                stack.enter_context(mock.patch.object(lane_listener, name + end, 1e9))
        for name in ("HANDSHAKES", "ADDRESS_HANDSHAKES"):
            assert f"{name}_PER_S" in lifted
        stack.enter_context(mock.patch.object(links, "ADMISSION_DEADLINE_S", 0.01))
        yield


@contextlib.asynccontextmanager
async def laboratory() -> AsyncIterator[Lab]:
    with without_rates():
        node, honest = Node(1), Node(HONEST)
        node.host._door = limits.Door(node.host.refusals, per_s=(1e9, 1e9), address_per_s=(1e9, 1e9))
        sink = Nowhere()

        async def request(peer: PeerId, data: bytes) -> bytes:
            raise NetworkError("the node dials no lanes here")

        lanes = LanePool(me=node.peer, swarm_id=MANIFEST.swarm_id, sink=sink, listen=("127.0.0.1", 0), request=request)

        async def answer_lane(stream: MessageStream) -> None:
            if stream.peer not in node.linked():
                raise RemoteError("wants something without having been admitted", peer=stream.peer)
            answer = await lanes.answer(stream.peer, await stream.receive(deadline_s=WAIT_S))
            await stream.send(answer, deadline_s=WAIT_S)
            await stream.aclose()

        async with running(node, honest) as nursery:
            attacker = Attacker(ATTACKER)
            await nursery.start(attacker.host.run)
            await nursery.start(lanes.run)
            node.host.serve(LANE_PROTOCOL, answer_lane)
            await honest.join(node)
            await until(lambda: node.linked() == {honest.peer})
            yield Lab(node, honest, attacker, lanes, sink)


async def made(lab: Lab, attempt: Attempt, number: int) -> bool:
    """The attempt, again where a connection broke before it was made."""
    for _ in range(RETRIES):
        with contextlib.suppress(NetworkError):
            return await attempt(lab, number)
        await until(lambda: not lab.node.host.is_refused(lab.attacker.peer))  # for a while, after a refused hello
    refusals = lab.node.host.refusals.counts()
    raise AssertionError(f"{attempt.__name__}: {RETRIES} times the connection broke first; refused: {refusals}")


async def table(count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Row]:
    """`count` attempts of each kind."""
    rows = []
    async with laboratory() as lab:
        accepted_controls = await controls(lab)
        for kind in kinds:
            seen, before = 0, lab.heard() + lab.sink.frames
            for number in range(count):
                seen += await made(lab, KINDS[kind], number)
            rows.append(Row(kind, count, seen + lab.heard() + lab.sink.frames - before, accepted_controls[kind]))
        assert lab.node.linked() <= {lab.honest.peer, lab.attacker.peer}
        assert lab.node.members.record_of(lab.honest.peer) is not None
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    rows = trio.run(table, parser.parse_args(arguments).count)
    print("| attempts | made | accepted | its honest twin |\n| --- | ---: | ---: | --- |")
    for row in rows:
        print(f"| {row.kind} | {row.attempts:,} | {row.accepted} | {'accepted' if row.control else 'REFUSED'} |")
    return int(any(row.accepted or not row.control for row in rows))


if __name__ == "__main__":
    sys.exit(main())
