"""Owners whose finals are late, and what keeps the others from blaming them: for how long it does.

An honest owner waits for contributions that come slowly, and others that wait for nobody miss its finals meanwhile. It
says that it waits, and is excused for `EXCUSED_S`, or for three times as long as the reduction had run when they first
missed them: what it waits for is no stall while it comes at a quarter of the planned rate.

While somebody accuses another directly, that is settled first. If it is not in `SETTLED_S`, and the owner is the lead
that should settle it, its view is left.

In each reduction that is begun anew it has twice as long. Both times go on from plan to plan of a round: else a lead
that plans again and again would never have had them. Time in which this node was suspended is none: it heard of
nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import RESTING_TICK_S, Accrued, in_crowd

EXCUSED_S, EXCUSED_TIMES = 60.0, 3.0
"""At least so long an owner is excused, longer in a crowd: half of the time that a reduction has by the manifest that
`shoal init` writes."""
SETTLED_S = 60.0
"""By then a dispute is settled, whoever it is between, and however late the relays run; longer in a crowd."""


class Excuses:
    """The time that each owner of one round has had so, as this node saw it."""

    def __init__(self) -> None:
        self._excused: Accrued[PeerId] = Accrued(step_s=RESTING_TICK_S)
        self._held_up: Accrued[PeerId] = Accrued(step_s=RESTING_TICK_S)
        self._limit_s: dict[PeerId, float] = {}
        self._in: dict[PeerId, bytes] = {}
        """By peer, the reduction in which it was excused last, by its lineage."""
        self._nodes = 0

    def look(
        self, plan: Plan, now: float, *, excused: Collection[PeerId], held_up: Collection[PeerId], ran_s: float
    ) -> None:
        """Note of those that enough miss at `now` who is excused, and of whom other words keep these from being heard.

        ran_s: how long the reduction of `plan` has been going on.
        """
        self._nodes = len(plan.participants)
        self._held_up.look(held_up, now)
        self._excused.look(excused, now)
        for peer in excused:
            if self._in.get(peer) != plan.lineage:
                self._in[peer] = plan.lineage
                least_s = max(2 * self._limit_s.get(peer, 0.0), in_crowd(EXCUSED_S, self._nodes))
                self._limit_s[peer] = max(least_s, EXCUSED_TIMES * ran_s)

    def over(self, peer: PeerId) -> bool:
        """True if this owner is excused no more."""
        return peer in self._limit_s and self._excused.seconds(peer) >= self._limit_s[peer]

    def unsettled(self, peer: PeerId) -> bool:
        """True if by now this owner is missed whatever others say of each other."""
        return self._held_up.seconds(peer) >= in_crowd(SETTLED_S, self._nodes)
