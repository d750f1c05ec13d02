"""Listener for a node's incoming lanes: what was agreed on over libp2p waits here for its connection.

Until its hello is authenticated a connection is a stranger: a trio task, no thread, STRANGER_DEADLINE_S to live,
at most UNAUTHENTICATED_LIMIT of them (the oldest gives way). An id is consumed only by an authentic hello, so a
stranger who saw it cannot use it up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm import incoming
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES, open_hello, receive_exactly, seal_hello
from shoal.swarm.lanes.seal import (
    ADDRESS_LIMIT,
    LANE_ID_BYTES,
    LaneAnswer,
    LaneKeys,
    LaneOffer,
    Opener,
    Sealer,
    accept_offer,
    format_address,
)
from shoal.swarm.limits import (
    LANE_ADDRESS_CONNECTIONS_BURST,
    LANE_ADDRESS_CONNECTIONS_PER_S,
    LANE_CONNECTIONS_BURST,
    LANE_CONNECTIONS_PER_S,
    Door,
    Reason,
    Refusals,
    UnprovenConnections,
)
from shoal.swarm.reaching.dial_back_probes import DialBackProbes
from shoal.swarm.reaching.networks import bound_hosts, is_loopback

STRANGER_DEADLINE_S = 2.0  # for a connection to authenticate
UNAUTHENTICATED_LIMIT = 64  # such connections at once
TRAVERSAL_DEADLINE_S = 12.0
"""For a connection to a third, at which the one who wants a lane has to arrive as well."""
CONNECTIONS_PER_ID_LIMIT = 4  # connections at once with one lane id
PENDING_DEADLINE_S = 30.0  # a lane agreed on and not opened
PENDING_PER_PEER_LIMIT = 32  # such lanes of one peer; the oldest gives way
PENDING_LIMIT = 4096

logger = logging.getLogger(__name__)


class Adopt(Protocol):
    """Takes an authenticated connection; the stream's socket is its own from then on."""

    def __call__(
        self, stream: trio.SocketStream, keys: LaneKeys, sealer: Sealer, opener: Opener, *, dialled: bool
    ) -> None:
        """No checkpoint inside. Raises NetworkError if no lane can be taken now."""


@dataclass(slots=True)
class _Pending:
    """A lane that was agreed on and whose connection has not come yet."""

    keys: LaneKeys
    expires_at: float
    connections: int = 0


class ConnectionHandler(Protocol):
    """Takes connections at the lanes' port that are no lanes of this node's."""

    def claims(self, ticket: bytes) -> bool:
        """True if a connection that began with these LANE_ID_BYTES is its own."""

    async def hold(self, ticket: bytes, stream: trio.SocketStream) -> None:
        """Own it until it is over; called at once after `claims`."""


