"""Stall detection: a deadline on the progress of each peer, not on the whole.

A peer stalls when it owes something for the whole of the stall deadline and moves less meanwhile than a quarter of what
it was planned with; where no rate is known, when it moves nothing. Time in which this node itself was suspended does
not count: it saw nothing, so it accuses nobody. While it runs late it waits longer: what came may lie unread; and so it
does while most others answer late, which is no one's fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import doubled, in_crowd

STALL_S = 2.0
STALL_LIMIT_S = 16.0
"""The stall deadline of a round's first plan, and the longest."""
LATE_S = 1.0
"""Beyond the stall deadline for finals, whose owner may itself be waiting: who waits for it speaks first."""
STALL_SHARE = 0.25  # of the planned rate; less is a stall
SUSPENDED_S = 1.0
"""Between two looks, which are meant to be a tenth of a second apart."""


Who = TypeVar("Who", bound=Hashable)
"""A peer, or a way from one to another."""


def stall_deadline_s(plan: Plan) -> float:
    """Time for which a peer may owe something under this plan, in seconds, longer in a crowd.

    It doubles with every attempt, so that those behind one narrow link are not evicted in turn, and begins twice as
    long with every view. It is the same for all who follow the plan. If who came midway had less patience than those
    who waited all the while, it would accuse one of them for what that one itself waits for, or before the relay that
    is to say who is at fault.
    """
    return in_crowd(min(doubled(STALL_S, plan.attempt + plan.view), STALL_LIMIT_S), len(plan.participants))


class StallWatch(Generic[Who]):
    """One direction of one reduction.

    planned: bytes/s by peer, or by way; one that is missing has no known rate. stall_s: the deadline. late_s: by how
    much longer this node waits for all, since it runs late or most others answer late.
    """

    def __init__(
        self, *, stall_s: float, planned: Mapping[Who, float], late_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._stall_s = self._deadline_s = stall_s
        self._late_s = late_s
        self._planned = planned
        self._looks: dict[Who, deque[tuple[float, int]]] = {}
        self._looked_at = float("-inf")

    def look(self, now: float, *, owing: Collection[Who], moved: Mapping[Who, int]) -> None:
        """Note who owes something at `now`, and how many bytes have moved so far."""
        if now - self._looked_at > SUSPENDED_S:
            self._looks.clear()
        self._looked_at = now
        for peer in self._looks.keys() - set(owing):
            del self._looks[peer]
        self._deadline_s = self._stall_s + self._late_s()
        for peer in owing:
            looks = self._looks.setdefault(peer, deque())
            looks.append((now, moved.get(peer, 0)))
            while len(looks) > 1 and looks[1][0] <= now - self._deadline_s:
                looks.popleft()

    def stalled(self) -> set[Who]:
        """Peers or ways that have owed for the whole deadline and moved too little."""
        found = set()
        for peer, looks in self._looks.items():
            (began, before), (now, after) = looks[0], looks[-1]
            needed = max(1.0, STALL_SHARE * self._planned.get(peer, 0.0) * (now - began))
            if now - began >= self._deadline_s and after - before < needed:
                found.add(peer)
        return found


class BusyRate:
    """Bytes per second over the time in which there was something to move."""

    def __init__(self, at: float, moved: int) -> None:
        self._at = at
        self._moved = moved
        self._busy_s = 0.0
        self._busy_bytes = 0

    def look(self, now: float, moved: int, *, busy: bool) -> None:
        """Since the last look `busy` says whether there was something to move."""
        if busy:
            self._busy_s += now - self._at
            self._busy_bytes += moved - self._moved
        self._at, self._moved = now, moved

    def bytes_per_s(self, least_s: float) -> int:
        """The rate; 0, that is unknown, if there was less than `least_s` to see."""
        return int(self._busy_bytes / self._busy_s) if self._busy_s >= least_s else 0
