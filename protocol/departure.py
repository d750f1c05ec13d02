"""Leaving the swarm: because the user asks, or because the rounds this node was to take part in are done.

    rounds done       first see, for LINGER_S at most, that those who are linked have the last certificate too
    asked to leave    hear for TOGETHER_S who leaves too; go where those who stay can go on; where they can once this
                      leave is counted, promise to sign nothing more, and go once a certificate counts it

What is waited for, for LEAVE_TIMEOUT_S at most:

    a vote under way                     the others may need it
    another to have the state            where others live and none of them has it: it would be lost to them. Until one
                                         has it, this node serves it and trains no more, so that it is the newest
    a round without those who left       where those who stay are no quorum, nor would be if this leave were counted:
                                         in the round after the one that they certify together, fewer count
    a promise to be counted              by who has heard of it: others, who were down, hear it from nobody else
    others to be members                 where this node alone can certify and others have its state: the round that
                                         it certifies makes them members, who go on without it
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from enum import Enum, auto

from shoal.protocol.agreement import Standing
from shoal.protocol.certificate import LeaveCost
from shoal.protocol.identity import PeerId
from shoal.protocol.round import Phase, RoundMachine

LINGER_S = 5.0  # after the last round, for the others to certify it too
TOGETHER_S = 1.0
"""From being asked to leave, for those who leave in the same moment to be heard."""
LEAVE_TIMEOUT_S = 20.0  # until a node goes without being counted out, or with the only copy of a state


class LeaveStep(Enum):
    """Next step of a node that may be about to leave."""

    STAY = auto()
    REST = auto()
    """Stay, and make no contribution."""
    PROMISE = auto()
    GO = auto()


class Departure:
    """A node's departure, and when it is allowed. `left` is set once it has gone, `finished` once its rounds are done.

    tell: is called with what the user is to know, in a line.
    """

    def __init__(self, *, rounds: int | None, tell: Callable[[str], None] = lambda _: None) -> None:
        self._rounds = rounds
        self._tell = tell
        self._asked_at: float | None = None
        self._have_certificate: set[PeerId] = set()
        self._told = False
        self.needed = False
        """True if this node is to leave, and stays for the sake of others who want the state that it has."""
        self.finished = False
        self.left = False

    @property
    def asked(self) -> bool:
        """True if this node is to leave."""
        return self._asked_at is not None

    def ask(self, now: float) -> None:
        """Leave as soon as the round allows; the time limit counts from the first call."""
        if self._asked_at is None:
            self._asked_at = now

    def overdue(self, now: float) -> bool:
        """True if this node was asked to leave so long ago that it waits for nothing more."""
        return self._asked_at is not None and now - self._asked_at >= LEAVE_TIMEOUT_S

    def begin_round(self) -> None:
        """Begin another round, whose certificate nobody has."""
        self._have_certificate.clear()

    def has_certificate(self, peer: PeerId) -> None:
        """Note that this peer sent the certificate of the newest round, or something of a later one."""
        self._have_certificate.add(peer)

    def known_to(self, peers: AbstractSet[PeerId]) -> bool:
        """True if all of these peers have the certificate of the newest round."""
        return self._have_certificate >= peers

    def rounds_done(self, certified: int) -> bool:
        """True if `certified` rounds are all that this node was to take part in."""
        return self._rounds is not None and certified >= self._rounds

    def may_train(self, machine: RoundMachine) -> bool:
        """True if this node may contribute where nobody else does; who is to leave only does to hand over."""
        return not self.asked or self._hands_over(machine)

    def advise(self, machine: RoundMachine, now: float, *, leaving: Collection[PeerId] = ()) -> LeaveStep:
        """Look at the round, and at the time since leaving was asked for; tell the user what is out of the ordinary.

        leaving: peers that are about to leave too, as far as is known.
        """
        if self._asked_at is None or self.left:
            return LeaveStep.STAY
        overdue, alone = self.overdue(now), machine.holds_alone()
        if machine.agreement.standing is Standing.LEFT:
            return LeaveStep.GO if overdue else LeaveStep.STAY
        cost = machine.leave_cost(leaving) if machine.agreement.votes else LeaveCost.FREE
        hearing = now < self._asked_at + TOGETHER_S and not machine.votes_alone()
        hands_over, votes_on = self._hands_over(machine), cost is LeaveCost.NEEDED and not hearing
        self.needed = not overdue and (alone or hands_over)
        if self.needed or (votes_on and not overdue):
            self._tell_of_waiting(machine)
            return LeaveStep.REST if (alone or votes_on) and machine.phase is Phase.TRAIN else LeaveStep.STAY
        if overdue:
            if alone:
                self._tell(only_copy_goes(machine.previous.state_round))
            elif hands_over or votes_on:
                self._tell(last_voter_goes(machine.previous.state_round))
            return LeaveStep.GO
        if hearing and machine.agreement.votes:
            return LeaveStep.STAY
        if cost is LeaveCost.PROMISE:
            return LeaveStep.PROMISE if machine.phase in (Phase.TRAIN, Phase.PLAN) else LeaveStep.STAY
        return LeaveStep.STAY if machine.phase is Phase.CERTIFY else LeaveStep.GO

    def _hands_over(self, machine: RoundMachine) -> bool:
        return not self.finished and machine.hands_over()

    def _tell_of_waiting(self, machine: RoundMachine) -> None:
        if not self._told:
            self._told = True
            self._tell(waits_for_others(machine.previous.state_round))


def waits_for_others(round: int) -> str:
    """Notice for the user of a node that is to leave and stays a while."""
    return (
        f"the others cannot go on from round {round} without this node yet: staying until they can, "
        f"{LEAVE_TIMEOUT_S:g} s at most"
    )


def only_copy_goes(round: int) -> str:
    """Warning for the user of a node that leaves with the only copy of a state."""
    return (
        f"leaving with the only copy of the state of round {round}, which nobody fetched within "
        f"{LEAVE_TIMEOUT_S:g} s; it is on disk: start this node again on its data folder, or the others stand still "
        "until `shoal rebase --forget` has them go on from an earlier round"
    )


def last_voter_goes(round: int) -> str:
    """Warning for the user of a node that leaves although nobody can certify a round without it."""
    return (
        f"leaving although the others, who have the state of round {round}, cannot certify another without this "
        "node: start it again on its data folder, or let `shoal rebase --forget` have them go on without it"
    )
