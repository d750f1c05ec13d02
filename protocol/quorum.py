"""Quorums: how many of an electorate decide, by fault model.

    crash   more than half of B(e) less the leaves counted; the vote of C(e-1)'s planner breaks a tie
    lying   more than two thirds of all of B(e): no tie-break, and leaves are not taken off

Two quorums of one round share a member in `crash`, and an honest one in `lying` as long as less than a third lies. One
rule serves prepares, votes, view changes, and the consents in a value. Source: docs/agreement.md, the table of quorums.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Set

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value

# A vote weighs 2, the previous planner's 3: "1 + epsilon" in whole numbers. Exactly half of an even electorate
# then suffices with the planner in it, and no two disjoint sets can both be quorums.
VOTE_WEIGHT = 2
PLANNER_VOTE_WEIGHT = 3


class FaultModel(enum.Enum):
    """What the members of an electorate may do wrong without two values being certified."""

    CRASH = "crash"
    LYING = "lying"


def is_quorum(
    previous: Value,
    supporters: Iterable[PeerId],
    leaves: Collection[PeerId] = (),
    *,
    faults: FaultModel = FaultModel.CRASH,
) -> bool:
    """Whether `supporters` are a quorum of the electorate that `previous` names. The leaves must have been proven."""
    electorate = frozenset(previous.members)
    if faults is FaultModel.LYING:
        return 3 * len(electorate.intersection(supporters)) > 2 * len(electorate)

    def weight(peers: Set[PeerId]) -> int:
        return VOTE_WEIGHT * len(peers) + (PLANNER_VOTE_WEIGHT - VOTE_WEIGHT) * (previous.planner in peers)

    remaining = electorate.difference(leaves)
    return 2 * weight(remaining.intersection(supporters)) > weight(remaining)
