"""Scores of the peers that are asked for something: who was fast, who lied, whose claims came to nothing.

It has no clock: times are in seconds of any monotonic one, rates in bytes/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shoal.protocol.backoff import Backoff
from shoal.protocol.identity import PeerId

HEDGE_S: Final = 0.5
"""Whoever has not answered by then is waited for no longer before the next one is asked."""
BAN_S: Final = 600.0  # that who served something wrong is not asked; doubled each time
BAN_LIMIT_S: Final = 24 * 3600.0
REST_S: Final = 1.0
REST_LIMIT_S: Final = 64.0
"""Longest time for which the claims of a peer are left alone that showed nothing: doubled each time."""
LACK_S: Final = 8.0
LACK_LIMIT_S: Final = 600.0
"""Longest time for which who did not bring what it was asked for is asked after all others: doubled each time."""
SCORE_LIMIT: Final = 256
"""Donors that are remembered; the ones that were heard of longest ago are forgotten."""


@dataclass(slots=True)
class _Score:
    bans: Backoff = field(default_factory=partial(Backoff, BAN_S, BAN_LIMIT_S))
    banned_until: float = float("-inf")
    rests: Backoff = field(default_factory=partial(Backoff, REST_S, REST_LIMIT_S))
    rests_until: float = float("-inf")
    lacks: Backoff = field(default_factory=partial(Backoff, LACK_S, LACK_LIMIT_S))
    lacks_until: float = float("-inf")
    rate: float | None = None


class DonorScores:
    """Scores of donors, kept from one transfer to the next.

    They tell how fast a donor was, whether it lied, and whether what it claimed or was asked for came to nothing.
    """

    def __init__(self) -> None:
        self._scores: dict[PeerId, _Score] = {}

    def _of(self, peer: PeerId) -> _Score:
        score = self._scores.pop(peer, None) or _Score()
        self._scores[peer] = score  # at the end: the least recently touched are first
        while len(self._scores) > SCORE_LIMIT:
            del self._scores[next(iter(self._scores))]
        return score

    def offended(self, peer: PeerId, now: float) -> None:
        """It served something that is not what it should be."""
        score = self._of(peer)
        score.banned_until = now + score.bans.next_s()

    def disappointed(self, peer: PeerId, now: float) -> None:
        """It did not answer, or what it claimed to have it does not have."""
        score = self._of(peer)
        score.rests_until = now + score.rests.next_s()

    def showed(self, peer: PeerId) -> None:
        """It had what it claimed."""
        score = self._of(peer)
        score.rests.reset()
        score.rests_until = float("-inf")

    def lacked(self, peer: PeerId, now: float) -> None:
        """It did not bring what it was asked for, or does not have it: no offence, but others come before it."""
        score = self._of(peer)
        if now >= score.lacks_until:
            score.lacks_until = now + score.lacks.next_s()

    def resting(self, peer: PeerId, now: float) -> bool:
        """True if it is to be left alone for now, or asked after all others."""
        score = self._scores.get(peer)
        return score is not None and now < max(score.rests_until, score.banned_until)

    def measured(self, peer: PeerId, rate: float) -> None:
        """It brought that many bytes/s."""
        score = self._of(peer)
        score.rate, score.lacks_until = rate, float("-inf")
        score.lacks.reset()

    def rate(self, peer: PeerId) -> float | None:
        """The last measured rate; None if there is none."""
        score = self._scores.get(peer)
        return None if score is None else score.rate

    def banned(self, peer: PeerId, now: float) -> bool:
        """True if nothing is to be asked of it now."""
        score = self._scores.get(peer)
        return score is not None and now < score.banned_until

    def ranked(self, peers: Sequence[PeerId], now: float) -> list[PeerId]:
        """Those that are not banned, the fastest first; otherwise in the given order.

        Last are those who disappointed lately, and before them those who lately lacked what they were asked for: else a
        few that claim much and hold nothing would be asked again and again, and nobody else.
        """
        allowed = [peer for peer in peers if not self.banned(peer, now)]
        return sorted(
            allowed, key=lambda peer: (self.resting(peer, now), self._lacks(peer, now), -(self.rate(peer) or 0.0))
        )

    def _lacks(self, peer: PeerId, now: float) -> bool:
        score = self._scores.get(peer)
        return score is not None and now < score.lacks_until
