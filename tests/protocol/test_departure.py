"""Departure: when a node may go, promise first, or wait, and what it says then; and who has the last certificate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

import pytest

from shoal.protocol.agreement import Standing
from shoal.protocol.certificate import LeaveCost
from shoal.protocol.departure import LEAVE_TIMEOUT_S, TOGETHER_S, Departure, LeaveStep
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.round import Phase, RoundMachine

ANN, BOB = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(2))


@dataclass
class Membership:
    votes: bool = True
    standing: Standing = Standing.OPEN


@dataclass
class Head:
    state_round: int = 7


@dataclass
class Round:
    """The part of a round machine that a departure looks at."""

    phase: Phase
    going: LeaveCost = LeaveCost.PROMISE
    alone: bool = False
    sole_voter: bool = False
    others_vote: bool = False
    agreement: Membership = field(default_factory=Membership)
    previous: Head = field(default_factory=Head)

    def leave_cost(self, leaving: Collection[PeerId]) -> LeaveCost:
        return LeaveCost.NEEDED if BOB in leaving else self.going

    def votes_alone(self) -> bool:
        return not self.others_vote

    def holds_alone(self) -> bool:
        return self.alone

    def hands_over(self) -> bool:
        return self.sole_voter


def advise(departure: Departure, round: Round, now: float) -> LeaveStep:
    return departure.advise(cast(RoundMachine, round), now)


def asked_at(now: float) -> Departure:
    departure = Departure(rounds=None)
    departure.ask(now)
    return departure


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_promises_before_the_reduction_and_waits_out_what_began(phase: Phase) -> None:
    expected = LeaveStep.PROMISE if phase in (Phase.TRAIN, Phase.PLAN) else LeaveStep.STAY
    assert advise(asked_at(1.0), Round(phase), 1.0) is expected
    assert advise(Departure(rounds=None), Round(phase), 1.0) is LeaveStep.STAY


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_goes_at_once_where_nobody_counts_on_it_unless_a_vote_is_under_way(phase: Phase) -> None:
    expected = LeaveStep.STAY if phase is Phase.CERTIFY else LeaveStep.GO
    assert advise(asked_at(1.0), Round(phase, going=LeaveCost.FREE), 1.0) is expected
    assert advise(asked_at(1.0), Round(phase, agreement=Membership(votes=False)), 1.0) is expected


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_waits_for_nothing_longer_than_its_patience_from_the_first_time_it_was_asked(phase: Phase) -> None:
    departure = asked_at(1.0)
    departure.ask(1.0 + LEAVE_TIMEOUT_S / 2)
    assert advise(departure, Round(phase), 0.9 + LEAVE_TIMEOUT_S) is not LeaveStep.GO
    assert advise(departure, Round(phase), 1.0 + LEAVE_TIMEOUT_S) is LeaveStep.GO
    departure.left = True
    assert advise(departure, Round(phase), 1.0 + LEAVE_TIMEOUT_S) is LeaveStep.STAY


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_that_promised_goes_when_it_is_counted_out_or_its_patience_is_over(phase: Phase) -> None:
    promised = Round(phase, going=LeaveCost.FREE, agreement=Membership(standing=Standing.LEFT))
    assert advise(asked_at(1.0), promised, 1.0 + TOGETHER_S) is LeaveStep.STAY
    assert advise(asked_at(1.0), promised, 0.9 + LEAVE_TIMEOUT_S) is LeaveStep.STAY
    assert advise(asked_at(1.0), promised, 1.0 + LEAVE_TIMEOUT_S) is LeaveStep.GO
    counted_out = Round(Phase.TRAIN, agreement=Membership(votes=False))
    assert advise(asked_at(1.0), counted_out, 1.0 + TOGETHER_S) is LeaveStep.GO


class Leaving:
    """A departure that was asked for at 0, and what it told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.departure = Departure(rounds=None, tell=self.told.append)
        self.departure.ask(0.0)

    def advise(self, round: Round, now: float) -> LeaveStep:
        return advise(self.departure, round, now)


