"""Every promise that is judged in swarms of cells, broken once to see that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.finals import FinalFormat
from shoal.lab.simulate import judge as judge_module
from shoal.lab.simulate import rings as rings_module
from shoal.lab.simulate import watch as watch_module
from shoal.lab.simulate.cells import WORK, Population
from shoal.lab.simulate.judge import LOSS_BORNE_SHARE
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.peer import QUEUES
from shoal.lab.simulate.rings import FOUND_BOUND_S, Rings
from shoal.lab.simulate.rows import Cell, Given, Leaf
from shoal.lab.simulate.scenario import Churn, Scenario
from shoal.protocol import agreement as agreement_module
from shoal.protocol import certificate as certificate_module
from shoal.protocol import round as round_module
from shoal.protocol import terms as terms_module
from shoal.protocol import view_change as view_change_module
from shoal.protocol.round import RoundMachine
from shoal.protocol.voting import lead
from tests.lab.simulate.seeded_bugs import (
    GivesNobodyUp,
    GoesBack,
    LeavesOneOut,
    NeverMoves,
    NeverVotes,
    OneLossIsDeath,
    OneVoteIsEnough,
    ProposesTwice,
    VotesTwice,
    anyone_decides,
    half_decides,
    halved,
)

CALM = Scenario(peers=70, rounds=2, seed=1, loss=0.01)


def population_of(machine: Callable[..., RoundMachine] = RoundMachine, **changes: Any) -> Population:
    """70 peers in four rows; with heads of some kind."""
    return Population(msgspec.structs.replace(CALM, **changes), Components(work=WORK, machine=machine))


def head_that_leads(population: Population) -> Leaf:
    """The head that leads the first view."""
    seat = population.seats.numbers[lead(population.seats.genesis, 0)]
    return population.leaves[population.cells[population.by_seat[seat]].head]


def member(population: Population) -> Leaf:
    """A peer that is no head, nor next in order."""
    return population.leaves[population.cells[2].ring[5]]


# -- the heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "violation"), [(VotesTwice, "no double vote"), (ProposesTwice, "one proposal")], ids=["vote", "value"]
)
def test_seeded_second_word_of_a_head_is_found(machine: type[RoundMachine], violation: str) -> None:
    assert population_of(machine).run().violation == violation


@pytest.mark.parametrize(
    ("machine", "violation"),
    [(RoundMachine, ""), (GoesBack, "views"), (NeverMoves, "no wait too long")],
    ids=["none", "goes back", "never moves"],
)
def test_seeded_heads_that_go_back_or_wait_for_ever_are_found(machine: type[RoundMachine], violation: str) -> None:
    population = population_of(machine)
    population.timeline.at(0.5, population._vanish, head_that_leads(population))
    assert population.run().violation == violation


def test_seeded_heads_that_never_vote_make_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "Agreement", NeverVotes)
    outcome = population_of().run()
    assert (outcome.violation, outcome.rounds_certified) == ("progress", 0)


def test_rounds_that_end_because_most_heads_vanished_at_once_are_no_violation() -> None:
    population = population_of(rounds=5)
    for cell in population.cells[1:]:
        population.timeline.at(3.0, population._vanish, population.leaves[cell.head])
    outcome = population.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 0)
    assert outcome.stalled_rounds == 5


def test_seeded_quorum_of_a_minority_of_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate_module, agreement_module, view_change_module, terms_module):
        monkeypatch.setattr(module, "is_quorum", anyone_decides)
    outcome = population_of().run()
    assert (outcome.violation, outcome.detail) == ("no double vote", "a vote without a prepare certificate")


def test_seeded_certificate_by_a_minority_of_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "Agreement", OneVoteIsEnough)
    assert population_of().run().violation == "no fork"


def test_fork_is_counted_when_both_halves_of_the_heads_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate_module, agreement_module, view_change_module, terms_module, judge_module):
        monkeypatch.setattr(module, "outweighs" if module is judge_module else "is_quorum", half_decides)
    population = population_of()
    population.seats.network.part((0, 1), (2, 3))
    population.seats.network.part((2, 3), (0, 1))
    outcome = population.run()
    assert (outcome.violation, outcome.forks) == ("no fork", 1)


def test_seeded_sum_of_columns_that_leaves_a_row_out_is_found() -> None:
    population = Population(CALM, Components(work=WORK, reduction=LeavesOneOut))
    assert population.run().violation == "nothing left out"


def test_seeded_final_of_another_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalFormat, "sign", halved)
    outcome = population_of().run()
    assert (outcome.violation, outcome.wrong_values) == ("the reference", 1)


def test_queue_of_a_head_beyond_its_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUES, "announcements", (3, QUEUES["announcements"][1]))
    outcome = population_of().run()
    assert outcome.violation == "bounded queues"
    assert "4 announcements" in outcome.detail


def test_seeded_head_that_is_held_for_alive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", GivesNobodyUp)
    population = population_of(rounds=5)
    population.timeline.at(3.0, population._vanish, head_that_leads(population))
    outcome = population.run()
    assert outcome.violation == "no wait too long"
    assert "after its silence" in outcome.detail


def test_seeded_death_of_a_head_that_lives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", OneLossIsDeath)
    outcome = population_of(rounds=9, loss=LOSS_BORNE_SHARE).run()
    assert (outcome.violation, outcome.false_evictions) == ("no false eviction", 1)


# -- the rows ----------------------------------------------------------------------------------------------------


def test_seeded_tokens_of_a_row_that_are_not_its_members_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Population._sum

    def wrong(self: Population, given: Sequence[Given]) -> tuple[F32, int]:
        values, tokens = plain(self, given)
        return values, tokens + 1

    monkeypatch.setattr(Population, "_sum", wrong)
    outcome = population_of().run()
    assert outcome.violation == "the reference"
    assert "row of cell" in outcome.detail


def test_seeded_neighbours_that_give_nobody_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings_module, "MembershipMachine", GivesNobodyUp)
    population = population_of(rounds=5)
    population.timeline.at(3.0, population._vanish, member(population))
    outcome = population.run()
    assert outcome.violation == "no wait too long"
    assert f"holds peer {member(population).number} for alive" in outcome.detail
    assert outcome.virtual_s == pytest.approx(3.0 + FOUND_BOUND_S)


def test_seeded_verdicts_that_are_kept_to_themselves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rings, "_give_up", lambda self, leaf, accused: None)
    population = population_of(rounds=5)
    gone = member(population)
    population.timeline.at(3.0, population._vanish, gone)
    outcome = population.run()
    assert outcome.violation == "no wait too long"
    assert f"the row of peer {gone.number} has it" in outcome.detail


def test_seeded_death_of_one_lost_ping_is_found_where_nobody_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings_module, "MembershipMachine", OneLossIsDeath)
    outcome = population_of().run()
    assert outcome.violation == "no false eviction"
    assert "gives up peer" in outcome.detail


def test_seeded_verdict_about_the_next_on_the_ring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Rings._judge

    def of_the_next(self: Rings, cell: Cell, accuser: int, accused: int) -> None:
        if accused in cell.ring:
            judged(self, cell, accuser, cell.ring[(cell.ring.index(accused) + 1) % len(cell.ring)])

    monkeypatch.setattr(Rings, "_judge", of_the_next)
    population = population_of(rounds=5)
    population.timeline.at(3.0, population._vanish, member(population))
    outcome = population.run()
    assert (outcome.violation, outcome.false_evictions) == ("no false eviction", 1)
    assert f"the row of peer {population.cells[2].ring[6]} is without it" in outcome.detail


def test_where_more_is_lost_false_evictions_are_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings_module, "MembershipMachine", OneLossIsDeath)
    population = population_of(rounds=1, loss=LOSS_BORNE_SHARE + 0.01)
    outcome = population.run()
    assert outcome.violation == ""
    assert population.false_deaths > 0


@pytest.mark.parametrize("seed", [2, 3])
def test_churn_and_loss_that_a_swarm_bears_break_no_promise(seed: int) -> None:
    population = population_of(rounds=4, seed=seed, loss=LOSS_BORNE_SHARE, churn=Churn(share_per_round=0.2))
    outcome = population.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert (outcome.false_evictions, population.false_deaths) == (0, 0)
    assert len(population.evicted_after_s) > 20
