"""Local scores: what a node holds against its peers that it cannot prove. They fade, and decide only whom it asks last
(audits), and whom it ignores among those that share rollouts.

No electorate, plan or vote depends on a score: of what is not proven everybody has another impression.
"""

from __future__ import annotations

import math

from shoal.protocol.identity import PeerId

HALF_LIFE_S = 3600.0  # of a local score of audits
PEERS_LIMIT = 1024
FORGOTTEN = 0.01
"""Points below which a score is dropped."""

UNANSWERED = 0.2
"""A contribution that was asked for in an audit, and not shown."""
MISCOMMITTED = 1.0
"""A contribution whose bytes are not what was committed to: nobody else can see who sent them."""
FALSE_EVIDENCE = 4.0
"""Evidence that proves nothing, from who says that it verified it."""
USELESS = 1.0
"""Work that did not help on the data it was assigned."""


class Suspicion:
    """Points against at most `limit` peers, halved every `half_life`.

    Times are of a monotonic clock in the half-life's unit: seconds, or a node's rounds.
    """

    def __init__(self, *, half_life: float = HALF_LIFE_S, limit: int = PEERS_LIMIT) -> None:
        self._half_life = half_life
        self._limit = limit
        self._points: dict[PeerId, tuple[float, float]] = {}

    def add(self, peer: PeerId, points: float, now: float, *, most: float = math.inf) -> None:
        """Hold so much more, or less, against `peer`, `most` in all; who has the least against it makes room."""
        self._points[peer] = (min(max(0.0, self.of(peer, now) + points), most), now)
        if len(self._points) > self._limit:
            del self._points[min(self._points.keys() - {peer}, key=lambda one: (self.of(one, now), one))]

    def of(self, peer: PeerId, now: float) -> float:
        """Points held against `peer`, decayed to `now`."""
        points, at = self._points.get(peer, (0.0, now))
        left: float = points * 0.5 ** (max(0.0, now - at) / self._half_life)
        return left if left >= FORGOTTEN else 0.0
