"""Below the handlers: what anybody may send to a node's control port, and what libp2p makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm import limits, transport
from shoal.swarm.gossip import TOPICS_LIMIT
from shoal.swarm.gossip_packets import parse
from shoal.swarm.host import Host
from shoal.swarm.muxer import ConnectionClosedError, Muxer
from shoal.swarm.reaching.circuits import HOP_PROTOCOL, STOP_PROTOCOL
from tests.fuzz.samples import identity
from tests.fuzz.targets import PEER, Target
from tests.waiting import running

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.transport.
from libp2p.identity.identify.pb.identify_pb2 import Identify  # isort: skip
from libp2p.pubsub.pb import rpc_pb2  # isort: skip
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX  # isort: skip
from libp2p.utils import encode_delim, encode_varint_prefixed  # isort: skip

TOPIC = "news"
GOSSIP = b"/meshsub/1.1.0"
MULTISTREAM = encode_delim(b"/multistream/1.0.0")
PEER_ID = transport.ID.from_base58(PEER)
Connection = Callable[[bytes], AbstractAsyncContextManager[trio.SocketStream]]
"""The far end of a connection on which some bytes were sent, and then its end."""


class Said:
    """What a peer has said, and then its end: a stream of libp2p, or the connection that streams share."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.muxed_conn = self
        self.peer_id = PEER_ID
        self.event_shutting_down = trio.Event()

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._data:
            raise ConnectionClosedError("the end")
        taken, self._data = self._data[:n], self._data[n:]
        return taken

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        self._data = b""
        await trio.lowlevel.checkpoint()

    reset = close

    def set_protocol(self, protocol: str) -> None:
        """It is known from what was said."""


def packets() -> tuple[bytes, ...]:
    """Packets of gossip, with all that there is in them."""
    said = rpc_pb2.Message(from_id=PEER_ID.to_bytes(), seqno=b"12345678", data=b"said", topicIDs=[TOPIC])
    keys = transport.ed25519_key_pair(identity(1).private_bytes())
    assert transport.ID.from_pubkey(keys.public_key) == PEER_ID
    said.signature = keys.private_key.sign(PUBSUB_SIGNING_PREFIX.encode() + said.SerializeToString())
    said.key = keys.public_key.serialize()
    packet = rpc_pb2.RPC(publish=[said], senderRecord=bytes(40))
    for topic in (TOPIC, "another"):
        packet.subscriptions.add(subscribe=True, topicid=topic)
        packet.control.graft.add(topicID=topic)
        packet.control.prune.add(topicID=topic, backoff=1 << 40).peers.add(peerID=PEER_ID.to_bytes())
        packet.control.ihave.add(topicID=topic, messageIDs=[said.from_id + said.seqno, b"unknown"])
    packet.control.iwant.add(messageIDs=[said.from_id + said.seqno])
    packet.control.idontwant.add(messageIDs=[b"1"])
    return packet.SerializeToString(), rpc_pb2.RPC(publish=[said]).SerializeToString()


@asynccontextmanager
async def listening() -> AsyncIterator[Host]:
    """A host that runs, and hears the topic."""
    host = Host(identity=identity(0), listen=("/ip4/127.0.0.1/tcp/0",))
    async with running(host):
        await host.subscribe(TOPIC)
        yield host


def check(host: Host) -> None:
    """Nothing that grows has grown."""
    pubsub, router = host._gossip._pubsub, host._gossip._router
    for table in (pubsub.peer_topics, router.mesh, router.back_off, router.time_since_last_publish):
        assert set(table) <= {TOPIC}
    for of_peer in (router.graft_flood_tracking, router.ihave_message_limits, router.message_rate_limits):
        assert set(of_peer.get(PEER_ID, ())) <= {TOPIC}
    assert len(pubsub._said.get(PEER_ID, ())) <= TOPICS_LIMIT + 1
    assert set(host._network.peerstore.peer_data_map) == {transport.ID.from_base58(host.peer_id)}
    assert host._memory.unread_bytes == 0


def network_targets(host: Host, connection: Connection) -> Iterator[Target]:
    """The stages of a connection, each as `host`, which runs, has it."""
    told = Identify(protocols=["/a/1"], listen_addrs=[b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"]).SerializeToString()
    packet, message = packets()
    streams = [
        MULTISTREAM + encode_delim(protocol) + encode_varint_prefixed(first)
        for protocol, first in (
            (GOSSIP, packet),
            (GOSSIP, message),
            (HOP_PROTOCOL.encode(), b"\x08\x00"),
            (STOP_PROTOCOL.encode(), b"\x08\x00"),
            (b"/ipfs/id/push/1.0.0", told),
            (b"ls", b""),
        )
    ]

    async def stream(data: bytes) -> None:
        await host._libp2p._swarm_stream_handler(Said(data))
        check(host)

    yield Target("stream of anybody", tuple(streams), stream, (NetworkError, RemoteError, ConnectionClosedError))

    async def gossip(data: bytes) -> None:
        await host._gossip._pubsub._take(PEER_ID, parse(data))
        check(host)

    yield Target("gossip packet", (packet, message), gossip)
    openings = (MULTISTREAM + encode_delim(b"/noise") + b"\x00\x20" + bytes(32), MULTISTREAM + encode_delim(b"ls"))

    async def accepted(data: bytes) -> None:
        async with connection(data) as far:
            assert await host._network.accept(far) is None
        check(host)

    yield Target("connection of anybody", openings, accepted, ())

    async def dialled(data: bytes) -> None:
        async with connection(data) as far:
            await host.take_over(far, PeerId(PEER), dialled=True)

    yield Target("answer of whom is dialled", openings, dialled, (NetworkError,))
    yield Target("frames of a connection", (frames(streams[0]), frames(streams[1])), muxed)


def frames(data: bytes) -> bytes:
    """As yamux has it, on a stream of its own, with a ping before."""
    import struct

    heads = ((2, 1, 0, 7), (1, 1, 1, 0), (0, 0, 1, len(data)))
    return b"".join(struct.pack("!BBHII", 0, *head) for head in heads) + data


async def muxed(data: bytes) -> None:
    """Frames of somebody who is authenticated; nobody reads what is on its streams."""
    memory = limits.Memory(limits.Refusals(), lambda peer: False)
    muxer = Muxer(Said(data), PEER_ID, is_initiator=False, memory=memory)

    async def take_streams() -> None:
        async for _ in muxer.new_stream_receive_channel:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_streams)
        await muxer.start()
        nursery.cancel_scope.cancel()
    assert memory.unread_bytes == 0
