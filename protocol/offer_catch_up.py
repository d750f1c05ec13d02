"""Announcements that gossip lost: whom to ask for theirs, and what to answer.

Sans-IO, for both sides; `shoal.swarm.rollouts` carries it out. Gossip gives no guarantee, least of all to a
node that has just joined. So whoever's numbers have gaps is asked, and everybody in turn, since nobody sees a gap
behind the last that came. An origin keeps its own announcements for as long as they are worth something, and answers
from HISTORY_DELAY_S after it published them: until then gossip may bring them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from shoal.protocol.backoff import Backoff
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import BATCH_LIMIT_ITEMS, AnnouncementBatch, CatchUpRequest

ASK_PERIOD_S = 2.0
ASK_PERIOD_LIMIT_S = 8.0
"""Of a node that misses nothing it knows of, and to which asking brought nothing."""
ASK_PERIOD_BESIDE_NEWS_S = 30.0
"""The same, of one that hears by its neighbours' news (`offer_news`) what gossip did not bring."""
ASKED_PER_PERIOD = 4
ANSWERS_PER_TURN = 4
"""Full answers of one peer that are taken in its turn."""
HISTORY_LIMIT = 2048
HISTORY_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Published:
    sealed: bytes
    round: int
    at: float


class OfferCatchUp:
    """One node's announcements of its life `boot`, and its turns of asking. `missing`: what to ask a peer for.

    beside_news: whether neighbours are asked for news, too.
    Times are seconds of any clock that does not go back.
    """

    def __init__(self, *, boot: int, missing: Callable[[PeerId], CatchUpRequest], beside_news: bool = False) -> None:
        self._boot = boot
        self._missing = missing
        self._history: OrderedDict[int, _Published] = OrderedDict()
        self._asked: OrderedDict[PeerId, None] = OrderedDict()
        self._news = 0
        self._period = Backoff(ASK_PERIOD_S, ASK_PERIOD_BESIDE_NEWS_S if beside_news else ASK_PERIOD_LIMIT_S)

    def __len__(self) -> int:
        return len(self._history)

    @property
    def period_s(self) -> float:
        """The time to wait until the next turn."""
        return self._period.pause_s

    # -- an origin ---------------------------------------------------------------------------------------------

    def note(self, sequence: int, sealed: bytes, round_number: int, now: float) -> None:
        """This node publishes this announcement of its round."""
        self._history[sequence] = _Published(sealed, round_number, now)
        if len(self._history) > HISTORY_LIMIT:
            self._history.popitem(last=False)

    def expire(self, before_round: int) -> None:
        """Forget what was announced before this round."""
        while self._history and next(iter(self._history.values())).round < before_round:
            self._history.popitem(last=False)

    def answer(self, request: CatchUpRequest, now: float) -> AnnouncementBatch:
        """Of this node's announcements, those that the asking peer says it lacks, at most BATCH_LIMIT_ITEMS."""
        same_life = request.boot == self._boot
        newest, missing = (request.newest, frozenset(request.missing)) if same_life else (0, frozenset[int]())
        latest = now - HISTORY_DELAY_S
        wanted = (
            published.sealed
            for sequence, published in self._history.items()
            if (sequence > newest or sequence in missing) and published.at <= latest
        )
        return AnnouncementBatch(announcements=tuple(islice(wanted, BATCH_LIMIT_ITEMS)))

    # -- who lacks something -----------------------------------------------------------------------------------

    def begin_turn(self, reachable: Collection[PeerId]) -> list[PeerId]:
        """Pick peers to ask in this turn: those with gaps, but for one place at least, and those asked longest ago."""
        self._news = 0
        newcomers = sorted(set(reachable) - self._asked.keys())
        self._asked = OrderedDict.fromkeys((*newcomers, *(peer for peer in self._asked if peer in reachable)))
        turn = list(dict.fromkeys((*self._with_gaps()[: ASKED_PER_PERIOD - 1], *self._asked)))[:ASKED_PER_PERIOD]
        for peer in turn:
            self._asked.move_to_end(peer)
        return turn

    def request(self, peer: PeerId) -> CatchUpRequest:
        """Return what to ask this peer for."""
        return self._missing(peer)

    def came(self, batch: AnnouncementBatch, news: int) -> bool:
        """An answer came, `news` of which this node did not have. Whether there may be more."""
        self._news += news
        return len(batch.announcements) >= BATCH_LIMIT_ITEMS

    def end_turn(self) -> None:
        """All answers of this turn are here, or will not come."""
        if self._news or self._with_gaps():
            self._period.reset()
        else:
            self._period.next_s()

    def _with_gaps(self) -> list[PeerId]:
        return [peer for peer in self._asked if self._missing(peer).missing]
