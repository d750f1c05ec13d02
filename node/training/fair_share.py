"""Number of inner steps that a node makes in a round, so that contributions of fast and slow nodes arrive together.

    steps of node i = H · sᵢ / mean(s)        s: steps/s of the live members, as each measured itself

Then all train for the same time, H steps each on average. It is steps that are compared and not tokens: who has larger
batches, on a larger device, takes as long for one, and its steps weigh more. A speed that is not known counts
as the median one, and so does one that hardly differs from it: others' speeds are known as they were told last, and a
small change is not told at once, so a difference of a hundredth or two says when each told, and who told late would
have all others wait. The speeds are claims: one beyond `CLAIM_LIMIT` times the median, or below that part of it, counts
as just that much, so that no claim makes the rounds of the others much shorter or longer. Every node plans for itself
alone, and nothing has to agree: a contribution weighs what tokens it brings, however many.

Source: FedCompass, arXiv 2309.14675, section 3 (local steps by measured speed, so that clients arrive in groups).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

CLAIM_LIMIT = 8.0
"""The speed of another node counts as at most so many times the median, and at least that part of it."""
STEPS_LIMIT = 8
"""A node makes at most so many times the steps of the manifest, and at least that part of them."""
SPEEDS_KEPT = 3
NEWS_SHARE = 0.05
"""A speed that differs by more than this share from the one last told is worth telling at once."""
SAME_SHARE = 0.03
"""A speed that differs by no more than this share from the median counts as that."""


def fair_steps(steps: int, mine: float, others: Sequence[float]) -> int:
    """This node's steps of a round in which the live members make `steps` each on average: 1 at least.

    mine, others: steps/s, of the other live members each; 0 is not known.
    """
    known = sorted(speed for speed in (mine, *others) if _is_known(speed))
    if not known:
        return steps
    median = known[(len(known) - 1) // 2]  # the lower one, which a single claim among two cannot raise
    speeds = [_counted(speed, median) for speed in (mine, *others)]
    wanted = round(steps * speeds[0] / statistics.fmean(speeds))
    return min(max(wanted, math.ceil(steps / STEPS_LIMIT)), steps * STEPS_LIMIT)


def _is_known(speed: float) -> bool:
    return math.isfinite(speed) and speed > 0


def _counted(speed: float, median: float) -> float:
    if not _is_known(speed) or abs(speed - median) <= SAME_SHARE * median:
        return median
    return min(max(speed, median / CLAIM_LIMIT), median * CLAIM_LIMIT)


class SteadySpeed:
    """A node's speed, in steps/s or tokens/s: the median of its last stretches: one odd stretch changes nothing."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=SPEEDS_KEPT)
        self._told = 0.0

    @property
    def per_s(self) -> float:
        """The speed; 0 as long as nothing was measured."""
        return statistics.median(self._recent) if self._recent else 0.0

    def measured(self, per_s: float) -> bool:
        """Note the speed of one more stretch; returns whether others should hear of the change at once."""
        if _is_known(per_s):
            self._recent.append(per_s)
        if abs(self.per_s - self._told) <= NEWS_SHARE * self._told:
            return False
        self._told = self.per_s
        return True
