"""A node that sends, in the reduction of one round, at a share of the rate with which it was planned; for tests.

SLOWED_ROUND and SLOWED_TO say in which, and to what share. It needs a cap on what it uploads.
"""

from __future__ import annotations

import os

from shoal.cli.main import main
from shoal.collectives.contribution import EncodedContribution
from shoal.node.rounds.reducing import ReductionDriver
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.limits import RateLimit

honest_start = ReductionDriver.start
honest_reserve = RateLimit.reserve
slowed: list[float] = []


def start(self: ReductionDriver, plan: Plan, contribution: EncodedContribution | None) -> None:
    """From now on, or no more."""
    me = plan.number(self._identity.peer_id)
    slowed.clear()
    if plan.round == int(os.environ["SLOWED_ROUND"]) and me is not None:
        slowed.append(float(os.environ["SLOWED_TO"]) * plan.participants[me].upload)
    honest_start(self, plan, contribution)


def reserve(self: RateLimit, size: int) -> float:
    """As if its cap were lower."""
    return honest_reserve(self, round(size * self._bucket._per_second / slowed[0]) if slowed else size)


if __name__ == "__main__":
    ReductionDriver.start = start  # type: ignore[method-assign]
    RateLimit.reserve = reserve  # type: ignore[method-assign]
    main()
