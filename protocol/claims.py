"""Claims to be ahead: whose is looked into, and when. A claim is a hint; only certificates that hold show anything.

    claimed ──► looked into: one request, for certificates from this node's own head on ──► showed something: as before
       ▲                                                                   │
       └──────────── its next claims wait, twice as long each time ◄───────┴─► showed nothing, or was not answered

At most one request is under way to a peer. Who is no member may keep OUTSIDERS_LIMIT of them at most, and nobody who
does not answer keeps others from being asked for longer than HEDGE_S. It has no clock: times are in seconds of any
monotonic one.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol.chain import Position, next_position
from shoal.protocol.donors import HEDGE_S, DonorScores
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value

CLAIMS_LIMIT = 256
"""Peers whose claims are remembered; beyond it the oldest claim of who is no member makes room."""
OUTSIDERS_LIMIT = 4
"""Requests that are under way to peers that are no members."""


class Claims:
    """Claims of peers, and which of them are being asked. `scores` remembers whose claims showed nothing."""

    def __init__(self, scores: DonorScores) -> None:
        self._scores = scores
        self._claims: dict[PeerId, Position] = {}
        self._asked_at: dict[PeerId, float] = {}

    def heard(self, peer: PeerId, position: Position, *, members: Collection[PeerId]) -> None:
        """`peer` claims that all before `position` is decided."""
        self._claims[peer] = max(position, self._claims.get(peer, position))
        while len(self._claims) > CLAIMS_LIMIT:
            oldest = next((one for one in self._claims if one not in members), next(iter(self._claims)))
            del self._claims[oldest]

    def claimants(self, head: Value) -> list[PeerId]:
        """Peers that claim more than what is certified here, by `head`."""
        due = next_position(head)
        self._claims = {peer: position for peer, position in self._claims.items() if position > due}
        return list(self._claims)

    def next(self, head: Value, now: float) -> PeerId | None:
        """Pick the peer whose claim to look into now, members first; it counts as being asked. None if nobody's."""
        if any(now - since < HEDGE_S for since in self._asked_at.values()):
            return None
        outsiders = sum(peer not in head.members for peer in self._asked_at)
        possible = [
            peer
            for peer in self.claimants(head)
            if peer not in self._asked_at
            and not self._scores.resting(peer, now)
            and (peer in head.members or outsiders < OUTSIDERS_LIMIT)
        ]
        chosen = next((peer for peer in possible if peer in head.members), next(iter(possible), None))
        if chosen is not None:
            self._asked_at[chosen] = now
        return chosen

    def answered(self, peer: PeerId, head: Value, now: float, *, new: bool) -> None:
        """The request to `peer` is over, with `head` as it is then. new: it brought something that held."""
        del self._asked_at[peer]
        position = self._claims.pop(peer, None)
        shown = position is None or position <= next_position(head)
        if new or shown:
            self._scores.showed(peer)
        else:
            self._scores.disappointed(peer, now)
