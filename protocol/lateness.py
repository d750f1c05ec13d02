"""Lateness: how much longer than usual a node waits for an answer, by what it measured.

Two things make answers late, and of both the slowest that was seen lately counts:

    own lag        how late this process runs. An answer that has arrived lies unread for so long, and what it is waited
                   with is late itself: every wait is longer by it
    a round trip   how long a peer took to answer: one that has more to do than it can is waited for as long as that,
                   and where most that answered lately took long, so is everybody

Waited is `WAITED_TIMES` what was seen, which is forgotten by half in `HALF_LIFE_S`. Who is never late, and hears from
quick peers, waits no longer than usual, so that a death is found as fast as ever.

Source: Dadgar, Phillips, Currey, "Lifeguard" (arXiv 1707.00788), section IV; what was measured takes the place of its
count of own failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NOTED_S = 0.25
"""Lateness that is as good as in time."""
HALF_LIFE_S = 5.0
LATE_LIMIT_S = 4.0
"""Lateness up to which a node is waited for: a hang is not slowness."""
WAITED_TIMES = 1.5


@dataclass(slots=True)
class Lateness:
    """The slowest of late, in seconds, up to a limit, forgotten by and by."""

    limit_s: float = LATE_LIMIT_S
    _slowest_s: float = 0.0
    _at: float = -math.inf

    def note(self, late_s: float, now: float) -> None:
        """Something was so late, and is noticed now."""
        before_s = self.seconds(now)
        self._slowest_s = max(before_s, min(late_s, self.limit_s) if late_s > NOTED_S else 0.0)
        self._at = now

    def noted_within(self, seconds: float, now: float) -> bool:
        """True if something was noted, late or not, in so many seconds before now."""
        return now - self._at <= seconds

    def seconds(self, now: float) -> float:
        """Return how late things are by now; 0 for in time."""
        if not self._slowest_s:
            return 0.0
        late_s = self._slowest_s * 0.5 ** ((now - self._at) / HALF_LIFE_S)
        return late_s if late_s > NOTED_S else 0.0

    def waited_s(self, now: float) -> float:
        """Return how long to wait for something that is as late; 0 for no longer than usual."""
        return WAITED_TIMES * self.seconds(now)
