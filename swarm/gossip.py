"""GossipSub: small signed messages to everybody who subscribed to a topic.

Only what is small goes here (PUBLISH_LIMIT_BYTES); larger things are announced by digest and pulled. The message's
origin is proven: the PeerId is the key that signed it. Order is not kept, and a message may be lost on the way to
a node that joins or falls behind, so whatever must arrive is repeated or pulled by the protocol above.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import trio
from blake3 import blake3

from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.gossip_mesh import OrderedMesh
from shoal.swarm.limits import STRANGER_DEADLINE_S, Guests
from shoal.swarm.streams import Mailbox, Traffic
from shoal.swarm.transport import running

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.transport.
from libp2p.custom_types import TProtocol  # isort: skip
from libp2p.host.basic_host import BasicHost  # isort: skip
from libp2p.peer.id import ID  # isort: skip
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub  # isort: skip
from libp2p.pubsub import pubsub  # isort: skip
from libp2p.pubsub.pb import rpc_pb2  # isort: skip
from libp2p.pubsub.rpc_queue import RpcQueue  # isort: skip

log = logging.getLogger(__name__)

# GossipSub drops what makes its packets exceed 1 MiB, and says nothing.
PUBLISH_LIMIT_BYTES = 256 << 10
PUBLISH_DEADLINE_S = 5.0
SUBSCRIPTION_LIMIT_ITEMS = 1024
OUTBOX_LIMIT_ITEMS = 1024  # waiting to be sent to one peer
OUTBOX_LIMIT_BYTES = 16 << 20
# Meshes of a small swarm; the heartbeat (2 minutes unless set) repairs them and offers what was missed.
DEGREE, DEGREE_LOW, DEGREE_HIGH = 4, 3, 6
HEARTBEAT_INTERVAL_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipMessage:
    """A message and the peer that signed it, which need not be the one that passed it on."""

    origin: PeerId
    data: bytes


class _Outbox(RpcQueue):  # type: ignore[misc]
    """What waits to be sent to one peer. libp2p's own holds 32 messages, so that a burst loses the rest in silence."""

    def __init__(self) -> None:
        super().__init__(max_size=OUTBOX_LIMIT_ITEMS)
        self._queued_bytes = 0

    def push(self, rpc: Any, priority: bool = False) -> bool:
        size_bytes = rpc.ByteSize()
        if self._queued_bytes + size_bytes > OUTBOX_LIMIT_BYTES or not super().push(rpc, priority):
            log.debug("a peer is too slow for gossip; a message to it was dropped")
            return False
        self._queued_bytes += size_bytes
        return True

    async def pop(self) -> Any:
        rpc = await super().pop()
        if rpc is not None:
            self._queued_bytes -= rpc.ByteSize()
        return rpc


pubsub.RpcQueue = _Outbox  # looked up there by name for each new peer


