"""Announcements that gossip brought to a neighbour and not here: what to ask neighbours for, and what to answer.

Gossip may pass a node by for minutes, and where few are linked few are asked for their own (`offer_catch_up`). So each
node numbers the announcements that came to it, of whomever, and each period asks the neighbour that it asked longest
ago for those after the last number that it had from it. What it has already costs it a look.

Sans-IO, for both sides; `shoal.swarm.rollouts` carries it out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import BATCH_LIMIT_ITEMS, NEWS_LIMIT_BYTES, News, NewsRequest

NEWS_PERIOD_S = 8.0
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
        self._places: OrderedDict[PeerId, NewsRequest] = OrderedDict()  # who was asked longest ago first

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
        """Choose the neighbour to ask now, the one asked longest ago; None if there is none."""
        newcomers = sorted(set(neighbours) - self._places.keys())
        kept = {peer: place for peer, place in self._places.items() if peer in neighbours}
        self._places = OrderedDict({**dict.fromkeys(newcomers, NewsRequest()), **kept})
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
