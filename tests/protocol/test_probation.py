"""Who lost a dispute is left out of some rounds where others lead, and never where it is needed."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.certificate import genesis
from shoal.protocol.messages import Term, Value
from shoal.protocol.probation import FIRST_REST_TURNS, REST_LIMIT_TURNS, Probation
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_lab import RoundLab

pytestmark = pytest.mark.usefixtures("paper_signatures")

ROUNDS_LIMIT_S = 60.0
START = genesis(SWARM, [identity.peer_id for identity in paper_identities(3)])


def before(round: int, rollbacks: int = 0) -> Value:
    """The value that a round of three members comes after."""
    return msgspec.structs.replace(START, term=Term(0, rollbacks), round=round - 1)


def rest_after(probation: Probation, round: int, *, turn_rounds: int = 1) -> int:
    """How many of the rounds after `round` are without the loser of a dispute in it."""
    (loser,) = (identity.peer_id for identity in paper_identities(1))
    probation.lost({loser}, before(round), turn_rounds=turn_rounds)
    after = range(round + 1, round + 3 * REST_LIMIT_TURNS)
    rounds = [number for number in after if probation.left_out(before(number)) == {loser}]
    assert rounds == list(after[: len(rounds)]), "they follow on each other"
    return len(rounds)


def test_rest_is_twice_as_long_each_time_up_to_a_limit() -> None:
    probation, round, rests = Probation(), 1, []
    for _ in range(8):
        rests.append(rest_after(probation, round))
        round += rests[-1] + 1  # as soon as it is planned again
    assert rests[:4] == [FIRST_REST_TURNS, 2 * FIRST_REST_TURNS, 4 * FIRST_REST_TURNS, 8 * FIRST_REST_TURNS]
    assert rests[-2:] == [REST_LIMIT_TURNS] * 2


@pytest.mark.parametrize(("later", "rest"), [(2 * FIRST_REST_TURNS, 2), (2 * FIRST_REST_TURNS + 1, 1)])
def test_rest_begins_anew_once_as_many_rounds_were_good(later: int, rest: int) -> None:
    probation = Probation()
    rest_after(probation, 5)
    assert rest_after(probation, 5 + later) == rest * FIRST_REST_TURNS


def test_two_plans_of_one_round_count_once() -> None:
    probation = Probation()
    rest_after(probation, 5)
    assert rest_after(probation, 5) == FIRST_REST_TURNS


def test_who_led_leaves_it_out_for_as_many_rounds_as_there_are_voters() -> None:
    probation = Probation()
    assert rest_after(probation, 1, turn_rounds=3) == 3 * FIRST_REST_TURNS
    assert rest_after(probation, 1 + 6 * FIRST_REST_TURNS) == 6 * FIRST_REST_TURNS, "also if another led then"


def test_another_term_begins_with_nobody_left_out() -> None:
    probation = Probation()
    rest_after(probation, 5)
    assert not probation.left_out(before(6, rollbacks=1))
    assert not probation.left_out(before(6))


# -- what leads make of it -----------------------------------------------------------------------------------


def lab_without(count: int, *numbers: int) -> RoundLab:
    """In which these lost a dispute, as everybody saw, in the round before the first."""
    lab = RoundLab(count, seed=count)
    losers = {lab.nodes[number].peer for number in numbers}
    for node in lab.nodes:
        node.member._probation.lost(losers, lab.start, turn_rounds=1)
    return lab


def test_leads_plan_without_who_is_on_probation_and_then_with_it() -> None:
    lab = lab_without(4, 3)
    last = 1 + FIRST_REST_TURNS
    lab.run_until(lab.height_of_all(last + 2), ROUNDS_LIMIT_S)
    led = [lab.number(lab.plans[lab.value(round).plan].planner) for round in range(1, last + 1)]
    for round, leader in enumerate(led, start=1):
        assert (3 in lab.contributors(round)) == (leader == 3), "it leaves itself out of nothing"
        assert lab.contributors(round) >= {0, 1, 2}
    assert set(led) != {3}
    assert lab.contributors(last + 2) == {0, 1, 2, 3}


def test_nobody_is_left_out_where_the_rest_are_no_quorum() -> None:
    lab = lab_without(5, 1, 2, 3, 4)
    lab.run_until(lab.height_of_all(2), ROUNDS_LIMIT_S)
    assert lab.contributors(1) == lab.contributors(2) == {0, 1, 2, 3, 4}


def test_only_one_who_trains_is_not_left_out() -> None:
    lab = lab_without(4, 3)
    for number in range(3):
        lab.pause(number)
    lab.run_until(lab.height_of_all(2), ROUNDS_LIMIT_S)
    assert lab.contributors(1) == lab.contributors(2) == {3}


def test_slow_one_on_probation_is_not_waited_for() -> None:
    lab = lab_without(4, 3)
    lab.nodes[3].train_s, lab.nodes[3].trained_at = 2.5, 2.5
    lab.run_until(lab.height_of((0, 1, 2), 1), ROUNDS_LIMIT_S)
    assert lab.number(lab.plans[lab.value(1).plan].planner) != 3
    assert lab.decided_at[1] < 2.5