@pytest.mark.parametrize("going", [LeaveCost.FREE, LeaveCost.PROMISE])
@pytest.mark.parametrize("phase", list(Phase))
def test_departure_waits_with_the_only_copy_until_another_has_it(phase: Phase, going: LeaveCost) -> None:
    leaving, round = Leaving(), Round(phase, going=going, alone=True)
    member = Round(phase, going=going, alone=True, agreement=Membership(votes=False))
    expected = LeaveStep.REST if phase is Phase.TRAIN else LeaveStep.STAY
    for one in (round, member):
        assert leaving.advise(one, 1.0) is expected
        assert leaving.departure.needed
        assert not leaving.departure.may_train(cast(RoundMachine, one))
    round.alone = False
    assert leaving.advise(round, 2.0) is advise(asked_at(2.0), Round(phase, going=going), 2.0)
    assert not leaving.departure.needed
    (told,) = leaving.told
    assert "from round 7" in told
    assert "20 s at most" in told


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_with_the_only_copy_goes_when_its_patience_is_over_and_says_what_to_do(phase: Phase) -> None:
    leaving, round = Leaving(), Round(phase, alone=True)
    assert leaving.advise(round, LEAVE_TIMEOUT_S - 0.1) is not LeaveStep.GO
    assert leaving.advise(round, LEAVE_TIMEOUT_S) is LeaveStep.GO
    assert not leaving.departure.needed
    _, told = leaving.told
    assert "\n" not in told
    for said in ("only copy of the state of round 7", "start this node again", "shoal rebase --forget"):
        assert said in told


@pytest.mark.parametrize("going", [LeaveCost.FREE, LeaveCost.PROMISE])
@pytest.mark.parametrize("phase", list(Phase))
def test_departure_hears_first_who_leaves_in_the_same_moment(phase: Phase, going: LeaveCost) -> None:
    departure, round = asked_at(1.0), Round(phase, going=going, others_vote=True)
    assert advise(departure, round, 0.9 + TOGETHER_S) is LeaveStep.STAY
    assert advise(departure, round, 1.0 + TOGETHER_S) is advise(asked_at(1.0), Round(phase, going=going), 1.0)
    round.agreement.votes = False  # nobody counts on it
    assert advise(asked_at(1.0), round, 1.0) is advise(asked_at(1.0), Round(phase, going=LeaveCost.FREE), 1.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_without_which_those_who_stay_are_no_quorum_votes_on_for_as_long_as_its_patience(
    phase: Phase,
) -> None:
    leaving, round = Leaving(), Round(phase, going=LeaveCost.FREE, others_vote=True)
    machine = cast(RoundMachine, round)
    assert leaving.departure.advise(machine, 0.0, leaving=[BOB]) is LeaveStep.STAY
    assert leaving.told == []  # it may be that all leave
    expected = LeaveStep.REST if phase is Phase.TRAIN else LeaveStep.STAY
    assert leaving.departure.advise(machine, TOGETHER_S, leaving=[BOB]) is expected
    assert not leaving.departure.needed  # its record says that it leaves
    assert "staying until they can" in leaving.told[-1]
    assert leaving.departure.advise(machine, LEAVE_TIMEOUT_S, leaving=[BOB]) is LeaveStep.GO
    assert "cannot certify another without this node" in leaving.told[-1]


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_of_the_only_voter_trains_on_until_others_are_members(phase: Phase) -> None:
    leaving, round = Leaving(), Round(phase, going=LeaveCost.FREE, sole_voter=True)
    assert leaving.advise(round, 1.0) is LeaveStep.STAY
    assert leaving.departure.needed
    assert leaving.departure.may_train(cast(RoundMachine, round))
    assert leaving.advise(round, LEAVE_TIMEOUT_S) is LeaveStep.GO
    assert "cannot certify another without this node" in leaving.told[-1]
    assert "start it again" in leaving.told[-1]


def test_departure_whose_rounds_are_done_makes_no_other_for_the_sake_of_voters() -> None:
    departure, round = asked_at(1.0), Round(Phase.PLAN, going=LeaveCost.FREE, sole_voter=True)
    departure.finished = True
    assert advise(departure, round, 1.0) is LeaveStep.GO
    assert not departure.may_train(cast(RoundMachine, round))
    round.alone = True
    assert advise(departure, round, 1.0) is LeaveStep.STAY


def test_departure_that_was_not_asked_for_waits_for_nobody() -> None:
    departure, round = Departure(rounds=None), Round(Phase.TRAIN, alone=True)
    assert advise(departure, round, 1.0) is LeaveStep.STAY
    assert not departure.needed
    assert departure.may_train(cast(RoundMachine, round))


def test_departure_knows_when_its_rounds_are_done_and_who_has_the_certificate_of_the_newest() -> None:
    assert [Departure(rounds=3).rounds_done(certified) for certified in (2, 3, 4)] == [False, True, True]
    departure = Departure(rounds=None)
    assert not departure.rounds_done(1 << 40)
    departure.has_certificate(ANN)
    assert departure.known_to(frozenset())
    assert departure.known_to({ANN})
    assert not departure.known_to({ANN, BOB})
    departure.begin_round()
    assert not departure.known_to({ANN})
