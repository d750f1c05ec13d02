"""Departure: when a node may go, promise first, or wait; and who has the last certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from shoal.node.rounds.departure import LEAVE_PATIENCE_S, Departure, Parting
from shoal.protocol.identity import Identity
from shoal.protocol.round import Phase, RoundMachine

ANN, BOB = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(2))


@dataclass
class Membership:
    member: bool = True


@dataclass
class Round:
    """The part of a round machine that a departure looks at."""

    phase: Phase
    promise: bool = True
    agreement: Membership = field(default_factory=Membership)

    def leave_needs_promise(self) -> bool:
        return self.promise


def advise(departure: Departure, round: Round, now: float) -> Parting:
    return departure.advise(cast(RoundMachine, round), now)


def asked_at(now: float) -> Departure:
    departure = Departure(rounds=None)
    departure.ask(now)
    return departure


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_promises_before_the_reduction_and_waits_out_what_began(phase: Phase) -> None:
    expected = Parting.PROMISE if phase in (Phase.TRAIN, Phase.PLAN) else Parting.STAY
    assert advise(asked_at(1.0), Round(phase), 1.0) is expected
    assert advise(Departure(rounds=None), Round(phase), 1.0) is Parting.STAY


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_goes_at_once_where_nobody_counts_on_it_unless_a_vote_is_under_way(phase: Phase) -> None:
    expected = Parting.STAY if phase is Phase.CERTIFY else Parting.GO
    assert advise(asked_at(1.0), Round(phase, promise=False), 1.0) is expected
    assert advise(asked_at(1.0), Round(phase, agreement=Membership(member=False)), 1.0) is expected


@pytest.mark.parametrize("phase", list(Phase))
def test_departure_waits_for_nothing_longer_than_its_patience_from_the_first_time_it_was_asked(phase: Phase) -> None:
    departure = asked_at(1.0)
    departure.ask(1.0 + LEAVE_PATIENCE_S / 2)
    assert advise(departure, Round(phase), 0.9 + LEAVE_PATIENCE_S) is not Parting.GO
    assert advise(departure, Round(phase), 1.0 + LEAVE_PATIENCE_S) is Parting.GO
    departure.left.set()
    assert advise(departure, Round(phase), 1.0 + LEAVE_PATIENCE_S) is Parting.STAY


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
