"""A node's place on the network: who is connected, requests and streams between peers, gossip.

The control plane. Everything here is authenticated (Noise) and bound to PeerIds; tensors move on lanes instead.
The host dials when told to and never on its own. A peer's fault ends that peer's stream, never the process:

    handler raises RemoteError      counted in `remote_errors`, the stream is reset
    handler raises anything else    logged, the stream is reset
    peer dies                       `ConnectionChange(connected=False)` within a second
    peer hangs                      the same, within a minute (HEARTBEAT_INTERVAL_S of shoal.swarm.muxer)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import trio

from shoal.protocol.address import (
    Address,
    CircuitAddress,
    ListenAddress,
    parse_address,
    parse_any,
    parse_listen_address,
)
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError, ShoalError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm import incoming, transport
from shoal.swarm.dial_targets import DialTargets, places_of, worth_dialling
from shoal.swarm.gossip import Gossip, GossipMessage
from shoal.swarm.limits import (
    CONNECTION_LIMIT,
    HALF_OPEN_LIMIT,
    HALF_OPEN_PER_ADDRESS_LIMIT,
    Door,
    Memory,
    PeerLimits,
    Reason,
    Refusals,
    UnprovenConnections,
)
from shoal.swarm.muxer import Muxer
from shoal.swarm.net_stream import AnyStream, NetStream, peer_of
from shoal.swarm.reaching.circuit_relay import CircuitRelay
from shoal.swarm.reaching.circuits import Circuits
from shoal.swarm.reaching.dial_back_probes import DialBackProbes
from shoal.swarm.reaching.networks import has_network, is_loopback, reachable_addresses
from shoal.swarm.streams import MESSAGE_LIMIT_BYTES, Mailbox, MessageStream, RawStream, Traffic

log = logging.getLogger(__name__)

CHANGES_LIMIT_ITEMS = 1024
DIAL_REASONS_SHOWN = 3
NETWORK_LOOK_S = 0.5
RELAYED = "through a relay"
"""In the place of a host, where a peer was dialled through another."""

Result = TypeVar("Result")
Handler = Callable[[MessageStream], Awaitable[None]]
Framing = Callable[[RawStream], RawStream]
"""Layer between a protocol that is not Shoal's and a `MessageStream`."""


