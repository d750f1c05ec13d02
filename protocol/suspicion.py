"""Local scores: faults of peers that a node cannot prove. They fade, and decide only which peers it asks last.

No electorate, plan or vote depends on a score: of what is not proven everybody has another impression.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.protocol.identity import PeerId

HALF_LIFE_S = 3600.0  # of a local score
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
    """Points against peers, halved every HALF_LIFE_S. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._points: dict[PeerId, tuple[float, float]] = {}

    def add(self, peer: PeerId, points: float, now: float) -> None:
        """Hold so much more against `peer`."""
        self._points[peer] = (self.of(peer, now) + points, now)
        if len(self._points) > PEERS_LIMIT:
            least = min(self._points, key=lambda one: self.of(one, now))
            del self._points[least]

    def of(self, peer: PeerId, now: float) -> float:
        """Points held against `peer`, decayed to `now`."""
        points, at = self._points.get(peer, (0.0, now))
        left: float = points * 0.5 ** (max(0.0, now - at) / HALF_LIFE_S)
        return left if left >= FORGOTTEN else 0.0

    def least_first(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """`peers`, those with the least against them first."""
        return sorted(peers, key=lambda peer: (self.of(peer, now), peer))
