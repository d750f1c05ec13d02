"""All lanes of one node: the listener, the dialling, and who has which lanes. Trio owns their lifetime.

    ensure(peer) ─ LaneOffer over libp2p ─► the peer's answer(): keys, id, addresses   (the id waits here)
                 ─ TCP, id ‖ sealed hello ─► listener: authenticates, answers with its hello
    both sides hand the socket to a Lane's threads

Until its hello is authenticated a connection is a stranger: a trio task, no thread, STRANGER_DEADLINE_S to live,
at most UNAUTHENTICATED_LIMIT of them (the oldest gives way). An id is consumed only by an authentic hello, so a
stranger who saw it cannot use it up. Every dial has fresh keys; only addresses from the peer's own answer,
which came over its authenticated channel, are dialled.

Either side's lane serves both directions. Where both dialled at once there are lanes to spare: the side with
the lower PeerId, and only it, retires the surplus in order (CLOSE after what is queued, so nothing is lost). Worn
lanes go first, then the ones the other side dialled. One side that decides cannot disagree with itself.

A node that cannot reach a peer summons it: asks it, over libp2p, to dial. A summoned node never summons back.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
import trio

from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.frame import HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lane import JOIN_DEADLINE_S, FrameSink, Lane, LaneLimits
from shoal.swarm.seal import (
    ADDRESS_LIMIT,
    LANE_ID_BYTES,
    LANES_PER_PEER_LIMIT,
    SEAL_OVERHEAD_BYTES,
    LaneKeys,
    LaneProposal,
    LaneSummons,
    Opener,
    Sealer,
    accept_offer,
    decode_answer,
    decode_request,
    encode_handshake,
    format_address,
    parse_address,
)

if TYPE_CHECKING:
    from trio_typing import TaskStatus

STRANGER_DEADLINE_S = 2.0
UNAUTHENTICATED_LIMIT = 64
CONNECTIONS_PER_ID_LIMIT = 4
PENDING_DEADLINE_S = 30.0
PENDING_PER_PEER_LIMIT = 32
PENDING_LIMIT = 4096
LANE_COUNT_LIMIT = 4096
JOB_LIMIT = LANE_COUNT_LIMIT
CLOSER_LIMIT = 8  # threads that wait for lanes to close in order
CONNECT_DEADLINE_S = 5.0
CONNECT_STAGGER_S = 0.25
HELLO_DEADLINE_S = 5.0
SUMMONED_DIAL_DEADLINE_S = 15.0

_HELLO_TEXT = b"shoal lane hello"
_HELLO = FrameHeader(kind=FrameKind.HELLO, length=len(_HELLO_TEXT) + LANE_ID_BYTES)
_HELLO_WIRE_BYTES = _HELLO.length + SEAL_OVERHEAD_BYTES

Request = Callable[[PeerId, bytes], Awaitable[bytes]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """Measured rates with one peer in bytes per second while busy, over all its lanes. None: not known yet."""

    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None


@dataclass(slots=True)
class _Pending:
    """A lane that was agreed on and whose connection has not come yet."""

    keys: LaneKeys
    expires_at: float
    connections: int = 0


class LanePool:
    """The lanes of the node `me`.

    request: sends bytes to a peer's `answer` over the authenticated libp2p channel and returns the reply; raises
    NetworkError or RemoteError. advertise: 'host:port' texts that replace what the listener would say of itself.

    Use from trio's thread only; the sink is called in the lanes' threads.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        swarm_id: bytes,
        sink: FrameSink,
        listen: tuple[str, int],
        request: Request,
        advertise: tuple[str, ...] = (),
        limits: LaneLimits | None = None,
    ) -> None:
        _check_advertised(advertise)
        self.addresses: tuple[str, ...] = ()  # 'host:port', once started
        self._me = me
        self._swarm_id = swarm_id
        self._sink = sink
        self._listen = listen
        self._advertise = advertise
        self._request = request
        self._limits = limits or LaneLimits()
        self._up = False
        self._pending: dict[bytes, _Pending] = {}
        self._strangers: OrderedDict[object, trio.CancelScope] = OrderedDict()
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._summoned: set[PeerId] = set()
        self._asked_for: dict[PeerId, int] = {}  # lanes that the peer's last offer wanted
        self._adopted = trio.Event()  # set, and replaced, whenever a lane comes up
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](JOB_LIMIT)
        self._closers = trio.CapacityLimiter(CLOSER_LIMIT)
        # Guards the two below: lanes end in their own threads.
        self._lock = threading.Lock()
        self._lanes: dict[PeerId, list[Lane]] = {}
        self._past_bytes = (0, 0)  # sent, received by lanes that ended

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, and own all lanes, until cancelled. Runs once.

        Raises ConfigError if the listening address cannot be had.

        Cancellation: all lanes are aborted and their threads have ended when this returns.
        """
        listeners = await self._open_listeners()
        try:
            async with trio.open_nursery() as nursery:
                try:
                    self.addresses = self._advertise or _addresses_of(listeners)
                    nursery.start_soon(trio.serve_listeners, self._greet, listeners)
                    self._up = True
                    task_status.started()
                    async for job in self._job_queue:
                        nursery.start_soon(job)
                finally:
                    # Inside the nursery: retiring lanes wait in threads until they are aborted.
                    self._up = False
                    for lane in self._all_lanes():
                        lane.abort("this node is stopping")
        finally:
            self._jobs.close()
            self._job_queue.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._join_all)

    async def answer(self, peer: PeerId, offer: bytes) -> bytes:
        """Answer `peer`'s lane request; to be called with what its `request` sent over the libp2p channel.

        Raises RemoteError if it is malformed or too many, NetworkError if no lane can be taken now.
        """
        self._check_up()
        asked = decode_request(offer, peer=peer)
        if isinstance(asked, LaneSummons):
            self._obey_summons(peer)
            return b""
        self._admit(peer)
        answer, keys = accept_offer(asked, me=self._me, peer=peer, swarm_id=self._swarm_id, addresses=self.addresses)
        self._asked_for[peer] = asked.lanes
        self._pending[answer.lane_id] = _Pending(keys, trio.current_time() + PENDING_DEADLINE_S)
        return encode_handshake(answer)

    async def ensure(self, peer: PeerId, *, deadline_s: float) -> None:
        """Have as many usable lanes to `peer` as the limits ask for, dialling where they lack.

        Raises NetworkError if that fails or takes longer, RemoteError if the peer's answer breaks the protocol.

        Cancellation: lanes that came up stay.
        """
        with trio.move_on_after(deadline_s):
            await self._ensure(peer, may_summon=True)
            return
        raise NetworkError(f"no lane to {peer} within {deadline_s} s")

    def post(self, peer: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
        """Queue a frame on the least busy lane to `peer`; never blocks, keeps `payload` by reference.

        Raises NetworkError if there is no usable lane or its queue is full.
        """
        lanes = [lane for lane in self._lanes_of(peer) if lane.usable]
        for lane in sorted(lanes, key=lambda lane: (lane.worn, lane.queued_bytes)):
            try:
                lane.post(header, payload)
            except NetworkError as error:  # it has begun to close since, or its queue is full
                logger.debug("%s", error)
            else:
                return
        raise NetworkError(f"there is no lane to {peer} that takes a frame")

    def drop(self, peer: PeerId) -> None:
        """Abort all lanes to `peer` and forget what was agreed with it. Returns at once.

        A frame that is being delivered at this moment may still reach the sink, before its `lane_closed`; a dial
        under way goes on.
        """
        for lane in self._lanes_of(peer):
            lane.abort("dropped here")
        self._pending = {key: value for key, value in self._pending.items() if value.keys.peer != peer}
        self._asked_for.pop(peer, None)

    def connected(self) -> frozenset[PeerId]:
        """The peers that frames can be posted to."""
        with self._lock:
            return frozenset(peer for peer, lanes in self._lanes.items() if any(lane.usable for lane in lanes))

    def rates(self, peer: PeerId) -> LaneRates:
        """What the present lanes to `peer` measured."""
        lanes = self._lanes_of(peer)
        return LaneRates(
            sent_bytes_per_s=_sum_known([lane.send_meter.bytes_per_s for lane in lanes]),
            received_bytes_per_s=_sum_known([lane.receive_meter.bytes_per_s for lane in lanes]),
        )

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes posted to `peer` and not yet given to the kernel."""
        return sum(lane.queued_bytes for lane in self._lanes_of(peer))

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        with self._lock:
            return self._past_bytes[0] + sum(ln.bytes_sent for lanes in self._lanes.values() for ln in lanes)

    @property
    def bytes_received(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        with self._lock:
            return self._past_bytes[1] + sum(ln.bytes_received for lanes in self._lanes.values() for ln in lanes)

    # The table of lanes

    def _lanes_of(self, peer: PeerId) -> list[Lane]:
        with self._lock:
            return list(self._lanes.get(peer, ()))

    def _all_lanes(self) -> list[Lane]:
        with self._lock:
            return [lane for lanes in self._lanes.values() for lane in lanes]

    def _adopt(
        self, stream: trio.SocketStream, keys: LaneKeys, sealer: Sealer, opener: Opener, *, dialled: bool
    ) -> None:
        """Hand an authenticated connection to a lane's threads. No checkpoint inside: it happens or it does not."""
        self._check_up()
        lane = Lane(
            socket.socket(fileno=stream.socket.detach()),
            peer=keys.peer,
            sealer=sealer,
            opener=opener,
            sink=self._sink,
            limits=self._limits,
            dialled=dialled,
            ended=self._forget,
        )
        with self._lock:
            self._lanes.setdefault(keys.peer, []).append(lane)
        lane.start()
        self._adopted.set()
        self._adopted = trio.Event()
        self._settle(keys.peer)

    def _forget(self, lane: Lane) -> None:
        """Called in a lane's thread when it ended."""
        with self._lock:
            lanes = self._lanes[lane.peer]
            lanes.remove(lane)
            if not lanes:
                del self._lanes[lane.peer]
            sent, received = self._past_bytes
            self._past_bytes = (sent + lane.bytes_sent, received + lane.bytes_received)

    def _settle(self, peer: PeerId) -> None:
        """Retire lanes to spare, if the decision is this node's."""
        if self._me > peer:
            return
        usable = [lane for lane in self._lanes_of(peer) if lane.usable]
        usable.sort(key=lambda lane: (lane.worn, not lane.dialled))  # stable: older lanes first
        for lane in usable[self._target(peer) :]:
            lane.begin_close()
            self._jobs.send_nowait(partial(trio.to_thread.run_sync, lane.close, limiter=self._closers))

    def _target(self, peer: PeerId) -> int:
        return max(self._limits.lanes_per_peer, self._asked_for.get(peer, 1))

    def _check_up(self) -> None:
        if not self._up:
            raise NetworkError("this node's lanes are not up")

    def _check_room(self) -> None:
        if len(self._all_lanes()) >= LANE_COUNT_LIMIT:
            raise NetworkError(f"this node has {LANE_COUNT_LIMIT} lanes already")

    def _join_all(self) -> None:
        for lane in self._all_lanes():
            if not lane.join(JOIN_DEADLINE_S):
                logger.error("a thread of the lane to %s does not end", lane.peer)

    # Dialling

    async def _ensure(self, peer: PeerId, *, may_summon: bool) -> None:
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                while not self._satisfied(peer):
                    self._check_up()
                    self._check_room()
                    try:
                        await self._dial(peer)
                    except NetworkError as error:
                        if not may_summon:
                            raise
                        logger.debug("summoning: %s", error)
                        await self._summon(peer)
        finally:
            if not lock.locked():
                self._dialling.pop(peer, None)

    def _satisfied(self, peer: PeerId) -> bool:
        fresh = [lane for lane in self._lanes_of(peer) if lane.usable and not lane.worn]
        return len(fresh) >= self._limits.lanes_per_peer

    async def _dial(self, peer: PeerId) -> None:
        """Bring up one lane. Each try has its own keys and takes the addresses that failed no try before."""
        failed: set[str] = set()
        for _ in range(ADDRESS_LIMIT):
            proposal = LaneProposal(me=self._me, peer=peer, swarm_id=self._swarm_id, lanes=self._limits.lanes_per_peer)
            reply = await self._request(peer, encode_handshake(proposal.offer))
            answer = decode_answer(reply, peer=peer)
            keys = proposal.keys(answer)
            connected = await _connect([text for text in answer.addresses if text not in failed])
            if connected is None:
                break
            address, stream = connected
            try:
                with trio.fail_after(HELLO_DEADLINE_S):
                    await self._introduce(stream, keys)
                return
            except (trio.TooSlowError, trio.BrokenResourceError, RemoteError) as error:
                # Not held against the peer: a private address may be another machine's on this network.
                logger.debug("%s at %s: %r", peer, address, error)
                failed.add(address)
            finally:
                await trio.aclose_forcefully(stream)
        raise NetworkError(f"{peer} cannot be reached at {', '.join(answer.addresses)}")

    async def _introduce(self, stream: trio.SocketStream, keys: LaneKeys) -> None:
        """The dialler's side of the hello."""
        sealer, opener = Sealer(keys.send_key), Opener(keys.receive_key, peer=keys.peer)
        await stream.send_all(keys.lane_id + _seal_hello(sealer, keys))
        _open_hello(opener, keys, await _receive_exactly(stream, _HELLO_WIRE_BYTES))
        self._adopt(stream, keys, sealer, opener, dialled=True)

    async def _summon(self, peer: PeerId) -> None:
        """Ask `peer` to dial, and wait until it did; the caller has the deadline."""
        before = set(self._lanes_of(peer))
        await self._request(peer, encode_handshake(LaneSummons()))
        while before.issuperset(self._lanes_of(peer)):
            await self._adopted.wait()

    def _obey_summons(self, peer: PeerId) -> None:
        if peer in self._summoned or self._satisfied(peer):
            return
        try:
            self._jobs.send_nowait(partial(self._dial_summoned, peer))
        except trio.WouldBlock:
            raise NetworkError("too many summonses at once") from None
        self._summoned.add(peer)

    async def _dial_summoned(self, peer: PeerId) -> None:
        try:
            with trio.move_on_after(SUMMONED_DIAL_DEADLINE_S):
                await self._ensure(peer, may_summon=False)
        except (NetworkError, RemoteError) as error:
            logger.debug("summoned in vain: %s", error)
        finally:
            self._summoned.discard(peer)

    # Listening

    async def _open_listeners(self) -> list[trio.SocketListener]:
        host, port = self._listen
        try:
            return list(await trio.open_tcp_listeners(port, host=host or "0.0.0.0"))
        except OSError as error:
            raise ConfigError(f"lanes cannot listen on {host}:{port} ({error}); give another address or port") from None

    def _admit(self, peer: PeerId) -> None:
        """Room for one more pending lane of `peer`, or an error."""
        self._check_room()
        now = trio.current_time()
        self._pending = {key: value for key, value in self._pending.items() if value.expires_at > now}
        waiting = sum(value.keys.peer == peer for value in self._pending.values())
        if waiting >= PENDING_PER_PEER_LIMIT:
            raise RemoteError(f"{waiting} lanes agreed on and not opened", peer=peer)
        if len(self._lanes_of(peer)) >= 2 * LANES_PER_PEER_LIMIT:
            raise RemoteError(f"more than {2 * LANES_PER_PEER_LIMIT} lanes", peer=peer)
        if len(self._pending) >= PENDING_LIMIT:
            raise NetworkError(f"{PENDING_LIMIT} lanes are waiting to be opened already")

    async def _greet(self, stream: trio.SocketStream) -> None:
        """One incoming connection, until it is a lane or closed."""
        try:
            with self._stranger():
                await self._authenticate(stream)
        except (trio.BrokenResourceError, NetworkError, RemoteError) as error:
            logger.debug("a stranger was turned away: %r", error)
        finally:
            await trio.aclose_forcefully(stream)  # no effect on a socket that a lane has taken

    @contextmanager
    def _stranger(self) -> Iterator[None]:
        """A place among the unauthenticated, for a while. A crowd pushes out the oldest, who had its chance."""
        place = object()
        with trio.move_on_after(STRANGER_DEADLINE_S) as scope:
            if len(self._strangers) >= UNAUTHENTICATED_LIMIT:
                self._strangers.popitem(last=False)[1].cancel()
            self._strangers[place] = scope
            try:
                yield
            finally:
                self._strangers.pop(place, None)

    async def _authenticate(self, stream: trio.SocketStream) -> None:
        """The listener's side of the hello. Raises RemoteError if the connection is not what was agreed on."""
        lane_id = await _receive_exactly(stream, LANE_ID_BYTES)
        pending = self._pending.get(lane_id)
        if pending is None or pending.expires_at <= trio.current_time():
            raise RemoteError("an unknown lane id")
        if pending.connections >= CONNECTIONS_PER_ID_LIMIT:
            raise RemoteError("too many connections with one lane id")
        pending.connections += 1
        try:
            hello = await _receive_exactly(stream, _HELLO_WIRE_BYTES)
        finally:
            pending.connections -= 1
        keys = pending.keys
        opener = Opener(keys.receive_key, peer=keys.peer)
        _open_hello(opener, keys, hello)
        # Consumed before anything is sealed: these keys seal for this connection and no other.
        if self._pending.pop(lane_id, None) is None:
            raise RemoteError("a lane id used already")
        sealer = Sealer(keys.send_key)
        await stream.send_all(_seal_hello(sealer, keys))
        self._adopt(stream, keys, sealer, opener, dialled=False)


def _seal_hello(sealer: Sealer, keys: LaneKeys) -> bytes:
    out = bytearray(_HELLO_WIRE_BYTES)
    sealer.seal_into(_HELLO, _HELLO_TEXT + keys.lane_id, memoryview(out))
    return bytes(out)


def _open_hello(opener: Opener, keys: LaneKeys, wire: bytes) -> None:
    """Raises RemoteError unless `wire` is the hello of who has the keys."""
    head, sealed = wire[:HEADER_BYTES], memoryview(wire)[HEADER_BYTES:]
    text = bytearray(_HELLO.length)
    opener.open_into(head, sealed, memoryview(text))
    if head != _HELLO.encode() or text != _HELLO_TEXT + keys.lane_id:
        raise RemoteError("a lane opened with something else than a hello", peer=keys.peer)


async def _receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    """Exactly `size` bytes and not one more, for what follows belongs to the lane. Raises RemoteError at the end."""
    data = bytearray()
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise RemoteError("a connection ended before its hello")
        data += more
    return bytes(data)


async def _connect(addresses: list[str]) -> tuple[str, trio.SocketStream] | None:
    """The first address that takes a TCP connection, tried at most CONNECT_STAGGER_S apart; or None.

    Cancellation: no connection is left open.
    """
    winner: list[tuple[str, trio.SocketStream]] = []

    async def attempt(address: str, failed: trio.Event, scope: trio.CancelScope) -> None:
        host, port = parse_address(address)
        try:
            stream = await trio.open_tcp_stream(host, port)
        except (OSError, UnicodeError):  # a name that no resolver takes is the peer's choice too
            failed.set()
            return
        winner.append((address, stream))
        scope.cancel()

    try:
        with trio.move_on_after(CONNECT_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed, nursery.cancel_scope)
                    with trio.move_on_after(CONNECT_STAGGER_S):
                        await failed.wait()
    except BaseException:
        for _, stream in winner:
            stream.socket.close()
        raise
    for _, stream in winner[1:]:
        stream.socket.close()
    return winner[0] if winner else None


def _addresses_of(listeners: list[trio.SocketListener]) -> tuple[str, ...]:
    """Where others may dial: the listeners' addresses, with a wildcard spelled out as the machine's own."""
    found: list[str] = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        hosts = _machine_hosts(listener.socket.family) if host in ("0.0.0.0", "::") else [host]
        found += [format_address(name, port) for name in hosts]
    return tuple(dict.fromkeys(found))[:ADDRESS_LIMIT]


def _machine_hosts(family: int) -> list[str]:
    """The machine's addresses of one family; loopback only if there is nothing else."""
    every = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == family and "%" not in entry.address  # link-local needs an interface
    ]
    return [host for host in every if not host.startswith("127.") and host != "::1"] or every


def _check_advertised(addresses: tuple[str, ...]) -> None:
    if len(addresses) > ADDRESS_LIMIT:
        raise ConfigError(f"at most {ADDRESS_LIMIT} lane addresses can be advertised, not {len(addresses)}")
    for address in addresses:
        try:
            parse_address(address)
        except RemoteError as error:
            raise ConfigError(f"an advertised lane address is wrong: {error}") from None


def _sum_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
