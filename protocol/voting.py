"""Voters of a round, and how many of them decide it: what the manifest says of that, in one place.

    [membership] voters
        contributors   B(e) is the members of C(e-1): whoever reported the state that it certifies votes on the next one
        named          B(e) is whole in every round, present or not: the founders, or whom the last rebase names, with
                       what values before round e changed
    [agreement] faults
        crash          more than half of B(e) less the leaves counted; the vote of C(e-1)'s planner breaks a tie
        lying          more than two thirds of all of B(e): no tie-break, and leaves are not taken off

Two quorums of one round share a member in `crash`, and an honest one in `lying` as long as less than a third lies. One
rule serves prepares, votes, view changes, and the consents in a value.

A value of round e changes named voters by an amendment, or by a ban, which takes the vote of the banned. They are
others from round e + 1 on; round e itself is decided by those before. One value is certified in round e, so every
member begins round e + 1 with the same voters, and no round has two sets of them. Enough remain: no amendment leaves
fewer than `least`, and where bans would, the last of the banned keep their votes. No rollback brings earlier voters
back.

Named voters do not leave: a promise would take them out of one round only, and the next would want them again. A member
that does not vote needs none. Source: docs/agreement.md, the table of quorums.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace

import msgspec

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Amendment, Value, domain_hash

# A vote weighs 2, the previous planner's 3: "1 + epsilon" in whole numbers. Exactly half of an even electorate
# then suffices with the planner in it, and no two disjoint sets can both be quorums.
VOTE_WEIGHT = 2
PLANNER_VOTE_WEIGHT = 3

LYING_VOTERS_MIN = 4
"""Of fewer voters none may lie, so that two thirds of them are no better than half."""


VOTERS = "voters"
"""Section of an amendment whose keys are PeerIds: true for who votes from then on, false for who no longer does."""


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

    @property
    def least(self) -> int:
        """Named voters that have to remain."""
        return LYING_VOTERS_MIN if self.faults is FaultModel.LYING else 1

    def changed(self, changes: Mapping[PeerId, bool]) -> Voting:
        """Voting with these voters more, where true, or fewer. Raises ValueError, saying why, where that cannot be."""
        if not self.named:
            raise ValueError("whoever contributes votes in this swarm, so there are no named voters to change")
        named = set(self.named).difference(changes).union(peer for peer, votes in changes.items() if votes)
        if not self.least <= len(named) <= MEMBER_LIMIT:
            raise ValueError(f"that makes {len(named)} voters; there must be from {self.least} to {MEMBER_LIMIT}")
        return replace(self, named=tuple(sorted(named)))

    def after(self, value: Value) -> Voting:
        """Voting in the round after `value`, a result or a rollback that this voting decided."""
        if not self.named:
            return self
        changes = voter_changes(value.amended.amendment) if value.amended else {}
        voting = self.changed(changes) if changes else self
        bans = () if isinstance(value.bans, msgspec.UnsetType) else value.bans
        banned = [ban.peer for ban in bans if ban.peer in voting.named]
        taken = banned[: max(0, len(voting.named) - voting.least)]
        return voting.changed(dict.fromkeys(taken, False)) if taken else voting

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


def voter_changes(amendment: Amendment) -> dict[PeerId, bool]:
    """Peers of which an amendment says whether they vote."""
    named = ((change.key.partition("."), change.value) for change in amendment.changes)
    return {PeerId(peer): bool(value) for (section, _, peer), value in named if section == VOTERS}


def holds_state(value: Value, *, voting: Voting) -> bool:
    """Check that a value which changes the voters leaves some who can go on: see `Voting.after`.

    Who gets a vote is a member after it, and so are a quorum of those who vote next: they hold the state. Other values
    need none of that.
    """
    if not value.amended or not voter_changes(value.amended.amendment):
        return True
    after = voting.after(value)
    added = set(after.named).difference(voting.named)
    return added.issubset(value.members) and is_quorum(value, value.members, voting=after)


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


def common_view(
    previous: Value,
    view: int,
    promised: Mapping[PeerId, int],
    living: Collection[PeerId],
    leaves: Collection[PeerId],
    *,
    voting: Voting = CONTRIBUTORS,
    planned: bool = True,
) -> int:
    """The lowest view from `view` on in which the round after `previous` can be decided; `view` if there is none.

    promised: below which view a member votes no more, 0 if it is not in there. planned: this member follows a plan, and
    it does not matter that half of the living, or more, are in no such view.
    """
    ahead = sorted({later for later in promised.values() if later > view})
    here = set(living).intersection(voting.electorate(previous)).difference(leaves)
    for candidate in (view, *ahead) if ahead else ():
        voters = {peer for peer in here if promised.get(peer, 0) <= candidate}
        if (planned or 2 * len(voters) > len(here)) and is_quorum(previous, voters, leaves, voting=voting):
            return candidate
    return view