class LaneListener:
    """Listens at (host, port), an empty host meaning every IPv4 address, and hands authentic connections to `adopt`."""

    def __init__(self, *, me: PeerId, swarm_id: bytes, listen: tuple[str, int], adopt: Adopt) -> None:
        self._me = me
        self._swarm_id = swarm_id
        self._listen = listen
        self._adopt = adopt
        self._pending: dict[bytes, _Pending] = {}
        self.refusals = Refusals()
        self._door = Door(
            self.refusals,
            Reason.LANE_RATE,
            per_s=(LANE_CONNECTIONS_PER_S, LANE_CONNECTIONS_BURST),
            address_per_s=(LANE_ADDRESS_CONNECTIONS_PER_S, LANE_ADDRESS_CONNECTIONS_BURST),
            newcomers_per_s=(LANE_CONNECTIONS_PER_S, LANE_CONNECTIONS_BURST),
            is_known=lambda address: self.is_known(address),
        )
        self._strangers = UnprovenConnections(
            self.refusals,
            Reason.LANE_STRANGERS,
            limit=UNAUTHENTICATED_LIMIT,
            per_address=UNAUTHENTICATED_LIMIT,
            is_known=lambda address: self.is_known(address),
        )
        self.is_known: Callable[[str], bool] = lambda address: False
        """True for an IP address of a member: what comes from there comes before other connections."""
        self.comes_first: Callable[[PeerId], bool] = lambda peer: True
        """True for a peer that may have all that there is; others leave half of it."""
        self.dial_back_probes: DialBackProbes | None = None
        self.handlers: Sequence[ConnectionHandler] = ()

    async def open(self) -> list[trio.SocketListener]:
        """The listening sockets, for `serve`. Raises ConfigError if the address cannot be had."""
        host, port = self._listen
        try:
            return list(await trio.open_tcp_listeners(port, host=host or "0.0.0.0"))
        except OSError as error:
            raise ConfigError(f"lanes cannot listen on {host}:{port} ({error}); give another address or port") from None

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        """Take connections until cancelled."""
        await incoming.take_in(listeners, self._door.lets_in, self._greet, is_noise=self._is_noise)

    def accept(self, peer: PeerId, offer: LaneOffer, addresses: tuple[str, ...]) -> LaneAnswer:
        """Agree on a lane with `peer`, which has PENDING_DEADLINE_S to connect at one of `addresses`.

        Of what it left unopened the oldest gives way: who finds no way here tries anew, and may yet find one.
        Raises NetworkError if all peers together left too many.
        """
        self._make_room(peer)
        answer, keys = accept_offer(offer, me=self._me, peer=peer, swarm_id=self._swarm_id, addresses=addresses)
        self._pending[answer.lane_id] = _Pending(keys, trio.current_time() + PENDING_DEADLINE_S)
        return answer

    def forget(self, peer: PeerId) -> None:
        """Drop what was agreed with `peer` and not opened yet."""
        self._pending = {key: value for key, value in self._pending.items() if value.keys.peer != peer}

    def _make_room(self, peer: PeerId) -> None:
        """Room for one more pending lane of `peer`, or an error."""
        now = trio.current_time()
        self._pending = {key: value for key, value in self._pending.items() if value.expires_at > now}
        waiting = [key for key, value in self._pending.items() if value.keys.peer == peer]  # oldest first
        for key in waiting[: max(0, len(waiting) + 1 - PENDING_PER_PEER_LIMIT)]:
            del self._pending[key]
        if len(self._pending) >= PENDING_LIMIT // (1 if self.comes_first(peer) else 2):
            raise NetworkError(f"{len(self._pending)} lanes are waiting to be opened already")

    def _is_noise(self, first: bytes) -> bool:
        """True if a connection began with a whole id, and with none that anybody here waits for."""
        if (
            len(first) < LANE_ID_BYTES
            or first in self._pending
            or any(handler.claims(first) for handler in self.handlers)
        ):
            return False
        if self.dial_back_probes is not None and self.dial_back_probes.expects(first):
            return False
        self.refusals.note(Reason.LANE_HELLO)
        return True

    async def _greet(self, stream: trio.SocketStream, address: str) -> None:
        """One incoming connection, until it is a lane, or one that this node passes on, is over, or closed."""
        handler: ConnectionHandler | None = None
        try:
            with self._stranger(address):
                first = await receive_exactly(stream, LANE_ID_BYTES)
                handler = next((handler for handler in self.handlers if handler.claims(first)), None)
                if handler is None and (
                    self.dial_back_probes is None or not await self.dial_back_probes.answer(stream, first)
                ):
                    await self._authenticate(stream, first)
            if handler is not None:  # it may last
                await handler.hold(first, stream)
        except (OSError, trio.BrokenResourceError, NetworkError, RemoteError) as error:  # it may be reset
            self.refusals.note(Reason.LANE_HELLO)
            logger.debug("a stranger was turned away: %r", error)
        finally:
            await trio.aclose_forcefully(stream)  # no effect on a socket that a lane has taken

    async def meet(self, stream: trio.SocketStream) -> None:
        """The listener's side of the hello on a connection that this node dialled, to where the two meet."""
        try:
            with trio.move_on_after(TRAVERSAL_DEADLINE_S):
                await self._authenticate(stream, await receive_exactly(stream, LANE_ID_BYTES))
        except (trio.BrokenResourceError, NetworkError, RemoteError) as error:
            logger.debug("nobody was met: %r", error)
        finally:
            await trio.aclose_forcefully(stream)

    @contextmanager
    def _stranger(self, address: str) -> Iterator[None]:
        """A place among the unauthenticated, for a while."""
        with trio.move_on_after(STRANGER_DEADLINE_S), self._strangers.entering(address):
            yield

    async def _authenticate(self, stream: trio.SocketStream, lane_id: bytes) -> None:
        """The listener's side of the hello. Raises RemoteError if the connection is not what was agreed on."""
        pending = self._pending.get(lane_id)
        if pending is None or pending.expires_at <= trio.current_time():
            raise RemoteError("an unknown lane id")
        if pending.connections >= CONNECTIONS_PER_ID_LIMIT:
            raise RemoteError("too many connections with one lane id")
        pending.connections += 1
        try:
            hello = await receive_exactly(stream, HELLO_WIRE_BYTES)
        finally:
            pending.connections -= 1
        keys = pending.keys
        opener = Opener(keys.receive_key, peer=keys.peer)
        open_hello(opener, keys, hello)
        # Consumed before anything is sealed: these keys seal for this connection and no other.
        if self._pending.pop(lane_id, None) is None:
            raise RemoteError("a lane id used already")
        sealer = Sealer(keys.send_key)
        await stream.send_all(seal_hello(sealer, keys))
        self._adopt(stream, keys, sealer, opener, dialled=False)


def addresses_of(listeners: Iterable[trio.SocketListener]) -> tuple[str, ...]:
    """Addresses, 'host:port', for others to dial: the listeners', with a wildcard spelled out as the machine's own.

    Loopback is one of those only if there is nothing else.
    """
    found: list[str] = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        every = bound_hosts(host)
        found += [format_address(name, port) for name in [one for one in every if not is_loopback(one)] or every]
    return tuple(dict.fromkeys(found))[:ADDRESS_LIMIT]
