"""libp2p as Shoal runs it: Noise over TCP, yamux, one connection per peer, and every fault fenced off.

With its neighbours `shoal.swarm.muxer` (one connection), `shoal.swarm.net_stream` (one stream) and `shoal.swarm.gossip`
this is all that knows libp2p (0.8).
It changes what could not stay as it is, and each change is a small class that says why:

* `Network`  — the swarm: exactly one connection per peer; the far end has answered before a dial succeeds.
* `Fence`    — the service manager: a task that fails (a peer's malformed message, say) ends alone, not the process.

libp2p's own dialler and listener are not used. The dialler sleeps, remembers failures for a minute and picks
addresses itself; the listener shares its port with any other process of the same user (SO_REUSEPORT), so that
two nodes on one port each get half the connections, and counts an inbound connection as open for ever.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import trio
from multiaddr import Multiaddr

from shoal.protocol.address import Address, CircuitAddress
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm.lanes.socket import reason_of
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.limits import HALF_OPEN_LIMIT, Memory, PeerLimits
from shoal.swarm.muxer import CLOSE_DEADLINE_S, CONNECTION_HANDSHAKE_DEADLINE_S, FOREIGN_ERRORS, Muxer, Wire
from shoal.swarm.net_stream import AnyStream, NetStream, agree, peer_of, reset_quietly
from shoal.swarm.peer_ids import libp2p_id
from shoal.swarm.reaching.circuits import Circuits, is_relayed

with only_what_runs():
    from libp2p.abc import INotifee
    from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.host import basic_host
    from libp2p.host.basic_host import BasicHost
    from libp2p.identity.identify.identify import ID as IDENTIFY_PROTOCOL
    from libp2p.identity.identify.identify import identify_handler_for
    from libp2p.network.auto_connector import AutoConnector
    from libp2p.network.config import ConnectionConfig
    from libp2p.network.connection import swarm_connection
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.network.exceptions import SwarmException
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.peer.peerstore import PeerStore
    from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
    from libp2p.tools.anyio_service.exceptions import LifecycleError
    from libp2p.tools.anyio_service.trio_manager import TrioManager
    from libp2p.transport.exceptions import MuxerUpgradeFailure
    from libp2p.transport.upgrader import TransportUpgrader

log = logging.getLogger("shoal.libp2p")

SIMULTANEOUS_DIAL_WINDOW_S = 2.0
"""From when one connection is there until the handshake of another begins which the far end dialled at the same time.
Whoever dials finds out before the handshake that it is connected already; so if it goes on, it lost what was there."""
TAKE_OVER_DEADLINE_S = 5.0
DAEMON_RESTART_DELAY_S = 1.0


class _Demote(logging.Handler):
    """Passes libp2p's warnings and errors on to our log as debug lines: each is ordinary network weather to us."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("%s: %s", record.name, record.getMessage())


def _redirect_log() -> None:
    """Take libp2p's loggers over; to be called once it is imported."""
    logger = logging.getLogger("libp2p")
    if logger.handlers:
        return  # somebody asked libp2p itself to log, with LIBP2P_DEBUG
    logger.propagate = False
    logger.addHandler(_Demote(logging.WARNING))
    # This module logs on the root logger, which sets up a handler on standard error for everybody.
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")


class NobodyListens(NetworkError):
    """The machine is there and refused the connection."""


class HandshakeUnfinished(NetworkError):
    """Somebody took the connection, and the handshake was not done in time: a machine that has much to do, say."""


class _Upgrader(TransportUpgrader):  # type: ignore[misc]
    """Makes our `Muxer`; libp2p's own upgrader makes its Yamux whatever class it was given for that protocol."""

    memory: Memory | None = None

    async def upgrade_security(self, raw_conn: Any, is_initiator: bool, peer_id: ID | None = None) -> Any:
        began_at = trio.current_time()
        secured = await super().upgrade_security(raw_conn, is_initiator, peer_id)
        secured.began_at = began_at
        secured.allowance = raw_conn.stream.allowance
        secured.wire = raw_conn.stream
        return secured

    async def upgrade_connection(self, conn: Any, peer_id: ID) -> Muxer:
        try:
            muxer_class = await self.muxer_multistream.select_transport(conn)
        except (MultiselectError, MultiselectClientError) as error:
            raise MuxerUpgradeFailure("no common stream muxer") from error
        conn.allowance.known(PeerId(str(peer_id)))
        muxer: Muxer = muxer_class(conn, peer_id, is_initiator=conn.is_initiator, memory=self.memory)
        muxer.began_at = conn.began_at
        return muxer


