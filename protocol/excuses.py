"""Owners whose finals are late, and what keeps the others from blaming them: for how long it does.

An honest owner waits for contributions that come slowly, and others that wait for nobody miss its finals meanwhile. It
says that it waits, and is excused for `EXCUSED_S`, or for as long again as the plan had run when they first missed
them, since what it takes in may be as slow as what it gave.

While somebody accuses another directly, that is settled first. If it is not in `SETTLED_S`, and the owner is the lead
that should settle it, its view is left.

Both times go on from plan to plan of a round: else a lead that plans again and again would never have had them. Time
in which this node was suspended is none: it heard of nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import RESTING_TICK_S, Accrued, in_crowd

EXCUSED_S = 16.0
"""At least so long an owner is excused, longer in a crowd: as long as the longest stall deadline, by which it says who
keeps it waiting."""
SETTLED_S = 60.0
"""By then a dispute is settled, whoever it is between, and however late the relays run; longer in a crowd."""


class Excuses:
    """The time that each owner of one round has had so, as this node saw it."""

    def __init__(self) -> None:
        self._excused, self._missed = Accrued[PeerId](RESTING_TICK_S), Accrued[PeerId](RESTING_TICK_S)
        self._limit_s: dict[PeerId, float] = {}
        self._under: dict[PeerId, bytes] = {}
        """By peer, the hash of the plan under which it was excused last."""
        self._nodes = 0

    def look(
        self, plan: Plan, now: float, *, missed: Collection[PeerId], excused: Collection[PeerId], ran_s: float
    ) -> None:
        """Note who at `now` is missed by enough, and who of them is excused. ran_s: how long `plan` is followed."""
        self._nodes = len(plan.participants)
        self._missed.look(missed, now)
        self._excused.look(excused, now)
        for peer in excused:
            if self._under.get(peer) != plan.hash:
                self._under[peer] = plan.hash
                self._limit_s[peer] = max(self._limit_s.get(peer, 0.0), in_crowd(EXCUSED_S, self._nodes), ran_s)

    def over(self, peer: PeerId) -> bool:
        """True if this owner is excused no more."""
        return peer in self._limit_s and self._excused.seconds(peer) >= self._limit_s[peer]

    def unsettled(self, peer: PeerId) -> bool:
        """True if by now this owner is missed whatever others say of each other."""
        return self._missed.seconds(peer) >= in_crowd(SETTLED_S, self._nodes)
