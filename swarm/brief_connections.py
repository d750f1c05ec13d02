"""Brief connections: to peers that are no neighbours, made when something is asked of one, ended when it was idle.

Whoever pulls a group needs its holder for a request or two. No link comes of that: nothing is said about who is alive,
and at the far end this node stays what it was, a peer that is known and has no place (`shoal.swarm.limits` says what
that one may). Where CONNECTIONS_LIMIT are there, the one idle longest makes room; where all are in use, another waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId

CONNECTIONS_LIMIT = 16
"""More than there are pulls at once."""
IDLE_LIMIT_S = 5.0
"""A round's pulls come one after another; then there are none for as long as an agent trains."""
DIAL_DEADLINE_S = 5.0
LOOK_S = 1.0


class Dials(Protocol):
    """The part of the libp2p host that is used here."""

    def connected(self) -> frozenset[PeerId]:
        """The peers connected now."""

    async def dial_peer(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to a peer at any of its addresses."""

    def connection(self, peer: PeerId) -> object | None:
        """The connection with a peer that there is now, to be told from one that takes its place."""

    async def close(self, connection: object | None) -> None:
        """Close this connection, and no other."""


@dataclass(slots=True)
class _Connection:
    """made: what was dialled for it. users: requests under way over it. idle_since: when the last of them ended."""

    idle_since: float
    users: int = 0
    made: object | None = None


class BriefConnections:
    """Those of one node. addresses_of: where a peer may be. is_linked: whether a connection is a link's."""

    def __init__(
        self, host: Dials, *, addresses_of: Callable[[PeerId], Sequence[str]], is_linked: Callable[[PeerId], bool]
    ) -> None:
        self._host = host
        self._addresses_of = addresses_of
        self.is_linked = is_linked
        self._made: dict[PeerId, _Connection] = {}
        self._ending: dict[PeerId, trio.Event] = {}
        self._places = trio.Semaphore(CONNECTIONS_LIMIT)  # of those in use

    def may_reach(self, peer: PeerId) -> bool:
        """True if there is a connection to a peer, or an address at which to try."""
        return peer in self._host.connected() or bool(self._addresses_of(peer))

    @contextlib.asynccontextmanager
    async def to(self, peer: PeerId) -> AsyncIterator[None]:
        """A connection to `peer` for the block: the one that is there, or one of its own.

        Raises NetworkError where none can be made. Cancellation leaves it to be ended as an idle one.
        """
        while (ended := self._ending.get(peer)) is not None:
            await ended.wait()  # else it would be used on its way out
        if peer in self._host.connected() and peer not in self._made:
            yield  # a link's, or made by the peer
            return
        async with self._places:
            connection = self._made.setdefault(peer, _Connection(idle_since=trio.current_time()))
            connection.users += 1
            try:
                await self._make_room()
                if peer not in self._host.connected():
                    await self._dial(peer)
                    connection.made = self._host.connection(peer)
                yield
            finally:
                connection.users -= 1
                connection.idle_since = trio.current_time()

    async def _dial(self, peer: PeerId) -> None:
        addresses = self._addresses_of(peer)
        if not addresses:
            raise NetworkError(f"no address of {peer} is known")
        await self._host.dial_peer(peer, addresses, deadline_s=DIAL_DEADLINE_S)

    async def run(self) -> None:
        """End idle connections until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            await self._end([peer for peer in self._idle() if now - self._made[peer].idle_since >= IDLE_LIMIT_S])

    async def _make_room(self) -> None:
        """End as many of those idle longest as there are too many."""
        await self._end(self._idle()[: max(0, len(self._made) - CONNECTIONS_LIMIT)])

    def _idle(self) -> list[PeerId]:
        """Those that nobody uses, the one idle longest first."""
        idle = [peer for peer, connection in self._made.items() if not connection.users]
        return sorted(idle, key=lambda peer: self._made[peer].idle_since)

    async def _end(self, peers: Sequence[PeerId]) -> None:
        """End these, one after another, but for those that are used again when it is their turn."""
        for peer in peers:
            if peer not in self._made or self._made[peer].users:
                continue
            connection = self._made.pop(peer)
            if not self.is_linked(peer):
                ended = self._ending[peer] = trio.Event()
                try:
                    await self._host.close(connection.made)
                finally:
                    del self._ending[peer]
                    ended.set()
