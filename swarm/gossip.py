"""GossipSub: small signed messages to everybody who subscribed to a topic.

Only what is small goes here (PUBLISH_LIMIT_BYTES); larger things are announced by digest and pulled. The message's
origin is proven: the PeerId is the key that signed it. Order is not kept, and a message may be lost on the way to
a node that joins or falls behind, so whatever must arrive is repeated or pulled by the protocol above.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import trio
from blake3 import blake3

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.timeouts import next_beat
from shoal.swarm import gossip_packets
from shoal.swarm.gossip_packets import PACKET_LIMIT_BYTES
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.limits import STRANGER_DEADLINE_S, Memory, PeerLimits
from shoal.swarm.net_stream import NetStream, VarintFrames
from shoal.swarm.peer_ids import libp2p_id
from shoal.swarm.streams import Mailbox, MessageStream, Traffic
from shoal.swarm.transport import running

with only_what_runs():
    from libp2p.custom_types import TProtocol
    from libp2p.host.basic_host import BasicHost
    from libp2p.peer.id import ID
    from libp2p.pubsub import pubsub
    from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.rpc_queue import RpcQueue

log = logging.getLogger(__name__)

Changes = defaultdict[ID, list[str]]
"""Topics, by peer."""

PUBLISH_LIMIT_BYTES = gossip_packets.MESSAGE_LIMIT_BYTES  # GossipSub drops what makes a packet exceed 1 MiB, in silence
PUBLISH_DEADLINE_S = 5.0
SUBSCRIPTION_LIMIT_ITEMS = 1024
TOPICS_LIMIT = 8  # that are not ours, and one peer has subscribed to
BOOT_SHIFT = 40  # a start has numbers for so many bits of messages
PENDING_LIMIT_ITEMS = 16  # messages kept for a peer whose subscriptions are not known yet
OUTBOX_LIMIT_ITEMS = 1024  # waiting to be sent to one peer
OUTBOX_LIMIT_BYTES = 16 << 20
GATHER_S = 1.0
GATHER_LIMIT_BYTES = 32 << 10
"""Of a packet that was gathered: less than a receiver takes beside messages."""
# Meshes of a small swarm; the heartbeat (2 minutes unless set) repairs them and offers what was missed.
DEGREE, DEGREE_LOW, DEGREE_HIGH = 4, 3, 6
HEARTBEAT_INTERVAL_S = 1
OFFERED_BEATS = 3
"""So often who is no neighbour is offered what came in the last heartbeats; libp2p's own offers each in all three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipMessage:
    """A message and the peer that signed it, which need not be the one that passed it on."""

    origin: PeerId
    data: bytes


class _Outbox(RpcQueue):  # type: ignore[misc]
    """Queue of messages to one peer. libp2p's own holds 32, so that a burst loses the rest in silence.

    What comes within GATHER_S of a packet goes out in the next: where there is much to say a packet is what costs, and
    where there is little nothing waits. Nor does it where a packet is full.
    """

    def __init__(self) -> None:
        super().__init__(max_size=OUTBOX_LIMIT_ITEMS)
        self._queued_bytes = 0
        self._popped_at = -math.inf

    def push(self, rpc: Any, priority: bool = False) -> bool:
        size_bytes = rpc.ByteSize()
        if self._queued_bytes + size_bytes > OUTBOX_LIMIT_BYTES or not super().push(rpc, priority):
            log.debug("a peer is too slow for gossip; a message to it was dropped")
            return False
        self._queued_bytes += size_bytes
        return True

    async def pop(self) -> Any:
        first = await super().pop()
        if first is None:
            return None
        with trio.move_on_at(self._popped_at + GATHER_S):
            while self._queued_bytes < GATHER_LIMIT_BYTES and not self._closed:
                await self._notify.wait()
        self._popped_at = trio.current_time()
        packet, size_bytes = rpc_pb2.RPC(), first.ByteSize()
        packet.CopyFrom(first)  # which may wait for other peers, too
        self._queued_bytes -= size_bytes
        while (following := self._following_bytes()) and size_bytes + following <= GATHER_LIMIT_BYTES:
            packet.MergeFrom(self._queue.pop())
            self._queued_bytes -= following
            size_bytes += following
        return packet

    def _following_bytes(self) -> int:
        """Size of the message that is next; 0 if there is none."""
        waiting = self._queue._priority or self._queue._non_priority
        return waiting[0].ByteSize() if waiting else 0


pubsub.RpcQueue = _Outbox  # looked up there by name for each new peer