class Fence(TrioManager):  # type: ignore[misc]
    """Runs a libp2p service so that one failing task does not end the others, nor the process."""

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        daemon: bool = False,
        name: str | None = None,
        _internal: bool = False,
    ) -> None:
        if _internal:  # the service's own run(): its failure is ours to see
            super().run_task(async_fn, *args, daemon=daemon, name=name, _internal=True)
            return
        if self._task_nursery is None or not self.is_running:
            raise LifecycleError("the service is not running")
        self._task_nursery.start_soon(_run_fenced, async_fn, args, daemon)


async def _run_fenced(async_fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], daemon: bool) -> None:
    while True:
        try:
            await async_fn(*args)
        except Exception:  # the boundary: these tasks handle what peers send
            log.debug("a libp2p task failed: %s", async_fn, exc_info=True)
        if not daemon:
            return
        await trio.sleep(DAEMON_RESTART_DELAY_S)


@contextlib.asynccontextmanager
async def running(service: Any) -> AsyncIterator[None]:
    """Run a libp2p service behind a `Fence` for as long as the block lasts."""
    async with trio.open_nursery() as nursery:
        manager = Fence(service)
        service._manager = manager
        nursery.start_soon(manager.run)
        await manager.wait_started()
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()


class _NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """libp2p would dial peers on its own until it has 50 connections; whom we connect to is ours to say."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        pass


class Network(Swarm):  # type: ignore[misc]
    """libp2p's swarm with our dialler, our acceptor, and one connection per peer.

    A duplicate would do harm: GossipSub keeps its two streams with a peer on whichever connection was there,
    and closing that one later leaves a node deaf to the peer's topics. So a connection is decided upon *before*
    it is registered: the end that dialled waits for the far end's answer, and the far end answers only when it
    accepts. Of two connections made at once, the one dialled by the lower PeerId stays.
    """

    def __init__(self, *, identity: Identity, connection_limit: int, memory: Memory | None = None) -> None:
        keys = ed25519_key_pair(identity.private_bytes())
        peerstore = PeerStore()
        own_id = ID.from_pubkey(keys.public_key)
        peerstore.add_key_pair(own_id, keys)
        # Noise and nothing else: by default libp2p also accepts plaintext, and believes the PeerId claimed there.
        upgrader = _Upgrader(
            {NOISE: NoiseTransport(keys, noise_privkey=x25519_key_pair().private_key)},
            {TProtocol(YAMUX): Muxer},
            negotiate_timeout=int(CONNECTION_HANDSHAKE_DEADLINE_S),
        )
        upgrader.memory = self.memory = memory
        self._connection_limit = connection_limit
        # Where libp2p's own limit is reached it refuses whoever comes, before it knows who that is.
        config = ConnectionConfig(
            max_connections=connection_limit + HALF_OPEN_LIMIT,
            high_watermark=connection_limit + HALF_OPEN_LIMIT,
            min_connections=0,
            low_watermark=0,
            inbound_upgrade_timeout=CONNECTION_HANDSHAKE_DEADLINE_S,
            outbound_upgrade_timeout=CONNECTION_HANDSHAKE_DEADLINE_S,
        )
        super().__init__(own_id, peerstore, upgrader, transports=[], connection_config=config)
        self.auto_connector = _NoAutoConnector(swarm=self)
        self._wires: set[Wire] = set()
        self._dials: dict[ID, trio.Event] = {}
        self._turns: dict[ID, trio.Lock] = {}
        self.circuits: Circuits | None = None
        self.peer_limits: PeerLimits | None = None
        self.pinged: Callable[[PeerId, int | None], None] = lambda peer, number: None
        """Called with each ping of a peer's connection, None, and each answer of its to one, by its number."""
        self.gives_way: Callable[[PeerId], PeerId | None] = lambda peer: None
        """Picks whose connection ends for a new one of this peer, if there are too many; NetworkError if none may."""

    # -- connections ---------------------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> Muxer | None:
        """Shake hands with whoever connected; on any failure the socket is closed and nothing else happens."""
        muxer: Muxer | None = None
        wire = Wire(stream, self.memory)
        with trio.move_on_after(CONNECTION_HANDSHAKE_DEADLINE_S), self._tracked(wire):
            try:
                muxer = await self.upgrade_inbound_raw_conn(RawConnection(wire, False), None)
            except Exception as error:  # the boundary: a stranger sent whatever it pleased
                wire.sever()
                log.debug("refused a connection: %r", error)
        return muxer

    async def dial(
        self, address: Address | CircuitAddress, *, deadline_s: float, handshake_s: float | None = None
    ) -> None:
        """Connect to `address` unless its peer is connected already. Raises NetworkError.

        handshake_s: from when somebody took the connection; as long as `deadline_s` leaves where that is not said. A
        handshake that was begun is work of both ends, which is lost if it is given up.
        Cancellation leaves no connection behind, or a complete one.
        """
        peer_id = libp2p_id(address.peer)
        taken = False

        def taken_now() -> None:
            nonlocal taken
            taken = True
            if handshake_s is not None:
                scope.deadline = trio.current_time() + handshake_s

        with trio.move_on_after(deadline_s + (handshake_s or 0.0)) as scope:
            while (other := self._dials.get(peer_id)) is not None:
                await other.wait()
            if handshake_s is not None:
                scope.deadline = trio.current_time() + deadline_s
            if self.link(peer_id) is not None:
                return
            self._dials[peer_id] = done = trio.Event()
            try:
                if isinstance(address, CircuitAddress):
                    await self._dial_through(address, peer_id)
                else:
                    await self._dial(address, peer_id, taken_now)
            finally:
                del self._dials[peer_id]
                done.set()
        if scope.cancelled_caught and self.link(peer_id) is None:
            where = f"{address.host}:{address.port}" if isinstance(address, Address) else f"the relay of {peer_id}"
            if taken:
                given_s = deadline_s if handshake_s is None else handshake_s
                raise HandshakeUnfinished(f"{where} took the connection, but no handshake within {given_s:.1f} s")
            raise NetworkError(f"{where} did not answer within {deadline_s:.1f} s")

    async def _dial(self, address: Address, peer_id: ID, taken: Callable[[], None]) -> None:
        try:
            wire = Wire(await trio.open_tcp_stream(address.host, address.port), self.memory)
        except (OSError, ValueError) as error:  # the latter for what no name of a machine can be
            if self.link(peer_id) is None:
                raise _reason_not_connected(address, error) from error
            return
        taken()
        if self.is_direct(PeerId(str(peer_id))):  # the peer dialled at the same time, and was first
            wire.sever()
            return
        try:
            with self._tracked(wire):
                await self.upgrade_outbound_raw_conn(RawConnection(wire, True), peer_id)
        except Exception as error:  # the boundary: whoever listens there sent whatever it pleased
            if self.link(peer_id) is None:  # else the peer's own dial won, which is as good
                raise NetworkError(f"cannot connect to {address.host}:{address.port}: {error}") from error

    async def _dial_through(self, address: CircuitAddress, peer_id: ID) -> None:
        if self.circuits is None:
            raise NetworkError("this node dials through no relay")
        wire = await self.circuits.dial(address)
        try:
            await self.upgrade_outbound_raw_conn(wire.raw(dialled=True), peer_id)
        except BaseException as error:
            await wire.close()
            if not isinstance(error, Exception):
                raise
            if self.link(peer_id) is None:
                raise NetworkError(f"cannot connect to {peer_id} through {address.relay.peer}: {error}") from error

    async def take_over(self, stream: trio.SocketStream, peer: PeerId, *, dialled: bool) -> None:
        """Make of a TCP connection that is up already the connection to a peer, with this node as `dialled` says.

        Raises NetworkError unless the far end proves to be the peer; the socket is closed then, and when cancelled.
        """
        wire, peer_id = Wire(stream, self.memory), libp2p_id(peer)
        with trio.move_on_after(TAKE_OVER_DEADLINE_S), self._tracked(wire):
            try:
                if dialled:
                    await self.upgrade_outbound_raw_conn(RawConnection(wire, True), peer_id)
                else:
                    await self.upgrade_inbound_raw_conn(RawConnection(wire, False), None)
            except Exception as error:  # the boundary: whoever is there sent whatever it pleased
                raise NetworkError(f"no connection to {peer} comes of it: {error}") from error
        if not self.is_direct(peer):
            wire.sever()  # also where it is another peer's
            raise NetworkError(f"{peer} is not at the other end")

    @contextlib.contextmanager
    def _tracked(self, wire: Wire) -> Iterator[None]:
        """Remember the wire for `sever_all`, and close it if the block does not succeed."""
        self._wires = {known for known in self._wires if not known.closed}
        self._wires.add(wire)
        try:
            yield
        except BaseException:
            wire.sever()
            raise

    async def add_conn(self, muxed_conn: Muxer, direction: str = "unknown") -> Any:
        """Register a connection that passed its handshake, as the only one to its peer, or refuse it."""
        peer_id = muxed_conn.peer_id
        peer = PeerId(str(peer_id))
        muxed_conn.on_ping(lambda number: self.pinged(peer, number))
        if self.peer_limits is not None:
            muxed_conn.pace(partial(self.peer_limits.small_frame, PeerId(str(peer_id))))
            if not muxed_conn.is_initiator:
                muxed_conn.take_turns(partial(self.peer_limits.turn, PeerId(str(peer_id)), _host_of(muxed_conn)))
        try:
            if muxed_conn.is_initiator:
                self.manager.run_task(muxed_conn.start)
                await muxed_conn.confirm()
            elif str(self.self_id) < str(peer_id) and (dial := self._dials.get(peer_id)) is not None:
                with trio.move_on_after(CONNECTION_HANDSHAKE_DEADLINE_S / 2):
                    await dial.wait()
            async with self._turn(peer_id):
                await self._make_way(muxed_conn)
                await self._make_room(peer_id)
                muxed_conn.opened_at = trio.current_time()
                return await super().add_conn(muxed_conn, direction)
        except BaseException:
            with trio.CancelScope(shield=True):
                await muxed_conn.secured_conn.close()
            raise

    @contextlib.asynccontextmanager
    async def _turn(self, peer_id: ID) -> AsyncIterator[None]:
        """One registration at a time per peer."""
        turn = self._turns.setdefault(peer_id, trio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked() and self._turns.get(peer_id) is turn:
                del self._turns[peer_id]

    @property
    def is_crowded(self) -> bool:
        """True if half of the connections that there may be are taken."""
        return 2 * len(self.get_connections()) >= self._connection_limit

    async def _make_way(self, new: Muxer) -> None:
        """Drop the connection that `new` replaces. Raises SwarmException if `new` is the one to go."""
        for old in self.get_connections(new.peer_id):
            if is_relayed(new) and not is_relayed(old.muxed_conn) and self.is_direct(PeerId(str(new.peer_id))):
                raise SwarmException(f"{new.peer_id} is connected without a relay")
            if is_relayed(old.muxed_conn) and not is_relayed(new):
                await self.drop(old, "a direct connection took its place")
                continue
            at_once = new.began_at - old.muxed_conn.opened_at < SIMULTANEOUS_DIAL_WINDOW_S
            if at_once and self._dialler(old.muxed_conn) < self._dialler(new):
                raise SwarmException(f"{new.peer_id} is already connected")
            await self.drop(old, "another connection took its place")

    async def _make_room(self, newcomer: ID) -> None:
        """End a connection that gives way, where there are as many as may be. Raises NetworkError if none does."""
        if len(self.get_connections()) >= self._connection_limit:
            peer = self.gives_way(PeerId(str(newcomer)))
            if peer is not None:
                await self.drop_peer(peer)

    def _dialler(self, muxer: Muxer) -> str:
        return str(self.self_id if muxer.is_initiator else muxer.peer_id)

    async def drop(self, conn: Any, why: str = "") -> None:
        """Close a connection, its socket first, so that no farewell can hang (bounded)."""
        conn.muxed_conn.secured_conn.note_end(why)
        with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            await conn.muxed_conn.secured_conn.close()
            await conn.close()

    def sever_all(self) -> None:
        """Close every socket now."""
        for wire in self._wires:
            wire.sever()
        self._wires.clear()

    def remove_conn(self, swarm_conn: Any) -> None:
        """Forget a connection that has ended, and with a peer's last one what libp2p keeps of the peer."""
        super().remove_conn(swarm_conn)
        peer_id = swarm_conn.muxed_conn.peer_id
        if peer_id not in self.connections:
            self.peerstore.peer_data_map.pop(peer_id, None)
            self.peerstore.peer_record_map.pop(peer_id, None)

    async def drop_peer(self, peer: PeerId) -> None:
        """Close whatever connects us to `peer`."""
        for conn in self.get_connections(libp2p_id(peer)):
            await self.drop(conn)

    async def drop_connection_of(self, stream: AnyStream) -> None:
        """Close the connection that a stream came over, and no other with its peer."""
        for conn in self.get_connections(stream.muxed_conn.peer_id):
            if conn.muxed_conn is stream.muxed_conn:
                await self.drop(conn)

    def peers(self) -> frozenset[PeerId]:
        """The peers with a live connection."""
        return frozenset(PeerId(str(peer_id)) for peer_id in self.connections if self.link(peer_id) is not None)

    def came(self) -> list[tuple[float, PeerId]]:
        """The peers with a live connection that they dialled, and when it was opened."""
        links = [self.link(peer_id) for peer_id in self.connections]
        muxers = [link.muxed_conn for link in links if link is not None and not link.muxed_conn.is_initiator]
        return [(muxer.opened_at, PeerId(str(muxer.peer_id))) for muxer in muxers]

    def rtt_s(self, peer: PeerId) -> float | None:
        """The smoothed round trip in seconds, None for a peer that is not connected."""
        conn = self.connection(peer)
        return None if conn is None else float(conn.muxed_conn.rtt())

    def ping(self, peer: PeerId, number: int) -> None:
        """Ask a peer over its connection, if there is one, whether it is there. Never waits."""
        conn = self.connection(peer)
        if conn is not None:
            conn.muxed_conn.ping(number)

    def host_of(self, peer: PeerId) -> str | None:
        """The IP address at the other end of the connection to a peer, None if there is none."""
        conn = self.connection(peer)
        return None if conn is None else _host_of(conn.muxed_conn)

    def own_host_of(self, peer: PeerId) -> str | None:
        """The IP address of this end of the connection to a peer, None if there is none, or it is relayed."""
        conn = self.connection(peer)
        return None if conn is None else conn.muxed_conn.secured_conn.wire.own_host

    def is_direct(self, peer: PeerId) -> bool:
        """True if a peer is connected, and not through a relay."""
        conn = self.connection(peer)
        return conn is not None and not is_relayed(conn.muxed_conn)

    def connection(self, peer: PeerId) -> Any | None:
        """The live connection to a peer, or None."""
        return self.link(libp2p_id(peer))

    def link(self, peer_id: ID) -> Any | None:
        """The live connection to a peer, or None."""
        for conn in self.connections.get(peer_id, ()):
            if not conn.is_closed and not conn.muxed_conn.event_shutting_down.is_set():
                return conn
        return None

    # -- streams -------------------------------------------------------------------------------------------------

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> NetStream:
        """A stream to a connected peer, agreed on `protocol`. Raises NetworkError. Cancellation resets it."""
        try:
            conn = self.connection(peer)
        except ValueError:
            raise NetworkError(f"{peer} is no PeerId") from None
        if conn is None:
            raise NetworkError(f"{peer} is not connected")
        if conn.muxed_conn.stream_backlog_semaphore.value == 0:
            raise NetworkError(f"too many streams to {peer} are open")
        try:
            # A cancelled open would leak its slot; it waits for nothing but one small frame.
            with trio.CancelScope(shield=True):
                stream = await conn.new_stream()
        except FOREIGN_ERRORS as error:
            raise NetworkError(f"cannot open a stream to {peer}: {error}") from error
        agreed = False
        try:
            with trio.move_on_after(deadline_s) as scope:
                agreed = await agree(stream, protocol)
        except Exception as error:  # the boundary: the peer answered whatever it pleased
            raise NetworkError(f"{peer} does not answer for {protocol}: {error}") from error
        finally:
            if not agreed:
                await reset_quietly(stream)
        if scope.cancelled_caught:
            raise NetworkError(f"{peer} did not open a stream of {protocol} within {deadline_s:g} s")
        if not agreed:
            raise NetworkError(f"{peer} does not serve {protocol}")
        return NetStream(stream)


def _host_of(muxer: Muxer) -> str | None:
    remote = muxer.secured_conn.get_remote_address()
    return None if remote is None else str(remote[0]).removeprefix("::ffff:")


def _reason_not_connected(address: Address, error: Exception) -> NetworkError:
    """Trio names the system's error as the cause where it tried one address, and a group of them where several."""
    cause = error.__cause__ or error
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
    refused = all(isinstance(one, ConnectionRefusedError) for one in causes)
    if refused:
        return NobodyListens(f"nobody listens at {address.host}:{address.port}")
    reasons = dict.fromkeys(map(reason_of, causes))
    return NetworkError(f"cannot connect to {address.host}:{address.port}: {', '.join(reasons)}")


def make_host(network: Network, peer_limits: PeerLimits) -> BasicHost:
    """libp2p's host over `network`: it serves nothing of its own, and asks nobody."""
    host = BasicHost(network=network, announce_addrs=[], disable_identify_address_discovery=True)
    host.multiselect.handlers.clear()  # identify push, above all, keeps whatever a stranger says of itself
    network.peer_limits = peer_limits
    # Asking each peer who it is would teach us addresses that nobody proved; NodeRecords carry signed ones.
    network.notifees = [n for n in network.notifees if not isinstance(n, basic_host._IdentifyNotifee)]

    async def handle_stream(stream: AnyStream) -> None:
        """libp2p lets a handler's exception end the process; and a peer can cause one before any handler runs."""
        peer = peer_of(stream)
        with peer_limits.stream(peer) as welcome:
            if not welcome:
                if peer_limits.is_flooding(peer):
                    await network.drop_connection_of(stream)
                await reset_quietly(stream)
                return
            try:
                await host._swarm_stream_handler(stream)
            except Exception:
                log.debug("a stream from %s failed", peer, exc_info=True)
                await reset_quietly(stream)

    network.set_stream_handler(handle_stream)
    return host


def tell_addresses(libp2p_host: Any, addresses: Callable[[], Iterable[str]]) -> None:
    """Answer identify from now on, with these addresses as they are whenever somebody asks: software that passes
    addresses on, and is not Shoal."""
    libp2p_host.set_stream_handler(IDENTIFY_PROTOCOL, identify_handler_for(libp2p_host, use_varint_format=True))
    libp2p_host._addrs_factory = lambda _: [Multiaddr(text.rsplit("/p2p/", 1)[0]) for text in addresses()]


class ConnectionNotifee(INotifee):  # type: ignore[misc]
    """Calls back when a peer's connection begins and when it has ended."""

    def __init__(self, changed: Callable[[PeerId, bool], None]) -> None:
        self._changed = changed

    async def connected(self, network: Any, conn: Any) -> None:
        self._changed(PeerId(str(conn.muxed_conn.peer_id)), True)

    async def disconnected(self, network: Any, conn: Any) -> None:
        self._changed(PeerId(str(conn.muxed_conn.peer_id)), False)

    async def opened_stream(self, network: Any, stream: AnyStream) -> None:
        pass

    async def closed_stream(self, network: Any, stream: AnyStream) -> None:
        pass

    async def listen(self, network: Any, multiaddr: Any) -> None:
        pass

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        pass


_redirect_log()
