"""Timeouts for the lead: how long a member waits in each stage of a view before it moves to the next.

Limits double with the view, up to a cap, so that members who lost patience at different moments meet in one view.

A lead that plans again and again gains little by it: plans that follow each other before one had its time are a series,
which has as long again as one plan, and no longer. A plan that had its whole time, or half of it until somebody died,
and is replaced, begins another series, of twice the time, so often as that may double: a lead that leads what others
exchange through itself, and drops it, has its end too. And the time for which members have reported, and it plans anew
in place of proposing, adds up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.protocol.messages import Plan
from shoal.protocol.planning import RoundSettings

PLAN_TIMEOUT_S = 5.0
"""Beyond the grace deadline for a plan, and beyond the lead's own deadline for a reduction."""
OVERDUE_SETTLE_S = 2.0
"""So long a lead waits, once a reduction is overdue, for what the others say of it then."""
HELD_TIMEOUT_S = 4.0
"""Time for a participant to say what it holds, longer in a crowd; who takes longer is evicted too."""
PROPOSE_TIMEOUT_S = 15.0  # for a proposal, having reported
SILENCE_S = 2.0
"""At least so long, and as long as all others took for their reports, has a lead to which all others have reported."""
WHOLE_SHARE = 0.95
"""Of a reduction's deadline, after which a plan had its whole time: on its way it may have been late."""
VOTE_TIMEOUT_S = 10.0  # for votes
DOUBLINGS_LIMIT = 5  # of patience, and of the reduce deadline
RESTING_TICK_S = 1.0
"""Between two ticks of whatever looks only now and then, while nothing is due but what an input leads to."""
CROWD = 16
"""Beyond so many nodes what each says to all again and again is said more seldom, and all are waited for longer."""

Who = TypeVar("Who", bound=Hashable)

TRAIN, PLAN, REPLAN, REDUCE, PROPOSE, VOTE = "train", "plan", "replan", "reduce", "propose", "vote"


def doubled(seconds: float, times: int) -> float:
    """`seconds`, doubled so many times, up to the cap."""
    return seconds * float(2 ** min(times, DOUBLINGS_LIMIT))


def next_beat(now: float, period_s: float = RESTING_TICK_S) -> float:
    """The moment after `now` at which all that looks so often does, so that a process at rest wakes up once for all.

    To wake up costs more than what is done then.
    """
    return period_s * (math.floor(now / period_s) + 1)


def in_crowd(seconds: float, nodes: int) -> float:
    """`seconds`, and as many times as long as there are more nodes than CROWD.

    In a crowd each owner of chunks makes a lane to everybody, and each word to all is one from all: else nodes that
    share a machine would take each other's work for a stall, and have the more the less of it they get done.
    """
    return seconds * max(1.0, nodes / CROWD)


def reduce_deadline_s(settings: RoundSettings, plan: Plan) -> float:
    """Time limit on a plan's reduction, in seconds: doubled with every attempt, so it ends in the end."""
    return doubled(settings.reduce_deadline_s, plan.attempt)


@dataclass(slots=True)
class Since:
    """Since when something holds; None while it does not."""

    at: float | None = None

    def note(self, holds: bool, now: float) -> float:
        """Return the seconds for which it has held."""
        if not holds:
            self.at = None
            return 0.0
        self.at = now if self.at is None else self.at
        return now - self.at


class Accrued(Generic[Who]):
    """The seconds for which each of some was noted, all in all; who is noted again goes on.

    step_s: from one look to the next no more counts, where what was not looked at may not have been so. pause_s: who
    was not noted for longer begins anew.
    """

    def __init__(self, *, step_s: float = math.inf, pause_s: float = math.inf) -> None:
        self._step_s, self._pause_s = step_s, pause_s
        self._seconds: dict[Who, float] = {}
        self._noted_at: dict[Who, float] = {}
        self._looked_at: float | None = None

    def look(self, noted: Collection[Who], now: float) -> None:
        """These are noted at `now`."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self._step_s)
        self._looked_at = now
        for one in noted:
            goes_on = now - self._noted_at.get(one, -math.inf) <= self._pause_s + passed_s and one in self._seconds
            self._seconds[one] = self._seconds[one] + passed_s if goes_on else 0.0
            self._noted_at[one] = now

    def seconds(self, one: Who) -> float:
        """The time for which it was noted; none if it never was."""
        return self._seconds.get(one, 0.0)


class Timeouts:
    """The stage that a round is in for one member, since when, and for how long that may be."""

    def __init__(self, settings: RoundSettings) -> None:
        self._settings = settings
        self._view = 0
        self._stage = ""
        self._plan: Plan | None = None
        self._adopted_at = self._series_since = 0.0
        self._repaired = False
        self._doublings = 0
        self._reported_s = 0.0
        """Time for which it had reported under earlier plans of the view, and was given another."""
        self.since = 0.0

    def note(self, view: int, stage: str, plan: Plan | None, now: float, *, without_dead: bool = False) -> None:
        """Note the stage and view of the round; a plan begins a stage, or goes on in that of the one before it.

        without_dead: the plan goes on without somebody who died.
        """
        if view != self._view:
            self._begin_series(now, doublings=0)
            self._reported_s = 0.0
        elif (self._stage, stage) == (PROPOSE, REDUCE):
            self._reported_s += now - self.since
        planned = plan is not self._plan
        if planned:
            self._note_plan(view, plan, now, WHOLE_SHARE / 2 if without_dead else WHOLE_SHARE)
        if (view, stage) != (self._view, self._stage) or (stage == REDUCE and planned):
            self.since = self._series_since if stage == REDUCE else now
        self._view, self._stage, self._plan = view, stage, plan

    def _note_plan(self, view: int, plan: Plan | None, now: float, share: float) -> None:
        before, took_s = self._plan, now - self._adopted_at
        self._adopted_at = now
        if before is None or plan is None or before.view != view:
            self._begin_series(now, doublings=0)
        elif self._had_its_time(took_s, share) and self._doublings < DOUBLINGS_LIMIT:
            self._begin_series(now, doublings=self._doublings + 1)
        else:
            self._repaired = True

    def _had_its_time(self, took_s: float, share: float) -> bool:
        """True if a plan that took so long is replaced for that, and not in place of a proposal."""
        return self._stage == REDUCE and took_s >= share * self._reduce_s()

    def _begin_series(self, now: float, *, doublings: int) -> None:
        self._series_since, self._doublings, self._repaired = now, doublings, False

    def _reduce_s(self) -> float:
        return doubled(self._settings.reduce_deadline_s, self._doublings)

    def renew(self, now: float) -> None:
        """Begin the stage's time anew: nothing could be expected until now."""
        self.since = now
        self._series_since = now

    def over(self, now: float) -> bool:
        """True if the lead has had its time."""
        limit_s, earlier_s = self._limit_s(), self._reported_s if self._stage == PROPOSE else 0.0
        return limit_s is not None and earlier_s + now - self.since >= doubled(limit_s, self._view)

    def _limit_s(self) -> float | None:
        if self._stage == TRAIN:
            return None  # others may train for as long as they need
        if self._stage == PLAN:
            return self._settings.grace_s + PLAN_TIMEOUT_S
        if self._stage == REPLAN and self._plan is not None:
            held_s = in_crowd(HELD_TIMEOUT_S, len(self._plan.participants))
            return self._settings.grace_s + PLAN_TIMEOUT_S + held_s
        if self._stage == PROPOSE:
            return PROPOSE_TIMEOUT_S
        if self._stage == VOTE or self._plan is None:
            return VOTE_TIMEOUT_S
        return self._reduce_s() * (2 if self._repaired else 1) + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S