class _Router(GossipSub):  # type: ignore[misc]
    """GossipSub with an order among its neighbours, that keeps little of what has passed.

    libp2p's own notes the time of every message for an adaptation that is off here, and never forgets one; of the last
    thousand messages it keeps the packets in which they came; and who was told to stay away, and scores, it keeps of
    peers that are long gone.

    Whoever asks to be a neighbour is one until the next heartbeat, which keeps a few at random. Strangers that pass
    nothing on could so be all that a node has. Here those stay who come first (`shoal.protocol.places`), and are asked
    until there are enough of them; the others have the room that is left.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.comes_first: Callable[[PeerId], bool] = lambda peer: False
        self._beats = 0
        self.recent_message_deliveries: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=0))

    def _check_equivocation(self, msg: Any) -> bool:
        digest = blake3(msg.data).digest()
        brief = rpc_pb2.Message(from_id=msg.from_id, seqno=msg.seqno, topicIDs=msg.topicIDs, data=digest)
        return bool(super()._check_equivocation(brief))

    def _periodic_security_cleanup(self) -> None:
        super()._periodic_security_cleanup()
        now = time.time()
        for topic, peers in list(self.back_off.items()):
            self.back_off[topic] = {peer: until for peer, until in peers.items() if until > now}
        scorer = self.scorer
        for peer in {*scorer.first_message_deliveries, *scorer.behavior_penalty, *scorer.graft_flood_penalties}:
            if peer not in self.peer_protocol:
                scorer.remove_peer(peer)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds to the next heartbeat, which comes when whatever else looks once a second does."""
        now = trio.current_time()
        return next_beat(now, HEARTBEAT_INTERVAL_S) - now

    @heartbeat_interval.setter
    def heartbeat_interval(self, seconds: float) -> None:
        """libp2p sets what it is given, which is that."""

    async def _do_px(self, px_peers: list[Any]) -> None:
        """Nothing: whom to connect to is not for others to say."""
        await trio.lowlevel.checkpoint()

    async def send_recent_messages(self, peer_id: ID, topic: str) -> None:
        """Offer a new subscriber the messages of the last heartbeats by their names; it asks for those that it lacks.

        libp2p's own sends it all of them, each in a packet of its own. In a swarm that is starting each peer subscribes
        at every other, which have what it has.
        """
        recent = self.mcache.window(topic)
        if recent:
            await self.emit_ihave(topic, recent, peer_id)

    def gossip_heartbeat(self) -> defaultdict[ID, dict[str, list[bytes]]]:
        """Offer who is no neighbour the messages of the last heartbeats, by their names, once each."""
        self._beats += 1
        if self._beats % OFFERED_BEATS:
            return defaultdict(dict)
        offered: defaultdict[ID, dict[str, list[bytes]]] = super().gossip_heartbeat()
        return offered

    def mesh_heartbeat(self) -> tuple[Changes, Changes]:
        """Return whom to graft and whom to prune, with the topics of each; the mesh here has changed already."""
        asked = [(peer, topic) for topic in self.mesh for peer in self._lacking(topic)]
        for peer, topic in asked:
            self.mesh[topic].add(peer)
            self._notify_mesh_peer_added(peer, topic)
        graft, prune = super().mesh_heartbeat()
        for peer, topic in asked:
            graft[peer].append(topic)
        return graft, prune

    def _lacking(self, topic: str) -> list[ID]:
        """Peers that come first and are to become neighbours, as long as there are not `degree` of them."""
        subscribed = self.pubsub.peer_topics.get(topic, ())
        first = [peer for peer in subscribed if self._is_first(peer) and self._is_gossipsub_peer(peer)]
        more = [peer for peer in first if peer not in self.mesh[topic] and not self._check_back_off(peer, topic)]
        has = sum(peer in self.mesh[topic] for peer in first)
        found: list[ID] = self.select_from_minus(self.degree - has, more, ())
        return found

    def _select_peers_for_pruning(self, topic: str, num_to_prune: int) -> list[ID]:
        """Neighbours to give way where there are too many: at random, and who comes first after all others."""
        others = [peer for peer in self.mesh[topic] if not self._is_first(peer)]
        gone: list[ID] = self.select_from_minus(num_to_prune, others, ())
        first = [peer for peer in self.mesh[topic] if self._is_first(peer)]
        gone += self.select_from_minus(num_to_prune - len(gone), first, ())
        return gone

    def _is_first(self, peer: ID) -> bool:
        return self.comes_first(PeerId(str(peer)))


