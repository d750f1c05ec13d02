"""Voters of a round, and how many of them decide it: what the manifest says of that, in one place.

    [membership] voters
        contributors   B(e) is the members of C(e-1): whoever reported the state that it certifies votes on the next one
        named          B(e) is the founders, or whom the last rebase names: whole, in every round, present or not
    [agreement] faults
        crash          more than half of B(e) less the leaves counted; the vote of C(e-1)'s planner breaks a tie
        lying          more than two thirds of all of B(e): no tie-break, and leaves are not taken off

Two quorums of one round share a member in `crash`, and an honest one in `lying` as long as less than a third lies. One
rule serves prepares, votes, view changes, and the consents in a value.

Named voters do not leave: a promise would take them out of one round only, and the next would want them again. A member
that does not vote needs none. Source: docs/agreement.md, the table of quorums.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value, domain_hash

# A vote weighs 2, the previous planner's 3: "1 + epsilon" in whole numbers. Exactly half of an even electorate
# then suffices with the planner in it, and no two disjoint sets can both be quorums.
VOTE_WEIGHT = 2
PLANNER_VOTE_WEIGHT = 3

LYING_VOTERS_MIN = 4
"""Of fewer voters none may lie, so that two thirds of them are no better than half."""


class FaultModel(enum.Enum):
    """Faults of voters under which no two values can be certified."""

    CRASH = "crash"
    LYING = "lying"


@dataclass(frozen=True, slots=True)
class Voting:
    """Voting in one round. named: its voters, where they are not the members of the value before it."""

    faults: FaultModel = FaultModel.CRASH
    named: tuple[PeerId, ...] = ()

    def rebased(self, rebase: Value) -> Voting:
        """Voting in the terms after a rebase, whose members are the voters from then on."""
        return replace(self, named=rebase.members) if self.named else self

    def electorate(self, previous: Value) -> tuple[PeerId, ...]:
        """B(e), the voters of the round after `previous`."""
        return self.named or previous.members

    def may_leave(self, previous: Value) -> tuple[PeerId, ...]:
        """Voters of the round after `previous` who may promise to sign nothing in it."""
        return () if self.named else previous.members

    def everyone(self, previous: Value) -> frozenset[PeerId]:
        """Voters of the round after `previous` and members of it: all whom its value may not leave out."""
        return frozenset(self.electorate(previous)).union(previous.members)


CONTRIBUTORS = Voting()
"""Voting where the manifest says nothing of it."""


def is_quorum(
    previous: Value,
    supporters: Iterable[PeerId],
    leaves: Collection[PeerId] = (),
    *,
    voting: Voting = CONTRIBUTORS,
) -> bool:
    """True if `supporters` are a quorum of those who vote after `previous`. The leaves must have been proven."""
    electorate = frozenset(voting.electorate(previous))
    if voting.faults is FaultModel.LYING:
        return are_enough(len(electorate.intersection(supporters)), len(electorate), voting.faults)

    def weight(peers: Set[PeerId]) -> int:
        return VOTE_WEIGHT * len(peers) + (PLANNER_VOTE_WEIGHT - VOTE_WEIGHT) * (previous.planner in peers)

    remaining = electorate.difference(peer for peer in leaves if peer in voting.may_leave(previous))
    return 2 * weight(remaining.intersection(supporters)) > weight(remaining)


def are_enough(count: int, voters: int, faults: FaultModel) -> bool:
    """True if `count` of so many voters are a quorum, whoever they are, with no leave counted."""
    if faults is FaultModel.LYING:
        return 3 * count > 2 * voters
    return 2 * count > voters


def lead_order(previous: Value, *, voting: Voting = CONTRIBUTORS) -> tuple[PeerId, ...]:
    """The voters in the order in which they lead the views of the round after `previous`.

    The order follows from swarm, term and round, in which nobody who may lie has a choice.
    """
    rebases, rollbacks, round = previous.next_term.rebases, previous.next_term.rollbacks, previous.next_round
    position = b"".join(number.to_bytes(8, "little") for number in (rebases, rollbacks, round))
    voters = voting.electorate(previous)
    return tuple(sorted(voters, key=lambda peer: domain_hash("lead", previous.swarm, position, peer.encode())))


def lead(previous: Value, view: int, *, voting: Voting = CONTRIBUTORS) -> PeerId:
    """Lead(e, v): the voter whose turn view `view` is, whether it is alive or not."""
    order = lead_order(previous, voting=voting)
    return order[view % len(order)]