class _Router(OrderedMesh):
    """Keeps little of what has passed. libp2p's own notes the time of every message for an adaptation that is off here,
    and never forgets one; and of the last thousand messages it keeps the packets in which they came."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.recent_message_deliveries: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=0))

    def _check_equivocation(self, msg: Any) -> bool:
        digest = blake3(msg.data).digest()
        brief = rpc_pb2.Message(from_id=msg.from_id, seqno=msg.seqno, topicIDs=msg.topicIDs, data=digest)
        return bool(super()._check_equivocation(brief))


class _Pubsub(pubsub.Pubsub):  # type: ignore[misc]
    """Delivers to a callback; libp2p's own subscription holds 32 messages and drops the newest.

    Each peer has one stream in each direction. libp2p writes to ours from two tasks, the outbox's and the one that
    replays recent messages to a new subscriber; here one message is out before the next begins, since the mixture of
    two breaks the stream. And a peer says its subscriptions once, on its own stream: libp2p forgets them when ours
    breaks, for as long as the connection lasts; here they last as long as the connection. Strangers
    are neither written to nor read: libp2p opens a stream to whoever connects, replays the last messages to whoever
    subscribes, and keeps a hundred for each that it cannot write to. What one said waits until it is admitted.
    """

    def __init__(
        self, host: BasicHost, router: GossipSub, deliver: Callable[[str, GossipMessage], None], guests: Guests
    ) -> None:
        super().__init__(host, router, strict_signing=True)
        self._guests = guests
        self._deliver = deliver
        self._writing: weakref.WeakKeyDictionary[Any, trio.Lock] = weakref.WeakKeyDictionary()
        self._admission = trio.Event()  # the next one of anybody

    def include(self, peer_id: ID) -> None:
        """A connected peer is admitted from now on."""
        self._admission.set()
        self._admission = trio.Event()
        self._schedule_peer_stream_retry(peer_id)

    def _is_admitted(self, peer_id: ID) -> bool:
        return self._guests.is_admitted(PeerId(str(peer_id)))

    async def _handle_new_peer(self, peer_id: ID) -> None:
        if self._is_admitted(peer_id):
            await super()._handle_new_peer(peer_id)

    async def continuously_read_stream(self, stream: Any) -> None:
        peer_id = stream.muxed_conn.peer_id
        with trio.move_on_after(STRANGER_DEADLINE_S):
            while not self._is_admitted(peer_id):
                await self._admission.wait()
        if self._is_admitted(peer_id):
            await super().continuously_read_stream(stream)
        else:
            await stream.reset()

    async def write_msg(self, stream: Any, rpc_msg: Any) -> bool:
        async with self._writing.setdefault(stream, trio.Lock()):
            if self.peers.get(stream.muxed_conn.peer_id) is not stream:
                return False  # broken by an earlier message and replaced since
            return bool(await super().write_msg(stream, rpc_msg))

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        if self._guests.may_gossip(PeerId(str(msg_forwarder))):  # before its signature costs anything
            await super().push_msg(msg_forwarder, msg)

    def _forget_all_subscriptions(self, peer_id: ID) -> None:
        if not self._peer_is_connected(peer_id):
            super()._forget_all_subscriptions(peer_id)

    def notify_subscriptions(self, publish_message: Any) -> None:
        origin = ID(publish_message.from_id)
        if origin == self.my_id:
            return
        message = GossipMessage(origin=PeerId(str(origin)), data=publish_message.data)
        for topic in publish_message.topicIDs:
            self._deliver(topic, message)


class Gossip:
    """Publishing and subscribing, over a libp2p host that runs."""

    def __init__(self, host: BasicHost, traffic: Traffic, guests: Guests) -> None:
        self._traffic = traffic
        self._mailboxes: dict[str, list[Mailbox[GossipMessage]]] = {}
        self._router = _Router(
            protocols=[TProtocol(PROTOCOL_ID_V11)],
            degree=DEGREE,
            degree_low=DEGREE_LOW,
            degree_high=DEGREE_HIGH,
            heartbeat_interval=HEARTBEAT_INTERVAL_S,
            # Its limit of ten a second drops in silence, and its adaptation slows the heartbeat to a minute.
            max_messages_per_topic_per_second=1e9,
            adaptive_gossip_enabled=False,
        )
        self._router.comes_first = guests.comes_first
        self._pubsub = _Pubsub(host, self._router, self._deliver, guests)
        self._runs = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run both of GossipSub's services; ready on entry."""
        async with running(self._pubsub), running(self._router):
            await self._pubsub.wait_until_ready()
            self._runs = True
            try:
                yield
            finally:
                self._runs = False
                for mailboxes in self._mailboxes.values():
                    for mailbox in mailboxes:
                        mailbox.close()

    def include(self, peer: PeerId) -> None:
        """A connected peer is admitted from now on, and written to if this runs."""
        if self._runs:
            self._pubsub.include(ID.from_base58(peer))

    async def publish(self, topic: str, data: bytes) -> None:
        """Send `data` to the subscribers of `topic`.

        Raises LocalError over PUBLISH_LIMIT_BYTES, NetworkError if it could not be queued in time. Cancellation: some
        peers may have it.
        """
        if len(data) > PUBLISH_LIMIT_BYTES:
            raise LocalError(
                f"{len(data)} bytes exceed the {PUBLISH_LIMIT_BYTES} of a gossip message; announce a digest"
            )
        with trio.move_on_after(PUBLISH_DEADLINE_S) as scope:
            await self._pubsub.publish(topic, data)
        if scope.cancelled_caught:
            raise NetworkError(f"gossip took nothing for {PUBLISH_DEADLINE_S:g} s")
        self._traffic.bytes_sent += len(data)

    async def subscribe(self, topic: str) -> Mailbox[GossipMessage]:
        """What others publish on `topic` from now on; the oldest is dropped when nobody reads. Close it to end."""
        mailbox: Mailbox[GossipMessage] = Mailbox(SUBSCRIPTION_LIMIT_ITEMS)
        self._mailboxes.setdefault(topic, []).append(mailbox)
        await self._pubsub.subscribe(topic)
        return mailbox

    def peers(self, topic: str) -> frozenset[PeerId]:
        """The connected peers known to subscribe to `topic`."""
        return frozenset(PeerId(str(peer)) for peer in self._pubsub.peer_topics.get(topic, ()))

    def _deliver(self, topic: str, message: GossipMessage) -> None:
        self._traffic.bytes_received += len(message.data)
        mailboxes = self._mailboxes.get(topic, [])
        mailboxes[:] = [mailbox for mailbox in mailboxes if not mailbox.closed]
        for mailbox in mailboxes:
            mailbox.put(message)