class _Pubsub(pubsub.Pubsub):  # type: ignore[misc]
    """Delivers to a callback; libp2p's own subscription holds 32 messages and drops the newest.

    Each peer has one stream in each direction. libp2p writes to ours from two tasks, the outbox's and the one that
    sends what waited until the peer was known; here one message is out before the next begins, since the mixture of
    two breaks the stream. And a peer says its subscriptions once, on its own stream: libp2p forgets them when ours
    breaks, for as long as the connection lasts; here they last as long as the connection. Of what a peer says only that
    reaches libp2p which concerns topics of ours (`shoal.swarm.gossip_packets`), and it is read at its rates. Strangers
    are neither written to nor read: libp2p opens a stream to whoever connects, offers the last messages to whoever
    subscribes, and keeps a hundred for each that it cannot write to. What one said waits until it is admitted.

    No message is taken, nor passed on, a second time, or once many newer ones of its origin came, however old it is.
    An origin numbers its messages by its starts, as its envelopes: those of a later one are newer, whatever clocks say.
    """

    def __init__(
        self,
        host: BasicHost,
        router: GossipSub,
        deliver: Callable[[str, GossipMessage], None],
        peer_limits: PeerLimits,
        memory: Memory | None,
        boot: int,
    ) -> None:
        super().__init__(host, router, strict_signing=True)
        self._peer_limits, self._memory = peer_limits, memory
        self._deliver = deliver
        self._numbers = gossip_packets.Numbers(peer_limits.is_admitted)
        self.counter = boot << BOOT_SHIFT  # libp2p's own is of the clock
        self._topics: set[str] = set()  # ours
        self._said: dict[ID, set[str]] = {}  # topics of others that may become ours
        self._reading: dict[ID, trio.CancelScope] = {}
        self._writing: weakref.WeakKeyDictionary[Any, trio.Lock] = weakref.WeakKeyDictionary()
        self._admission = trio.Event()  # the next one of anybody

    def include(self, peer_id: ID) -> None:
        """A connected peer is admitted from now on."""
        self._admission.set()
        self._admission = trio.Event()
        self._schedule_peer_stream_retry(peer_id)

    def _is_admitted(self, peer_id: ID) -> bool:
        return self._peer_limits.is_admitted(PeerId(str(peer_id)))

    async def _handle_new_peer(self, peer_id: ID) -> None:
        if self._is_admitted(peer_id):
            await super()._handle_new_peer(peer_id)

    def adopt(self, topic: str) -> None:
        """A topic is ours from now on, also for who has subscribed to it before."""
        self._topics.add(topic)
        for peer_id in [peer for peer, topics in self._said.items() if topic in topics]:
            self._subscribe(peer_id, topic)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Read what a peer says once it is admitted, on its newest stream alone, until that ends."""
        peer_id = stream.muxed_conn.peer_id
        with trio.move_on_after(STRANGER_DEADLINE_S):
            while not self._is_admitted(peer_id):
                await self._admission.wait()
        if not self._is_admitted(peer_id):
            await stream.reset()
            return
        if (earlier := self._reading.get(peer_id)) is not None:
            earlier.cancel()
        self._reading[peer_id] = scope = trio.CancelScope()
        try:
            with scope:
                await self._read_packets(peer_id, stream)
        finally:
            if self._reading.get(peer_id) is scope:
                del self._reading[peer_id]

    async def _read_packets(self, peer_id: ID, stream: Any) -> None:
        peer = PeerId(str(peer_id))
        packets = MessageStream(
            VarintFrames(NetStream(stream)), peer=peer, limit_bytes=PACKET_LIMIT_BYTES, memory=self._memory
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(packets.run)
            try:
                while True:
                    data = await packets.receive(deadline_s=None)
                    packet = gossip_packets.parse(data)
                    await self._take(peer_id, packet)
                    await self._peer_limits.gossiped(peer, len(data), gossip_packets.entries(packet))
            except (NetworkError, RemoteError, ValueError) as error:
                log.debug("gossip of %s: %s", peer, error)
            finally:
                await packets.abort()

    async def _take(self, peer_id: ID, packet: Any) -> None:
        """Hand to libp2p what is for it."""
        for message in gossip_packets.messages(packet, self._topics):
            try:
                await self.push_msg(peer_id, message)
            except Exception:  # the boundary: one message of a peer
                log.debug("a message that %s passed on", peer_id, exc_info=True)
        for topic, subscribes in gossip_packets.subscriptions(packet):
            self._hear_subscription(peer_id, topic, subscribes=subscribes)
        control = gossip_packets.control(packet, self._topics)
        if control is not None:
            for wanted in control.control.iwant:
                ids = [number for number in wanted.messageIDs if self._may_have(peer_id, number)]
                wanted.messageIDs[:] = ids
            await self.router.handle_rpc(control, peer_id)

    def _may_have(self, peer_id: ID, number: bytes) -> bool:
        """True if a message that a peer wants is there, and within what it may be sent anew."""
        message = self.router.mcache.get(number)
        return message is not None and self._peer_limits.may_want(PeerId(str(peer_id)), message.ByteSize())

    def _hear_subscription(self, peer_id: ID, topic: str, *, subscribes: bool) -> None:
        said = self._said.setdefault(peer_id, set())
        if not subscribes:
            said.discard(topic)
            self._forget_subscription(peer_id, topic)
        elif len(said) < TOPICS_LIMIT or topic in self._topics:
            said.add(topic)
            if topic in self._topics:
                self._subscribe(peer_id, topic)

    def _subscribe(self, peer_id: ID, topic: str) -> None:
        self.handle_subscription(peer_id, rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic))

    async def write_msg(self, stream: Any, rpc_msg: Any) -> bool:
        async with self._writing.setdefault(stream, trio.Lock()):
            if self.peers.get(stream.muxed_conn.peer_id) is not stream:
                return False  # broken by an earlier message and replaced since
            return bool(await super().write_msg(stream, rpc_msg))

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        if self._peer_limits.may_gossip(PeerId(str(msg_forwarder))):  # before its signature costs anything
            await super().push_msg(msg_forwarder, msg)

    def _is_msg_seen(self, msg: Any) -> bool:
        return super()._is_msg_seen(msg) or not (self._is_own(msg) or self._numbers.is_new(*_numbered(msg)))

    def _mark_msg_seen(self, msg: Any) -> None:
        """Note a message, whose signature holds."""
        super()._mark_msg_seen(msg)
        if not self._is_own(msg):
            self._numbers.note(*_numbered(msg))

    def _is_own(self, msg: Any) -> bool:
        return bool(msg.from_id == self.my_id.to_bytes())

    def _forget_all_subscriptions(self, peer_id: ID) -> None:
        if not self._peer_is_connected(peer_id):
            super()._forget_all_subscriptions(peer_id)
            self._said.pop(peer_id, None)

    def notify_subscriptions(self, publish_message: Any) -> None:
        origin = ID(publish_message.from_id)
        if origin == self.my_id:
            return
        message = GossipMessage(origin=PeerId(str(origin)), data=publish_message.data)
        for topic in publish_message.topicIDs:
            self._deliver(topic, message)


def _numbered(msg: Any) -> tuple[PeerId, int]:
    return PeerId(str(ID(msg.from_id))), int.from_bytes(msg.seqno, "big")


class Gossip:
    """Publishing and subscribing, over a libp2p host that runs."""

    def __init__(
        self, host: BasicHost, traffic: Traffic, peer_limits: PeerLimits, memory: Memory | None = None, *, boot: int
    ) -> None:
        """boot: how often this node started."""
        self._traffic = traffic
        self._mailboxes: dict[str, list[Mailbox[GossipMessage]]] = {}
        self._router = _Router(
            protocols=[TProtocol(PROTOCOL_ID_V11)],
            degree=DEGREE,
            degree_low=DEGREE_LOW,
            degree_high=DEGREE_HIGH,
            heartbeat_interval=HEARTBEAT_INTERVAL_S,
            gossip_window=OFFERED_BEATS,
            # Its limit of ten a second drops in silence, and its adaptation slows the heartbeat to a minute.
            max_messages_per_topic_per_second=1e9,
            adaptive_gossip_enabled=False,
            max_pending_messages_per_peer=PENDING_LIMIT_ITEMS,
        )
        self._router.comes_first = peer_limits.comes_first
        self._pubsub = _Pubsub(host, self._router, self._deliver, peer_limits, memory, boot)
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
                self._pubsub.seen_messages._stop_event.set()  # ends its thread, which nobody waits for
                for mailboxes in self._mailboxes.values():
                    for mailbox in mailboxes:
                        mailbox.close()

    def include(self, peer: PeerId) -> None:
        """A connected peer is admitted from now on, and written to if this runs."""
        if self._runs:
            self._pubsub.include(libp2p_id(peer))

    async def publish(self, topic: str, data: bytes) -> None:
        """Send `data` to the subscribers of `topic`.

        Raises LocalError over PUBLISH_LIMIT_BYTES, NetworkError if it could not be queued in time. Cancellation: some
        peers may have it.
        """
        if len(data) > PUBLISH_LIMIT_BYTES:
            raise LocalError(
                f"{len(data)} bytes exceed the {PUBLISH_LIMIT_BYTES} of a gossip message; announce a digest"
            )
        self._pubsub.adopt(topic)
        with trio.move_on_after(PUBLISH_DEADLINE_S) as scope:
            await self._pubsub.publish(topic, data)
        if scope.cancelled_caught:
            raise NetworkError(f"gossip took nothing for {PUBLISH_DEADLINE_S:g} s")
        self._traffic.bytes_sent += len(data)

    async def subscribe(self, topic: str) -> Mailbox[GossipMessage]:
        """Return a mailbox of what others publish on `topic` from now on; the oldest is dropped when nobody reads."""
        mailbox: Mailbox[GossipMessage] = Mailbox(SUBSCRIPTION_LIMIT_ITEMS)
        self._mailboxes.setdefault(topic, []).append(mailbox)
        self._pubsub.adopt(topic)
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
