"""Connections through a relay (libp2p's circuit v2), as its two ends have them; the middle is `circuit_relay`.

    A ── CONNECT(B) ──► relay ── CONNECT(A) ──► B      B has a reservation at the relay, over its own connection
    A ◄──── OK ──────── relay ◄───── OK ─────── B
    A ◄═══ Noise and yamux, through the relay ═══► B   the relay sees ciphertext, and cannot pretend to be either

A relayed connection is a connection like any other from there on, but slower, and a direct one takes its place.
Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. libp2p's own transport is not used: its relay
lets anybody reserve in another's name and keeps what it reserved for peers that have gone.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import trio

from shoal.protocol.address import CircuitAddress
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.limits import Memory, Reason, Refusals
from shoal.swarm.muxer import (
    CLOSE_DEADLINE_S,
    CONNECTION_HANDSHAKE_DEADLINE_S,
    FOREIGN_ERRORS,
    Allowance,
    Muxer,
    read_bounded,
)
from shoal.swarm.peer_ids import libp2p_id

with only_what_runs():
    from google.protobuf.message import DecodeError
    from libp2p.connection_types import ConnectionType
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.io.exceptions import ConnectionClosedError
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.peer.id import ID
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, StopMessage
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import Reservation as CircuitReservation
    from libp2p.utils import encode_varint_prefixed

__all__ = ["CircuitReservation", "Circuits", "HopMessage", "Limit", "StopMessage"]

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
OK = 100
MESSAGE_LIMIT_BYTES = 4096
MESSAGE_DEADLINE_S = 5.0
RESERVATIONS_LIMIT = 4
"""Relays at which one node reserves."""
PENDING_LIMIT, STRANGERS_PENDING_LIMIT = 16, 8
"""Circuits to this node through one relay whose handshake is under way: in all, and those of callers who do not belong
here, who may have no mind to end it. Of who calls there is nothing yet but the relay's word."""

logger = logging.getLogger("shoal.libp2p")


async def read_message(stream: Any, kind: Any) -> Any:
    """One message of `kind` on a libp2p stream. Raises NetworkError for what is none, or does not come in time."""
    with trio.move_on_after(MESSAGE_DEADLINE_S):
        try:
            data = await _read_exactly(stream, await _read_length(stream))
            message = kind()
            message.ParseFromString(data)
        except (DecodeError, *FOREIGN_ERRORS) as error:
            raise NetworkError(f"no message of a relay: {type(error).__name__}") from error
        return message
    raise NetworkError(f"nothing of a relay's protocol within {MESSAGE_DEADLINE_S:g} s")


async def _read_length(stream: Any) -> int:
    """A varint of at most two bytes: no message is longer than MESSAGE_LIMIT_BYTES."""
    low = (await _read_exactly(stream, 1))[0]
    if low < 0x80:
        return low
    high = (await _read_exactly(stream, 1))[0]
    length = (low & 0x7F) | high << 7
    if length > MESSAGE_LIMIT_BYTES:
        raise NetworkError(f"a relay's message of {length} bytes or more")
    return length


