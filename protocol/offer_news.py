"""Announcements that gossip brought to a neighbour and not here: what to ask neighbours for, and what to answer.

Gossip may pass a node by for minutes, and where few are linked few are asked for their own (`offer_catch_up`). So each
node numbers the announcements that came to it, of whomever, and each period asks one of its partners, a few of its
neighbours, for those after the last number that it had from it. What it has already costs it a look, and the more
partners there are the more often it is told the same; so there are three, and one after the other makes room for a
neighbour that was none for longest: who tells nothing, by mishap or on purpose, is no partner for long.

Sans-IO, for both sides; `shoal.swarm.rollouts` carries it out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import BATCH_LIMIT_ITEMS, NEWS_LIMIT_BYTES, News, NewsRequest

NEWS_PERIOD_S = 8.0
PARTNERS = 3
TURNS_OF_PARTNERS = 16
"""After so many turns one partner makes room."""
NEWS_LOG_LIMIT = 1024
"""Announcements that are kept for neighbours: minutes, of a thousand nodes that make a group a minute each."""
NEWS_ANSWERS_PER_TURN = 4
"""Full answers of one neighbour that are taken in its turn."""


class OfferNews:
    """The log of one node in its life `boot`, and its places in those of its neighbours."""

    def __init__(self, *, boot: int) -> None:
        self._boot = boot
        self._log: OrderedDict[int, bytes] = OrderedDict()
        self._last = 0
        self._places: OrderedDict[PeerId, NewsRequest] = OrderedDict()  # of partners, who was asked longest ago first
        self._waiting: OrderedDict[PeerId, None] = OrderedDict()  # other neighbours, those that were partners last
        self._turns = 0

    def note(self, sealed: bytes) -> None:
        """This announcement is new here, or this node's own."""
        self._last += 1
        self._log[self._last] = sealed
        if len(self._log) > NEWS_LOG_LIMIT:
            self._log.popitem(last=False)

    def answer(self, request: NewsRequest) -> News:
        """Offers after the number that the asking peer names; to who names none of this life, the last ones."""
        same_life = request.boot == self._boot
        after = min(request.after, self._last) if same_life else self._last - BATCH_LIMIT_ITEMS
        first = next(iter(self._log), self._last + 1)
        answered: list[bytes] = []
        last, room_bytes = max(after, first - 1), NEWS_LIMIT_BYTES
        while last < self._last and len(answered) < BATCH_LIMIT_ITEMS and room_bytes >= len(self._log[last + 1]):
            last += 1
            answered.append(self._log[last])
            room_bytes -= len(answered[-1])
        return News(boot=self._boot, last=last, announcements=tuple(answered))

    def turn(self, neighbours: Collection[PeerId]) -> PeerId | None:
        """Choose the partner to ask now, the one asked longest ago; None if there is no neighbour."""
        self._places = OrderedDict((peer, place) for peer, place in self._places.items() if peer in neighbours)
        newcomers = sorted(set(neighbours) - self._places.keys() - self._waiting.keys())
        self._waiting = OrderedDict.fromkeys([*newcomers, *(peer for peer in self._waiting if peer in neighbours)])
        self._turns += 1
        if self._turns % TURNS_OF_PARTNERS == 0 and self._waiting and self._places:
            self._waiting[self._places.popitem(last=False)[0]] = None
        begin = [*self._waiting][: PARTNERS - len(self._places)]
        for peer in begin:
            del self._waiting[peer]
        self._places = OrderedDict({**dict.fromkeys(begin, NewsRequest()), **self._places})
        if not self._places:
            return None
        peer = next(iter(self._places))
        self._places.move_to_end(peer)
        return peer

    def request(self, peer: PeerId) -> NewsRequest:
        """Return what to ask this neighbour for."""
        return self._places.get(peer, NewsRequest())

    def came(self, peer: PeerId, news: News) -> bool:
        """Note how far a neighbour's answer went. Whether there may be more."""
        self._places[peer] = NewsRequest(boot=news.boot, after=news.last)
        return len(news.announcements) >= BATCH_LIMIT_ITEMS
