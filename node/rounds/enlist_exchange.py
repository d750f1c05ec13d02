"""Enlistments between nodes (`shoal.protocol.enlisting`): what gathered for a peer goes to it on a stream of its own.

    Enlist, Enlist, …, end          ────────►       each checked and held, and passed on, if it is news

Nothing is answered: who wants a seat says so again at the next head. Who is not linked is not heard, nor is more of one
peer than WISHES_PER_S in the long run: what is beyond is dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import TokenBucket
from shoal.protocol.messages import Enlist, Message
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.questions import REQUEST_DEADLINE_S
from shoal.swarm.streams import MessageStream, StreamEnded

ENLIST_PROTOCOL = "/shoal/enlist/1"
ENLIST_LIMIT_BYTES = 512
GATHERED_S = 0.5
"""So long what is to be told gathers: at each head many enlist at once."""
WISHES_PER_S, WISHES_AT_ONCE = 8.0, 128.0
"""Of one peer, as of its followers; each costs the check of a signature."""
PEERS_LIMIT = 256
"""Peers that are remembered by what they told: as many as there are links."""

logger = logging.getLogger(__name__)


class EnlistExchange:
    """Enlistments that one node tells others, and hears. linked: who is heard. give: takes what a peer told."""

    def __init__(
        self, host: Host, linked: Callable[[], Collection[PeerId]], give: Callable[[PeerId, Message], None]
    ) -> None:
        self._host, self._linked, self._give = host, linked, give
        self._waiting: dict[PeerId, list[Enlist]] = {}
        self._some = trio.Event()
        self._rates: dict[PeerId, TokenBucket] = {}
        host.serve(ENLIST_PROTOCOL, self._serve, limit_bytes=ENLIST_LIMIT_BYTES)

    def tell(self, peer: PeerId, message: Enlist) -> None:
        """Tell a peer soon. Of more than WISHES_AT_ONCE that wait for it the last are dropped."""
        waiting = self._waiting.setdefault(peer, [])
        if len(waiting) < WISHES_AT_ONCE:
            waiting.append(message)
        self._some.set()

    async def run(self) -> None:
        """Tell what gathers, until cancelled."""
        while True:
            await self._some.wait()
            await trio.sleep(GATHERED_S)
            waiting, self._waiting, self._some = self._waiting, {}, trio.Event()
            async with trio.open_nursery() as nursery:
                for peer in waiting.keys() & set(self._linked()):
                    nursery.start_soon(self._tell, peer, waiting[peer])

    async def _tell(self, peer: PeerId, messages: list[Enlist]) -> None:
        try:
            stream = await self._host.open(peer, ENLIST_PROTOCOL, deadline_s=REQUEST_DEADLINE_S)
            try:
                await stream.send_all([canonical(one) for one in messages], deadline_s=REQUEST_DEADLINE_S)
            finally:
                await stream.aclose()
        except (NetworkError, RemoteError) as error:
            logger.debug("%s is not told who wants a seat: %s", peer, error)

    async def _serve(self, stream: MessageStream) -> None:
        """Hear what a peer tells, to the end of its stream. Raises RemoteError, NetworkError where it stops amid it."""
        peer = stream.peer
        if peer not in self._linked():
            raise RemoteError("tells who wants a seat without having been admitted", peer=peer)
        rate = self._rates.pop(peer, None) or TokenBucket(WISHES_PER_S, WISHES_AT_ONCE)
        self._rates[peer] = rate
        if len(self._rates) > PEERS_LIMIT:
            del self._rates[next(iter(self._rates))]
        with contextlib.suppress(StreamEnded):
            while True:
                data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
                if not rate.take(1.0, trio.current_time()):
                    logger.info("%s tells of more who want a seat than are heard", peer)
                    return
                self._give(peer, decode(data, Enlist, peer=peer))
