"""No quorum: a member's ways on when the others hold it up, or when nobody makes a contribution.

no quorum for ALONE_S            tell the user once; a node that has contributed already trains on locally all the while
    and links are just returning     tell after DIALLING_S: the others may be dialling, and whom to start is not known
nobody trains for IDLE_S         (all were restarted and lost their contributions, or this is a newcomer and all others
                                 are paused) make one after all, unless a value of this round is prepared: that one is
                                 decided, or none

A value that is not prepared may have the contribution of before, and be decided all the same. Nothing counts twice
then: the one that is made after all has neither that work nor the residual before it, and the certified plan shows that
it is another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.protocol.identity import PeerId
from shoal.protocol.round import Phase, RoundMachine

ALONE_S = 3.0  # without a quorum, until it is said and training goes on alone
DIALLING_S = 10.0  # from the return of a link or of the network, until who is not linked is held for missing
IDLE_S = 3.0  # that nobody trains, until an observer or a joiner contributes
NAMED_LIMIT = 6
"""Missing members that a warning names; of more the number is told."""


def no_quorum(missing: Sequence[PeerId], *, revoked: Collection[PeerId], trains: bool, cut_off: bool) -> str:
    """Warning for the user. revoked: those missing whom the authority shut out. trains: this node does meanwhile.

    cut_off: this machine has no network. Whom nobody revoked is not gone for good after seconds: that there is a way on
    without them, status says of who is silent for long.
    """
    meanwhile = "training on locally" if trains else "waiting, and training nothing until there is one"
    if cut_off:
        return f"no quorum, {meanwhile}: this machine has no network, and the others may be well"
    ways = [f"revoked, and still counted; {forgetting(sorted(revoked))}"] if revoked else []
    missing = [peer for peer in missing if peer not in revoked]
    if missing:
        more = f" and {len(missing) - NAMED_LIMIT} more" if len(missing) > NAMED_LIMIT else ""
        ways.append(f"start these members again: {', '.join(missing[:NAMED_LIMIT])}{more}")
        ways.append("if some are gone for good, `shoal status` says what there is")
    return "; ".join((f"no quorum, {meanwhile}", *ways))


def forgetting(peers: Sequence[str]) -> str:
    """Tell the user how rounds go on without peers, and where: of those who are gone for good, and of the revoked."""
    return f"to go on without: `shoal rebase --forget {' '.join(peers)}` at the node with the authority's key"


def abstaining(round: int) -> str:
    """Warning for the user of a node whose log was damaged."""
    return (
        f"a log was damaged, and promises of round {round} may be lost: this node signs nothing until the others have "
        "certified that round; where they cannot without it, start it once with --forget-promises"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice to a member that is held up; nothing by default."""

    say_no_quorum: bool = False
    train_on: bool = False
    contribute_after_all: bool = False


class NoQuorum:
    """Watches one round after the other. `without_quorum` is for status."""

    def __init__(self) -> None:
        self.without_quorum = False
        self._quorum_lost_at: float | None = None
        self._links_returned_at = -math.inf
        self._said = False
        self._idle_since = 0.0

    def begin_round(self, now: float) -> None:
        """Begin another round; that alone does not bring a quorum back."""
        self._idle_since = now

    def links_return(self, now: float) -> None:
        """Take note that a link came up, or that this machine has no network until now."""
        self._links_returned_at = now

    def advise(
        self,
        machine: RoundMachine,
        now: float,
        *,
        contributed: bool,
        may_train: bool,
        resting: bool,
        cut_off: bool = False,
    ) -> Advice:
        """Look at the round, and advise on what to do now.

        contributed: this node's contribution is made. may_train: neither paused nor going. resting: its trainer has
        done what it was told. cut_off: this machine has no network, which is known at once.
        """
        alone = self.without_quorum = self._alone(machine, now)
        say = alone and not self._said and (cut_off or self._dialled_by <= now)
        self._said = alone and (self._said or say)
        train_on = alone and contributed and may_train and resting
        waiting = machine.phase is Phase.PLAN and not contributed and may_train
        agreement = machine.agreement
        if not waiting or agreement.abstains or agreement.is_prepared or not machine.nobody_trains():
            self._idle_since = now
        contribute = now - self._idle_since >= IDLE_S
        if contribute:
            self._idle_since = now
        return Advice(say_no_quorum=say, train_on=train_on, contribute_after_all=contribute)

    @property
    def _dialled_by(self) -> float:
        """When all who are there would be linked again; links that go on coming put it off no further."""
        lost_at = math.inf if self._quorum_lost_at is None else self._quorum_lost_at
        return min(self._links_returned_at, lost_at) + DIALLING_S

    def _alone(self, machine: RoundMachine, now: float) -> bool:
        if machine.has_quorum():
            self._quorum_lost_at = None
            return False
        if self._quorum_lost_at is None:
            self._quorum_lost_at = now
        return now - self._quorum_lost_at >= ALONE_S
