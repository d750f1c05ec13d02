"""Observed addresses: a node calls a member from a port of its own, to learn where that is seen from outside.

    A ── AskSighting ──► R ── ticket ──► A            over the control connection, which proves who asks
    A ── ticket ──► R                                 a TCP connection from A's port to R's lanes, kept for a while
    A ◄── Sighted(address) ── R                       over the control connection
    B ── AskSeen(A, address) ──► R ── Seen ──► B      whether that is so, for OBSERVED_ADDRESS_S

R dials nobody, and says of A only what it saw of A itself. How often it is asked is bounded per peer and in all.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import trio
from msgspec import Meta

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates
from shoal.protocol.messages import Message, Peer
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import format_address
from shoal.swarm.questions import REQUEST_DEADLINE_S, answer, ask, hear
from shoal.swarm.streams import MessageStream

OBSERVED_ADDRESS_PROTOCOL = "/shoal/sighting/1"
TICKET_BYTES = 16
TICKET_FIRST_BYTE = 2
"""Neither a knock's nor a passage's."""
MESSAGE_LIMIT_BYTES = 512
CALL_DEADLINE_S = 3.0
"""From a ticket until it is called with."""
CALLS_LIMIT = 64
OBSERVED_ADDRESS_S = 30.0
OBSERVED_ADDRESSES_LIMIT = 32
"""Of one peer, the newest."""
PEER_OBSERVED_PER_S, PEER_OBSERVED_BURST = 0.2, 16.0
OBSERVED_PER_S, OBSERVED_BURST = 4.0, 64.0
QUESTIONS_PER_S, QUESTIONS_BURST = 1.0, 32.0
"""Of one peer."""

Address = Annotated[str, Meta(min_length=3, max_length=64, pattern=r"^[0-9a-f.:\[\]]*\Z")]
Ticket = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]


class AskSighting(Message, frozen=True, kw_only=True):
    """Asks where a call that is about to come is seen to come from."""


class SightingTicket(Message, frozen=True, kw_only=True):
    """Ticket with which the call begins."""

    ticket: Ticket


class Sighted(Message, frozen=True, kw_only=True):
    """Address that the call came from, 'host:port'."""

    address: Address


class AskSeen(Message, frozen=True, kw_only=True):
    """Asks whether `peer` was sighted at 'host:port' a short while ago."""

    peer: Peer
    address: Address


class Seen(Message, frozen=True, kw_only=True):
    """It was."""


AddressRequest = AskSighting | AskSeen
AddressReply = SightingTicket | Sighted | Seen | Refusal
Reply = TypeVar("Reply", SightingTicket, Sighted, Seen)


class Caller(Protocol):
    """A port that calls."""

    async def call(self, addresses: tuple[str, ...], first: bytes) -> None:
        """Connect to one of 'host:port' from the port and send this; the connection stays. Raises NetworkError."""


@dataclass(slots=True, eq=False)
class _Call:
    """One that is expected, and where it came from."""

    came: trio.Event = field(default_factory=trio.Event)
    address: str = ""


class ObservedAddressServer:
    """Says where calls come from while `admits` is set, which says to whom. A ticket is good for call_deadline_s."""

    def __init__(self, host: Host, *, call_deadline_s: float = CALL_DEADLINE_S) -> None:
        self._call_deadline_s = call_deadline_s
        self.admits: Callable[[PeerId], bool] | None = None
        self._calls: dict[bytes, _Call] = {}
        self._seen: dict[PeerId, deque[tuple[str, float]]] = {}  # address, until when that is told
        self._by_peer: Rates[PeerId] = Rates(PEER_OBSERVED_PER_S, PEER_OBSERVED_BURST)
        self._all: Rates[None] = Rates(OBSERVED_PER_S, OBSERVED_BURST)
        self._questions: Rates[PeerId] = Rates(QUESTIONS_PER_S, QUESTIONS_BURST)
        host.serve(OBSERVED_ADDRESS_PROTOCOL, self._serve)

    async def _serve(self, stream: MessageStream) -> None:
        asked: AddressRequest = await hear(stream, AddressRequest, limit_bytes=MESSAGE_LIMIT_BYTES)
        if self.admits is None or not self.admits(stream.peer):
            reply: AddressReply = Refusal(reason="this node looks for members only, and where it relays")
        elif isinstance(asked, AskSeen):
            reply = self._tell(stream.peer, asked)
        else:
            reply = await self._sight(stream)
        await answer(stream, reply)

    def _tell(self, asker: PeerId, asked: AskSeen) -> AddressReply:
        now = trio.current_time()
        if not self._questions.take(asker, now):
            return Refusal(reason="too many questions; try again later")
        seen = self._seen.get(PeerId(asked.peer), ())
        if any(address == asked.address and until > now for address, until in seen):
            return Seen()
        return Refusal(reason="it was not seen there lately")

    async def _sight(self, stream: MessageStream) -> AddressReply:
        now = trio.current_time()
        if len(self._calls) >= CALLS_LIMIT or not (self._by_peer.take(stream.peer, now) and self._all.take(None, now)):
            return Refusal(reason="too many calls are asked for; try again later")
        ticket = bytes([TICKET_FIRST_BYTE]) + secrets.token_bytes(TICKET_BYTES - 1)
        self._calls[ticket] = call = _Call()
        try:
            await stream.send(canonical(SightingTicket(ticket=ticket)), deadline_s=REQUEST_DEADLINE_S)
            with trio.move_on_after(self._call_deadline_s):
                await call.came.wait()
        finally:
            del self._calls[ticket]
        if not call.address:
            return Refusal(reason="no call came")
        self._remember(stream.peer, call.address)
        return Sighted(address=call.address)

    def _remember(self, peer: PeerId, address: str) -> None:
        now = trio.current_time()
        self._seen = {one: seen for one, seen in self._seen.items() if seen[-1][1] > now}
        self._seen.setdefault(peer, deque(maxlen=OBSERVED_ADDRESSES_LIMIT)).append((address, now + OBSERVED_ADDRESS_S))

    def claims(self, ticket: bytes) -> bool:
        """True if a connection that began with these bytes is a call; then `hold` it."""
        call = self._calls.get(ticket)
        return call is not None and not call.came.is_set()

    async def hold(self, ticket: bytes, stream: trio.SocketStream) -> None:
        """Note where a call comes from, and keep it until the caller ends it, so that its router keeps the port."""
        call = self._calls[ticket]
        host, port = stream.socket.getpeername()[:2]
        call.address = format_address(str(host).removeprefix("::ffff:"), port)
        call.came.set()
        with trio.move_on_after(OBSERVED_ADDRESS_S):
            await stream.receive_some(1)


async def sight(host: Host, relay: PeerId, addresses: tuple[str, ...], caller: Caller) -> str:
    """Return where `relay`, whose lanes are at these addresses, sees the caller's port: 'host:port'.

    Raises NetworkError if it does not say, or cannot be called.
    """
    with trio.move_on_after(CALL_DEADLINE_S + REQUEST_DEADLINE_S):
        stream = await host.open(
            relay, OBSERVED_ADDRESS_PROTOCOL, deadline_s=REQUEST_DEADLINE_S, limit_bytes=MESSAGE_LIMIT_BYTES
        )
        try:
            await stream.send(canonical(AskSighting()), deadline_s=REQUEST_DEADLINE_S)
            ticket = await _reply(stream, SightingTicket)
            await caller.call(addresses, ticket.ticket)
            return (await _reply(stream, Sighted)).address
        finally:
            with trio.CancelScope(shield=True):
                await stream.abort()
    raise NetworkError(f"{relay} did not say in time where it sees this node")


async def ask_seen(host: Host, relay: PeerId, peer: PeerId, address: str) -> None:
    """Raises NetworkError unless `relay` says that it saw `peer` there a short while ago."""
    question = AskSeen(peer=peer, address=address)
    try:
        await ask(host, relay, OBSERVED_ADDRESS_PROTOCOL, question, Seen, limit_bytes=MESSAGE_LIMIT_BYTES)
    except RemoteError as error:
        raise NetworkError(str(error)) from error


async def _reply(stream: MessageStream, kind: type[Reply]) -> Reply:
    return _check(await stream.receive(deadline_s=CALL_DEADLINE_S), kind, stream.peer)


def _check(data: bytes, kind: type[Reply], relay: PeerId) -> Reply:
    try:
        reply: object = decode(data, AddressReply, peer=relay, limit_bytes=MESSAGE_LIMIT_BYTES)  # type: ignore[arg-type]
    except RemoteError as error:
        raise NetworkError(str(error)) from error
    if isinstance(reply, Refusal):
        raise NetworkError(f"{relay}: {reply.reason}")
    if not isinstance(reply, kind):
        raise NetworkError(f"{relay} answers with a {type(reply).__name__}")
    return reply
