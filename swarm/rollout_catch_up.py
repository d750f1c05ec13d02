"""Announcements that gossip lost: each node asks the others for those of theirs that did not arrive.

Gossip gives no guarantee, least of all to a node that has just joined. So whoever's numbers have gaps is asked, and
everybody in turn, since nobody sees a gap behind the last that came. An origin keeps its own announcements for as long
as they are worth something, and answers from HISTORY_DELAY_S after it published them: until then gossip may bring them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import (
    BATCH_LIMIT_BYTES,
    BATCH_LIMIT_ITEMS,
    AnnouncementBatch,
    CatchUpRequest,
    RolloutError,
    decode_batch,
    decode_catch_up,
    encode_batch,
)
from shoal.protocol.wire import canonical
from shoal.swarm.host import Host
from shoal.swarm.streams import MessageStream

logger = logging.getLogger(__name__)

CATCH_UP_PROTOCOL = "/shoal/rollout-offers/1"
ASK_PERIOD_S = 2.0
ASK_PERIOD_LIMIT_S = 8.0
"""Of a node that misses nothing it knows of, and to which asking brought nothing."""
ASKED_PER_PERIOD = 4
ANSWERS_PER_TURN = 4
"""Full answers of one peer that are taken in its turn."""
HISTORY_LIMIT = 2048
HISTORY_DELAY_S = 5.0
DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Published:
    sealed: bytes
    round: int
    at: float


class CatchUp:
    """Both sides of asking for announcements that did not arrive."""

    def __init__(
        self,
        *,
        host: Host,
        protocol: str,
        boot: int,
        peers: Callable[[], Collection[PeerId]],
        missing: Callable[[PeerId], CatchUpRequest],
        take: Callable[[PeerId, AnnouncementBatch], int],
        blame: Callable[[PeerId, RolloutError], None],
    ) -> None:
        """`peers`: who may be asked and may ask. `take`: what to do with an answer; returns how many of it are news."""
        self._host = host
        self._protocol = protocol
        self._boot = boot
        self._peers = peers
        self._missing = missing
        self._take = take
        self._blame = blame
        self._history: OrderedDict[int, _Published] = OrderedDict()
        self._asked: OrderedDict[PeerId, None] = OrderedDict()
        self._news = 0

    def note(self, sequence: int, sealed: bytes, round_number: int) -> None:
        """This node publishes this announcement of its round."""
        self._history[sequence] = _Published(sealed, round_number, trio.current_time())
        if len(self._history) > HISTORY_LIMIT:
            self._history.popitem(last=False)

    def expire(self, before_round: int) -> None:
        """Forget what was announced before this round."""
        while self._history and next(iter(self._history.values())).round < before_round:
            self._history.popitem(last=False)

    async def run(self) -> None:
        """Answer, and ask a few peers each period, until cancelled."""
        self._host.serve(self._protocol, self._answer, limit_bytes=BATCH_LIMIT_BYTES)
        period_s = ASK_PERIOD_S
        while True:
            await trio.sleep(period_s)
            self._news = 0
            async with trio.open_nursery() as nursery:
                for peer in self._next_peers():
                    nursery.start_soon(self._ask, peer)
            is_quiet = not self._news and not self._with_gaps()
            period_s = min(2 * period_s, ASK_PERIOD_LIMIT_S) if is_quiet else ASK_PERIOD_S

    def _with_gaps(self) -> list[PeerId]:
        return [peer for peer in self._asked if self._missing(peer).missing]

    def _next_peers(self) -> list[PeerId]:
        """Those whose numbers have gaps, but for one place at least, and those that were asked longest ago."""
        reachable = self._host.connected() & frozenset(self._peers())
        self._asked = OrderedDict.fromkeys(
            (*sorted(reachable - self._asked.keys()), *(peer for peer in self._asked if peer in reachable))
        )
        turn = list(dict.fromkeys((*self._with_gaps()[: ASKED_PER_PERIOD - 1], *self._asked)))[:ASKED_PER_PERIOD]
        for peer in turn:
            self._asked.move_to_end(peer)
        return turn

    async def _ask(self, peer: PeerId) -> None:
        try:
            for _ in range(ANSWERS_PER_TURN):
                request = canonical(self._missing(peer))
                answer = await self._host.request(
                    peer, self._protocol, request, deadline_s=DEADLINE_S, limit_bytes=BATCH_LIMIT_BYTES
                )
                batch = decode_batch(answer, peer=peer)
                self._news += self._take(peer, batch)
                if len(batch.announcements) < BATCH_LIMIT_ITEMS:
                    return
        except RolloutError as error:
            self._blame(peer, error)
        except (NetworkError, RemoteError) as error:
            logger.debug("announcements that may be missing: %s", error)

    async def _answer(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=DEADLINE_S)
        try:
            request = decode_catch_up(data, peer=stream.peer)
        except RolloutError as error:
            self._blame(stream.peer, error)
            raise
        batch = AnnouncementBatch(announcements=self._announcements(stream.peer, request))
        await stream.send(encode_batch(batch), deadline_s=DEADLINE_S)

    def _announcements(self, peer: PeerId, request: CatchUpRequest) -> tuple[bytes, ...]:
        if peer not in self._peers():
            return ()
        same_life = request.boot == self._boot
        newest, missing = (request.newest, frozenset(request.missing)) if same_life else (0, frozenset[int]())
        latest = trio.current_time() - HISTORY_DELAY_S
        wanted = (
            published.sealed
            for sequence, published in self._history.items()
            if (sequence > newest or sequence in missing) and published.at <= latest
        )
        return tuple(islice(wanted, BATCH_LIMIT_ITEMS))