async def _read_exactly(stream: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = await stream.read(size - len(data))
        if not more:
            raise NetworkError("a stream of a relay ended early")
        data += more
    return bytes(data)


async def write_message(stream: Any, message: Any) -> None:
    """Raises NetworkError where the stream does not take it in time."""
    try:
        with trio.fail_after(MESSAGE_DEADLINE_S):
            await stream.write(encode_varint_prefixed(message.SerializeToString()))
    except (trio.TooSlowError, *FOREIGN_ERRORS) as error:
        raise NetworkError(f"a stream of a relay broke: {type(error).__name__}") from error


async def reset(stream: Any) -> None:
    """Reset a libp2p stream, whatever its state (bounded, shielded)."""
    with trio.move_on_after(CLOSE_DEADLINE_S, shield=True), contextlib.suppress(*FOREIGN_ERRORS):
        await stream.reset()


def circuit_peer(peer: PeerId) -> Any:
    """A PeerId as these messages have it."""
    return CircuitPeer(id=libp2p_id(peer).to_bytes())


def peer_in(message: Any) -> PeerId | None:
    """The PeerId in a message, None if there is none."""
    try:
        return PeerId(str(ID(message.peer.id))) if message.peer.id else None
    except ValueError:
        return None


class CircuitWire(ReadWriteCloser):  # type: ignore[misc]
    """A stream to a relay as libp2p's handshakes read and write it; what `Wire` is to a socket."""

    def __init__(self, stream: Any, memory: Memory | None = None) -> None:
        self._stream = stream
        self.allowance = Allowance(memory)
        self.closed = False

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except FOREIGN_ERRORS as error:
            raise ConnectionClosedError("the circuit is closed", transport="circuit") from error

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, or some where `n` is None."""
        return await read_bounded(self._receive, n, self.allowance)

    async def _receive(self, limit_bytes: int) -> bytes:
        try:
            data: bytes = await self._stream.read(limit_bytes)
        except FOREIGN_ERRORS as error:
            raise ConnectionClosedError("the circuit is closed", transport="circuit") from error
        return data

    async def close(self) -> None:
        self.closed = True
        await reset(self._stream)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Nobody's: what is at the far end cannot be seen from here."""
        return None

    @property
    def own_host(self) -> str | None:
        """None: the connection to the relay has one."""
        return None

    def raw(self, *, dialled: bool) -> Any:
        """This, as the connection that libp2p secures."""
        return RawConnection(self, dialled, connection_type=ConnectionType.RELAYED, addresses=[])


def is_relayed(muxer: Muxer) -> bool:
    """True if a connection goes through a relay."""
    return bool(muxer.secured_conn.get_connection_type() == ConnectionType.RELAYED)


class Circuits:
    """Both ends of circuits over one `Network`: this node dials through relays, and is dialled where it reserved."""

    def __init__(self, network: Any, libp2p_host: Any, refusals: Refusals) -> None:
        self._network = network
        self._refusals = refusals
        self.lets_in: Callable[[PeerId, PeerId], bool] = lambda relay, caller: True
        """True if one more call is worth a handshake, by the relay that it comes through and who it says is calling."""
        self.is_member: Callable[[PeerId], bool] = lambda peer: False
        """True for a caller that belongs here or may."""
        self._reserved: set[PeerId] = set()
        self._pending: Counter[PeerId] = Counter()  # by relay
        self._strangers_pending: Counter[PeerId] = Counter()
        libp2p_host.set_stream_handler(STOP_PROTOCOL, self._stopped_at)
        network.circuits = self

    @property
    def reserved(self) -> frozenset[PeerId]:
        """The relays that this node has asked to be reached through, and that are connected."""
        self._reserved = {relay for relay in self._reserved if self._network.is_direct(relay)}
        return frozenset(self._reserved)

    async def reserve(self, relay: PeerId) -> None:
        """Ask a connected node to pass circuits on to this one, from now on or for longer.

        Raises NetworkError if it is not connected, does not relay, or has no room.
        """
        if relay not in self.reserved and len(self._reserved) >= RESERVATIONS_LIMIT:
            raise NetworkError(f"{RESERVATIONS_LIMIT} reservations are enough")
        if not self._network.is_direct(relay):
            raise NetworkError(f"{relay} is not connected without a relay itself")
        stream = await self._hop(relay)
        try:
            await write_message(stream, HopMessage(type=HopMessage.RESERVE))
            answer = await read_message(stream, HopMessage)
        finally:
            await reset(stream)
        if answer.type != HopMessage.STATUS or answer.status != OK:
            self._reserved.discard(relay)
            raise NetworkError(f"{relay} has no reservation for this node (status {answer.status})")
        self._reserved.add(relay)

    async def dial(self, address: CircuitAddress) -> CircuitWire:
        """A stream to the far end, over which the two shake hands next.

        Raises NetworkError, also where the relay is not connected.
        """
        relay = address.relay.peer
        stream = await self._hop(relay)
        done = False
        try:
            await write_message(stream, HopMessage(type=HopMessage.CONNECT, peer=circuit_peer(address.peer)))
            answer = await read_message(stream, HopMessage)
            done = answer.type == HopMessage.STATUS and answer.status == OK
        finally:
            if not done:
                await reset(stream)
        if not done:
            raise NetworkError(f"{relay} has no way to {address.peer} (status {answer.status})")
        return CircuitWire(stream, self._network.memory)

    async def _hop(self, relay: PeerId) -> Any:
        return (await self._network.open_stream(relay, HOP_PROTOCOL, deadline_s=MESSAGE_DEADLINE_S)).raw

    async def _stopped_at(self, stream: Any) -> None:
        """Somebody calls through a relay. The handler lives as long as the connection."""
        relay = PeerId(str(stream.muxed_conn.peer_id))
        if relay not in self.reserved:
            await reset(stream)
            return
        if self._pending[relay] >= PENDING_LIMIT:
            self._refusals.note(Reason.HALF_OPEN)
            await reset(stream)
            return
        self._pending[relay] += 1
        try:
            muxer = await self._take(stream, relay)
        finally:
            self._pending -= Counter({relay: 1})
        if muxer is not None:
            await muxer.event_closed.wait()

    async def _take(self, stream: Any, relay: PeerId) -> Muxer | None:
        muxer: Muxer | None = None
        with trio.move_on_after(CONNECTION_HANDSHAKE_DEADLINE_S):
            try:
                asked = await read_message(stream, StopMessage)
                caller = peer_in(asked)
                if asked.type != StopMessage.CONNECT or caller is None:
                    raise NetworkError("a relay says something else than who calls")
                with self._place(relay, caller):
                    if not self.lets_in(relay, caller):
                        raise NetworkError("too many call through this relay")
                    await write_message(stream, StopMessage(type=StopMessage.STATUS, status=OK))
                    raw = CircuitWire(stream, self._network.memory).raw(dialled=False)
                    muxer = await self._network.upgrade_inbound_raw_conn(raw, None)
            except Exception as error:  # the boundary: a stranger sent whatever it pleased
                logger.debug("refused a circuit: %r", error)
        if muxer is None:
            await reset(stream)
        return muxer

    @contextlib.contextmanager
    def _place(self, relay: PeerId, caller: PeerId) -> Iterator[None]:
        """A place for a caller's handshake. Raises NetworkError where strangers have all that there are for them."""
        if self.is_member(caller):
            yield
            return
        if self._strangers_pending[relay] >= STRANGERS_PENDING_LIMIT:
            self._refusals.note(Reason.HALF_OPEN)
            raise NetworkError("too many strangers are calling")
        self._strangers_pending[relay] += 1
        try:
            yield
        finally:
            self._strangers_pending -= Counter({relay: 1})
