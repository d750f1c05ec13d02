"""Number of lanes that a pair of nodes should have, found by trying. No clock and no socket here.

    settled with n ── busy for MEASURE_S, hold-off over ──► trying 2n ── rose by RISE ──► settled with 2n
         ▲                                                     │
         └──────────── did not: hold off, each time twice as long ┘

Up to HELD_LANES, if a buffer held the lanes back for HELD_SHARE of the time before, it is enough that nothing fell:
each of the more lanes is further from its limit, and they fill a gap that one of them leaves (after a loss, or when BBR
empties its path to measure it). Beyond that what lies in buffers may be no more than the link's own queue.

More connections move more where each is held back by itself (loss on a long link, a policer, a window); where they
share one narrow link they move the same and cost threads. Which it is cannot be known beforehand. Only time in which
frames waited without a break is measured, so a pair that exchanges for a moment is left alone; and not in the first
SETTLE_S of a lane or after a rest, while windows grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.backoff import Backoff
from shoal.swarm.lanes.seal import LANES_PER_PEER_LIMIT
from shoal.swarm.lanes.socket import Moved

MEASURE_S = 2.0  # before and after another lane is tried
SETTLE_S = 1.0
RISE = 1.15
HELD_SHARE = 0.1
HELD_LANES = 4
HOLD_OFF_MIN_S = 60.0  # until the next try, doubled each time
HOLD_OFF_LIMIT_S = 3600.0
RATE_MIN_BYTES_PER_S = 64 * 1024  # who takes less has stalled, and no lane more will help


@dataclass(frozen=True, slots=True)
class _Window:
    """A measurement: since when, and what had moved by then."""

    start_s: float
    start: Moved


class LaneCount:
    """The number of lanes of one pair, in one direction. Times are of any one clock.

    least: to begin with, and never fewer.
    """

    def __init__(self, *, least: int = 1, limit: int = LANES_PER_PEER_LIMIT) -> None:
        self.wanted = least
        self._kept = least  # what `wanted` falls back to
        self._rate_to_reach = 0.0  # bytes/s with more of them; known while trying
        self._limit = limit
        self._window: _Window | None = None
        self._steady_since: float | None = None  # since when there are as many lanes as wanted
        self._hold_off = Backoff(HOLD_OFF_MIN_S, HOLD_OFF_LIMIT_S)
        self._hold_until = 0.0

    @property
    def trying(self) -> bool:
        """True while it is open if `wanted` lanes move more."""
        return self.wanted > self._kept

    def sample(self, now: float, *, lanes: int, busy_since: float | None, moved: Moved) -> None:
        """Look at the pair, and decide anew how many lanes are `wanted`. To be called often while it is busy.

        lanes: usable ones. busy_since: since when frames have waited without a break. moved: to the peer, ever; what
        the peer's kernel has acknowledged says more than what was given to ours.
        """
        if lanes < self.wanted:
            self._steady_since = self._window = None
            return
        if self._steady_since is None:
            self._steady_since = now
        if busy_since is None or now < max(self._steady_since, busy_since) + SETTLE_S:
            self._window = None
            return
        if self._window is None or self._window.start_s < busy_since:
            self._window = _Window(now, moved)
            return
        seconds, start = now - self._window.start_s, self._window.start
        if seconds >= MEASURE_S:
            self._window = None
            held = moved.held_s - start.held_s >= HELD_SHARE * (moved.busy_s - start.busy_s) > 0
            self._judge(now, (moved.taken - start.taken) / seconds, held=held)

    def give_up(self, now: float) -> None:
        """The lanes wanted cannot be had: stay with what there was."""
        if self.trying:
            self._fall_back(now)

    def _judge(self, now: float, rate: float, *, held: bool) -> None:
        """Decide on a rate measured with `wanted` lanes. held: by a buffer, much of the time."""
        if self.trying and rate < self._rate_to_reach:
            self._fall_back(now)
            return
        if self.trying:
            self._kept = self.wanted
            self._hold_off.reset()
        if now >= self._hold_until and self.wanted < self._limit and rate >= RATE_MIN_BYTES_PER_S:
            self.wanted = min(2 * self._kept, self._limit)
            self._rate_to_reach = rate if held and self.wanted <= HELD_LANES else RISE * rate
            self._steady_since = None

    def _fall_back(self, now: float) -> None:
        self.wanted = self._kept
        self._steady_since = self._window = None
        self._hold_until = now + self._hold_off.next_s()