class NotReached(NetworkError):
    """None of a peer's addresses works. `refused` are the hosts on which nobody listens, `silent` the others.

    is_busy: somebody took a connection, and had not done its handshake in time.
    """

    def __init__(self, text: str, *, refused: frozenset[str], silent: frozenset[str], is_busy: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.silent = silent
        self.is_busy = is_busy

    def proves_end(self, host: str | None) -> bool:
        """True if the peer, last connected from `host`, listens there no more; without that, nor anywhere else."""
        return host in self.refused or (bool(self.refused) and not self.silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionChange:
    """A peer's connection began, or its last one ended."""

    peer: PeerId
    connected: bool


class Host:
    """One node on the network; `run` it in a nursery, then dial, serve, open, request, publish."""

    def __init__(
        self,
        *,
        identity: Identity,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        connection_limit: int = CONNECTION_LIMIT,
        boot: int = 0,
    ) -> None:
        """boot: how often this node started; what it publishes is newer than what it did before.

        Raises ConfigError for an address that cannot be listened on. Nothing is opened yet.
        """
        self.peer_id: PeerId = identity.peer_id
        self.addresses: tuple[str, ...] = ()
        self.traffic = Traffic()
        self.remote_errors = 0  # faults of peers in our handlers
        self.handler_errors = 0  # faults of ours
        self._listen = [parse_listen_address(text) for text in listen]
        self._listens_beyond = not all(is_loopback(address.host) for address in self._listen)
        self._network_looked_at, self._lacks_network = -math.inf, False
        self.refusals = Refusals()
        self._memory = Memory(self.refusals, lambda peer: self.is_admitted(peer))
        self._network = transport.Network(identity=identity, connection_limit=connection_limit, memory=self._memory)
        self._network.register_notifee(transport.ConnectionNotifee(self._changed))
        self.is_admitted: Callable[[PeerId], bool] = lambda peer: True
        """True for a peer that belongs here; strangers are given less."""
        self.is_expected: Callable[[PeerId], bool] = lambda peer: False
        """True for a peer that does not belong here yet but may, and is known: it is read like one that does."""
        self.is_known: Callable[[str], bool] = lambda address: False
        """True for an IP address of a member: it is let in before others when many come."""
        self.is_refused: Callable[[PeerId], bool] = lambda peer: False
        """True for a peer that was told not to belong here: the next stream that it opens ends its connection."""
        self.comes_first: Callable[[PeerId], bool] = lambda peer: False
        """True for a peer that has its place before strangers, admitted or not yet."""
        self._network.gives_way = self._gives_way
        self._network.pinged = lambda peer, number: self.pinged(peer, number)
        self.pinged: Callable[[PeerId, int | None], None] = lambda peer, number: None
        """Called with each ping of a peer's connection, None, and each answer of its to one, by its number."""
        self._door = Door(
            self.refusals,
            is_known=lambda address: self.is_known(address),
            is_member=self._may_belong,
        )
        self._half_open = UnprovenConnections(
            self.refusals,
            Reason.HALF_OPEN,
            limit=HALF_OPEN_LIMIT,
            per_address=HALF_OPEN_PER_ADDRESS_LIMIT,
            is_known=lambda address: self.is_known(address),
        )
        self._targets = DialTargets()
        peer_limits = PeerLimits(
            self.refusals,
            lambda peer: self.is_admitted(peer),
            lambda peer: self.is_expected(peer),
            lambda address: self.is_known(address),
            lambda peer: self.is_refused(peer),
            lambda peer: self.comes_first(peer),
        )
        self._libp2p = transport.make_host(self._network, peer_limits)
        self.circuits = Circuits(self._network, self._libp2p, self.refusals)
        self.circuits.lets_in = lambda relay, caller: self._door.lets_call(relay, caller)
        self.circuits.is_member = self._may_belong
        self.relay = CircuitRelay(self._network, self._libp2p)
        self.dial_back_probes = DialBackProbes()
        self._gossip = Gossip(self._libp2p, self.traffic, peer_limits, self._memory, boot=boot)
        self._bound: list[tuple[str, int]] = []
        self._watchers: list[Mailbox[ConnectionChange]] = []
        self._streams: trio.Nursery | None = None  # pumps of the streams that `open` made

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, and serve until cancelled; started when the addresses are known and gossip is up.

        Raises ConfigError if a port cannot be listened on. Cancellation closes every socket at once and returns
        within about CLOSE_DEADLINE_S.
        """
        listeners = await self._bind()
        self._bound = [one.socket.getsockname()[:2] for one in listeners]
        self.renew_addresses()
        async with transport.running(self._network), self._gossip.running(), trio.open_nursery() as nursery:
            self._streams = nursery
            try:
                take_in = partial(incoming.take_in, is_spent=self._door.is_spent)
                await nursery.start(take_in, listeners, lambda address: self._door.lets_in(address), self._accept)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._streams = None
                self._network.sever_all()
                for watcher in self._watchers:
                    watcher.close()

    @property
    def is_cut_off(self) -> bool:
        """True if it listens beyond this machine, which has no network: nobody else can be blamed.

        As of `renew_addresses`, or NETWORK_LOOK_S ago at most: without a quorum this is asked with every message.
        """
        now = time.monotonic()
        if self._listens_beyond and now - self._network_looked_at >= NETWORK_LOOK_S:
            self._network_looked_at, self._lacks_network = now, not has_network()
        return self._lacks_network

    def renew_addresses(self) -> None:
        """Look anew at which addresses this machine has, and whether it has a network; what listens there stays."""
        self._network_looked_at = -math.inf
        self.addresses = reachable_addresses(self._bound, self.peer_id)

    # -- serving -------------------------------------------------------------------------------------------------

    def serve(
        self,
        protocol: str,
        handler: Handler,
        *,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        framing: Framing | None = None,
    ) -> None:
        """Let peers open streams of `protocol`; each runs `handler`, and is closed when that returns.

        Messages either way may have `limit_bytes`.
        """

        async def handle(net_stream: AnyStream) -> None:
            stream = MessageStream(
                _framed(NetStream(net_stream), framing),
                peer=peer_of(net_stream),
                limit_bytes=limit_bytes,
                traffic=self.traffic,
                memory=self._memory,
                over=net_stream.muxed_conn,
            )
            await self._handle(protocol, handler, stream)

        self._libp2p.set_stream_handler(protocol, handle)

    async def _handle(self, protocol: str, handler: Handler, stream: MessageStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            try:
                await handler(stream)
            except Exception as error:  # the boundary: one peer's stream
                self._note_fault(error, protocol, stream.peer)
                await stream.abort()
            except BaseException:
                await stream.abort()
                raise
            else:
                await stream.aclose()

    def _note_fault(self, error: Exception, protocol: str, peer: PeerId) -> None:
        if _blames_peer(error):
            self.remote_errors += 1
            log.log(logging.INFO if self.is_admitted(peer) else logging.DEBUG, "%s: %s", protocol, error)
        elif isinstance(error, NetworkError):
            log.debug("%s with %s: %s", protocol, peer, error)
        else:
            self.handler_errors += 1
            log.error("the handler of %s failed with %s", protocol, peer, exc_info=error)

    # -- connections ---------------------------------------------------------------------------------------------

    async def dial(self, address: str, *, deadline_s: float) -> PeerId:
        """Connect to the node at `address` and return its PeerId; at once if it is connected already.

        Raises ConfigError for a malformed address or this node's own, NetworkError if the node cannot be reached or
        cannot prove to be the peer named. Cancellation leaves no half-made connection.
        """
        parsed = parse_any(address)
        if parsed.peer == self.peer_id:
            raise ConfigError(f"{address} is this node's own address; give the address of another node")
        self._targets.named(parsed)
        await self._dial(parsed, deadline_s)
        return parsed.peer

    async def dial_peer(
        self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float, handshake_s: float | None = None
    ) -> None:
        """Connect to `peer` at the first of `addresses` that works, each given an equal share of the time left.

        handshake_s: time from when somebody took a connection, whatever is left.
        Those that are likely to work come first. Addresses come from peers' records, so malformed ones, those of other
        peers, and those that may not be dialled (`dial_targets`) are passed over. Raises NotReached if none works.
        Cancellation as for `dial`.
        """
        end = trio.current_time() + deadline_s
        reasons: list[str] = []
        refused, silent = set[str](), set[str]()
        is_busy = False
        addresses = worth_dialling(addresses, is_connected=self.is_direct, on_loopback=self._dials_loopback)
        for tried, text in enumerate(addresses):
            share_s = (end - trio.current_time()) / (len(addresses) - tried)
            try:
                address = parse_any(text)
                if address.peer != peer:
                    raise ConfigError(f"{text} is not an address of {peer}; copy it from that node's `shoal status`")
            except ConfigError as error:
                reasons.append(str(error))
                continue
            if not self._may_dial(address, text, addresses):
                reasons.append(f"{text} leads back here, or was dialled too often in vain")
                silent.add(RELAYED if isinstance(address, CircuitAddress) else address.host)
                continue
            try:
                await self._dial_where_it_leads(address, addresses, max(share_s, 0), handshake_s)
                self._targets.reached(address)
                return
            except NetworkError as error:
                reasons.append(str(error))
                is_busy |= isinstance(error, transport.HandshakeUnfinished)
                if isinstance(address, CircuitAddress):
                    silent.add(RELAYED)  # that a relay does not know the way proves nothing of the peer
                else:
                    (refused if isinstance(error, transport.NobodyListens) else silent).add(address.host)
        raise NotReached(
            f"cannot reach {peer}: {'; '.join(reasons[:DIAL_REASONS_SHOWN]) or 'no address known'}",
            refused=frozenset(refused),
            silent=frozenset(silent - refused),
            is_busy=is_busy,
        )

    async def _dial_where_it_leads(
        self, address: Address | CircuitAddress, beside: Sequence[str], deadline_s: float, handshake_s: float | None
    ) -> None:
        """Dial one address of a peer; a name that others gave, where it leads and the peer may be. As `dial_peer`."""
        named = address.relay if isinstance(address, CircuitAddress) else address
        if named.peer in self.connected():  # and were it gone this very moment, it is not dialled without a look
            if isinstance(address, CircuitAddress):
                await self._network.dial(address, deadline_s=deadline_s, handshake_s=handshake_s)
            return
        if not self._targets.is_name_of_others(address):
            await self._dial(address, deadline_s, handshake_s)
            return
        ends_at = trio.current_time() + deadline_s
        failure = NetworkError(f"{named.host} leads nowhere that {named.peer} may be, or was not found in time")
        places: list[Address | CircuitAddress] = []
        with trio.move_on_at(ends_at):
            places = await places_of(address, beside, on_loopback=self._dials_loopback)
        for tried, place in enumerate(places):
            if self._targets.may_dial(place):
                share_s = (ends_at - trio.current_time()) / (len(places) - tried)
                try:
                    await self._dial(place, max(share_s, 0), handshake_s)
                    self._targets.reached(place)
                    return
                except NetworkError as error:
                    failure = error
        raise failure

    async def _dial(
        self, address: Address | CircuitAddress, deadline_s: float, handshake_s: float | None = None
    ) -> None:
        """Dial one address as it stands, and before it a relay that is not connected."""
        ends_at = trio.current_time() + deadline_s
        if isinstance(address, CircuitAddress) and address.peer not in self.connected():
            await self._network.dial(address.relay, deadline_s=deadline_s)
        left_s = max(ends_at - trio.current_time(), 0.0)
        await self._network.dial(address, deadline_s=left_s, handshake_s=handshake_s)

    async def take_over(self, stream: trio.SocketStream, peer: PeerId, *, dialled: bool) -> None:
        """Make of a TCP connection that is up already the one to `peer`, in the place of one through a relay.

        One end has to have it `dialled`, and the other not. Raises NetworkError unless the far end proves to be the
        peer in time; the socket is closed then, and when cancelled.
        """
        await self._network.take_over(stream, peer, dialled=dialled)

    def dial_anew(self) -> None:
        """Have every address dialled as if it had not been yet: this machine's network is another one."""
        self._targets.begin_anew()

    def _may_dial(self, address: Address | CircuitAddress, text: str, beside: Sequence[str]) -> bool:
        """Return True if dialling this address costs no third party more than it may; the dial is counted.

        beside: all of the peer's addresses; a relay may have gone since those were found to be worth a dial.
        """
        first = address.relay.peer if isinstance(address, CircuitAddress) else address.peer
        if first == self.peer_id:
            return False
        if not isinstance(address, CircuitAddress):
            return first in self.connected() or self._targets.may_dial(address)
        is_worth = text in worth_dialling(beside, on_loopback=self._dials_loopback)
        return self.is_direct(first) or (is_worth and self._targets.may_dial(address))

    @property
    def _dials_loopback(self) -> bool:
        return self._targets.names_loopback or all(is_loopback(parse_address(text).host) for text in self.addresses)

    def ping(self, peer: PeerId, number: int) -> None:
        """Ask a connected peer for a sign of life, whose number (32 bits) is this one's. Never waits."""
        self._network.ping(peer, number)

    def connected(self) -> frozenset[PeerId]:
        """The peers connected now."""
        return self._network.peers()

    def strangers(self) -> list[tuple[float, PeerId]]:
        """The peers that dialled this node and are not admitted, and since when they are connected, oldest first."""
        return sorted((since, peer) for since, peer in self._network.came() if not self.is_admitted(peer))

    def _gives_way(self, newcomer: PeerId) -> PeerId | None:
        """Return whose connection ends for a new one where there are too many: the oldest of who is not admitted.

        Raises NetworkError if nobody's does, unless the newcomer comes first: of those there are few.
        """
        self.refusals.note(Reason.CONNECTIONS)
        loser = next((peer for _, peer in self.strangers() if not self.comes_first(peer)), None)
        if loser is None and not self.comes_first(newcomer):
            raise NetworkError(f"all connections are taken; there is none for {newcomer}")
        return loser

    def connection(self, peer: PeerId) -> object | None:
        """The connection to `peer` that there is now, to be told from one that takes its place, and for `close`."""
        return self._network.connection(peer)

    def came_over(self, stream: MessageStream, connection: Any) -> bool:
        """True if a stream that a peer opened came over this connection, and not over one before or after it."""
        return connection is not None and stream.over is connection.muxed_conn

    async def hang_up(self, peer: PeerId) -> None:
        """Close the connection by which this node called a peer, where there are many (bounded).

        Nothing is done where this node is called through that peer.
        """
        connection = self._network.connection(peer) if self._network.is_crowded else None
        if connection is not None and connection.muxed_conn.is_initiator and peer not in self.circuits.reserved:
            await self._network.drop(connection)

    async def close(self, connection: object | None) -> None:
        """Close this connection, and no other with its peer, without asking it (bounded).

        Cancellation: closed all the same.
        """
        if connection is not None:
            await self._network.drop(connection)

    def host_of(self, peer: PeerId) -> str | None:
        """The IP address at the other end of the connection to a peer, None if there is none, or it is relayed."""
        return self._network.host_of(peer)

    def own_host_of(self, peer: PeerId) -> str | None:
        """The IP address of this end of the connection to a peer, None if there is none, or it is relayed."""
        return self._network.own_host_of(peer)

    def is_direct(self, peer: PeerId) -> bool:
        """True if a peer is connected, and not through a relay."""
        return self._network.is_direct(peer)

    @property
    def protocols(self) -> frozenset[str]:
        """Names of the protocols that peers can open streams of."""
        return frozenset(map(str, self._libp2p.multiselect.get_protocols()))

    def tell_addresses(self) -> None:
        """Answer from now on, when libp2p's identify asks, where this node listens: other software passes that on."""
        transport.tell_addresses(self._libp2p, lambda: self.addresses)

    def watch(self) -> Mailbox[ConnectionChange]:
        """Connections that begin and end from now on; close it to stop. Compare `connected` if it ever dropped any."""
        watcher: Mailbox[ConnectionChange] = Mailbox(CHANGES_LIMIT_ITEMS)
        self._watchers.append(watcher)
        return watcher

    def rtt_s(self, peer: PeerId) -> float | None:
        """The round trip to a connected peer, smoothed, in seconds; None if not connected."""
        return self._network.rtt_s(peer)

    # -- streams and requests ------------------------------------------------------------------------------------

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        *,
        deadline_s: float,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        framing: Framing | None = None,
    ) -> MessageStream:
        """A new stream to a connected peer that serves `protocol`; received messages may have `limit_bytes`.

        Raises NetworkError. Cancellation leaves no stream behind.
        """
        raw = await self._network.open_stream(peer, protocol, deadline_s=deadline_s)
        stream = MessageStream(
            _framed(raw, framing), peer=peer, limit_bytes=limit_bytes, traffic=self.traffic, memory=self._memory
        )
        if self._streams is None:
            raise NetworkError("the host is not running")
        self._streams.start_soon(stream.run)
        return stream

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        deadline_s: float,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        framing: Framing | None = None,
    ) -> bytes:
        """Send one message on a stream of its own and return the one that answers it.

        Raises NetworkError, or RemoteError for an answer over `limit_bytes`. Cancellation resets the stream.
        """
        end = trio.current_time() + deadline_s
        room_bytes = max(limit_bytes, len(payload))
        stream = await self.open(peer, protocol, deadline_s=deadline_s, limit_bytes=room_bytes, framing=framing)
        try:
            await stream.send(payload, deadline_s=max(end - trio.current_time(), 0))
            answer = await stream.receive(deadline_s=max(end - trio.current_time(), 0))
        except BaseException:
            await stream.abort()
            raise
        await stream.aclose()
        if len(answer) > limit_bytes:
            raise RemoteError(f"an answer of {len(answer)} bytes exceeds the limit of {limit_bytes}", peer=peer)
        return answer

    # -- gossip --------------------------------------------------------------------------------------------------

    def gossip_with(self, peer: PeerId) -> None:
        """A connected peer was admitted: what is published goes to it as well, from now on."""
        self._gossip.include(peer)

    async def publish(self, topic: str, data: bytes) -> None:
        """Send `data` to all subscribers of `topic`. Raises LocalError over PUBLISH_LIMIT_BYTES."""
        await self._gossip.publish(topic, data)

    async def subscribe(self, topic: str) -> Mailbox[GossipMessage]:
        """Return a mailbox of what others publish on `topic` from now on; the oldest is dropped when nobody reads."""
        return await self._gossip.subscribe(topic)

    def gossip_peers(self, topic: str) -> frozenset[PeerId]:
        """The connected peers known to subscribe to `topic`."""
        return self._gossip.peers(topic)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _bind(self) -> list[trio.SocketListener]:
        listeners: list[trio.SocketListener] = []
        with contextlib.ExitStack() as undo:
            for address in self._listen:
                try:
                    opened = await trio.open_tcp_listeners(address.port, host=address.host)
                except OSError as error:
                    raise _unusable(address, error) from None
                for listener in opened:
                    undo.callback(listener.socket.close)
                listeners += opened
            undo.pop_all()
        return listeners

    def _may_belong(self, peer: PeerId) -> bool:
        return self.is_admitted(peer) or self.comes_first(peer) or self.is_expected(peer)

    async def _accept(self, stream: trio.SocketStream, address: str) -> None:
        muxer: Muxer | None = None
        with self._half_open.entering(address):
            if await self.dial_back_probes.took(stream):
                return
            muxer = await self._network.accept(stream)
        if muxer is None:
            self.refusals.note(Reason.HANDSHAKE_FAILED)
        else:
            await muxer.event_closed.wait()  # the socket is closed when this task returns

    def _changed(self, peer: PeerId, connected: bool) -> None:
        self._watchers[:] = [watcher for watcher in self._watchers if not watcher.closed]
        for watcher in self._watchers:
            watcher.put(ConnectionChange(peer=peer, connected=connected))


async def as_a_stranger(work: Callable[[Host], Awaitable[Result]]) -> Result:
    """Do `work` with a host of its own, which listens nowhere, under a key made for that, and return its result.

    So nobody is told who asks, and no connection under this node's key ends. Raises what `work` raises, unwrapped.
    Cancellation leaves nothing behind.
    """
    host = Host(identity=Identity.generate(), listen=())
    found: list[Result] = []
    failure: ShoalError | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        try:
            found.append(await work(host))
        except ShoalError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return found[0]


def _framed(raw: RawStream, framing: Framing | None) -> RawStream:
    return raw if framing is None else framing(raw)


def _blames_peer(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(RemoteError) is not None
    return isinstance(error, RemoteError)


def _unusable(address: ListenAddress, error: OSError) -> ConfigError:
    where = f"port {address.port} of {address.host}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use by another program; choose another port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"{where} is reserved for the system; choose a port above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"this machine has no address {address.host}; use --listen /ip4/0.0.0.0/tcp/0 for all of its addresses"
        )
    return ConfigError(f"cannot listen on {where}: {error}; choose another --listen")
