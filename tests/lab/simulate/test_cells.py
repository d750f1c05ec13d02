"""Simulated swarms beyond the limit of one plan: cells, verdicts of neighbours, heads that are replaced, exact rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.stalls import STALL_S
from shoal.lab.rows.row_effects import RowEffect, SumRow, Tell
from shoal.lab.rows.row_messages import RowLoss
from shoal.lab.rows.row_round import RowPhase, RowRound
from shoal.lab.simulate.cells import Population
from shoal.lab.simulate.outcome import Components, Workload
from shoal.lab.simulate.peer import SimulatedPeer
from shoal.lab.simulate.rings import REACH
from shoal.lab.simulate.rows import Given, row_work
from shoal.lab.simulate.scenario import Churn, Scenario

CALM = Scenario(peers=70, rounds=2, seed=1)


def who_decided(population: Population) -> SimulatedPeer:
    """The head that has the last certificate: the simulation ends with the first that does."""
    return max(population.seats.peers, key=lambda peer: peer.disk.height)


def test_cells_certify_rounds_in_which_every_peer_counts() -> None:
    population = Population(CALM)
    outcome = population.run()
    assert (outcome.violation, outcome.rounds_certified, outcome.wrong_values) == ("", 2, 0)
    assert (outcome.false_evictions, outcome.deaths_found) == (0, 0)
    assert all(len(leaf.near) == 2 * REACH for leaf in population.leaves)
    tokens = sum(50 + number % 101 for number in range(70))
    certified = population.seats.peers[0].disk.chain
    assert certified[1].tokens == tokens
    assert len(certified[1].members) == len(population.cells) == 4


def test_mean_of_rows_is_the_mean_of_all() -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=1))
    population.run()
    made = [population.made(number, 1) for number in range(70)]
    mean = sum(weight * values.astype(np.float64) for values, weight in made) / sum(weight for _, weight in made)
    state = who_decided(population).disk.state
    scale = float(np.abs(mean).max())
    assert float(np.abs(state + mean).max()) < 0.03 * scale  # int8: two encodings of a mean


def test_death_of_a_head_and_of_a_member_is_found_by_neighbours_and_rounds_go_on() -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=3))
    head = population.leaves[population.cells[1].head]
    member = population.leaves[population.cells[2].ring[3]]
    population.timeline.at(3.0, population._vanish, head)
    population.timeline.at(4.0, population._vanish, member)
    outcome = population.run()
    assert (outcome.violation, outcome.rounds_certified, outcome.false_evictions) == ("", 3, 0)
    assert len(population.evicted_after_s) == 2
    assert max(population.evicted_after_s) < 15.0
    assert population.cells[1].head != head.number
    assert member.number not in population.cells[2].ring
    successor = population.seats.peers[-1].id
    assert successor in population.seats.judge.values[population.seats.peers[0].disk.chain[-1].hash].members


def test_seed_gives_the_same_trace_under_churn() -> None:
    scenario = msgspec.structs.replace(CALM, rounds=1, churn=Churn(share_per_round=0.05))
    one, other = Population(scenario).run(), Population(scenario).run()
    assert one.violation == ""
    assert (one.trace_digest, one.events) == (other.trace_digest, other.events)
    assert Population(msgspec.structs.replace(scenario, seed=2)).run().trace_digest != one.trace_digest


def test_seeded_row_that_is_not_the_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Population._sum

    def wrong(self: Population, given: Sequence[Given]) -> tuple[F32, int]:
        return plain(self, given[1:])[0], plain(self, given)[1]

    monkeypatch.setattr(Population, "_sum", wrong)
    assert Population(msgspec.structs.replace(CALM, rounds=1)).run().violation == "the reference"


# -- who takes over ----------------------------------------------------------------------------------------------

LARGE = Components(work=Workload(train_s=(4.0, 8.0), model_bytes=60e6, reduce_deadline_s=300.0))
"""Of which a row's sum takes longer than its neighbours need to give a member up."""


def test_member_lost_while_its_row_is_summed_counts_no_more_and_others_take_over() -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=1), LARGE)
    cell = population.cells[2]
    lost = population.leaves[cell.ring[3]]
    summed_at: list[float] = []
    due: list[float] = []

    def look() -> None:
        if cell.sum is not None and cell.sum.due_at is not None and lost.up:
            due.append(cell.sum.due_at)
            population._vanish(lost)
        if cell.row is not None and not summed_at:
            summed_at.append(population.timeline.now)
        population.timeline.after(0.05, look)

    population.timeline.after(0.0, look)
    outcome = population.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 1)
    assert summed_at[0] > due[0] > lost.silent_since
    assert cell.sum is not None
    assert lost.number in cell.sum.summers
    assert lost.number not in cell.sum.left
    assert cell.sum.attempt == 1
    assert lost.number not in cell.counted
    tokens = sum(50 + number % 101 for number in range(70) if number != lost.number)
    assert who_decided(population).disk.chain[1].tokens == tokens


@pytest.mark.parametrize("dies", ["before the plan", "in the sum"])
def test_row_goes_on_without_a_dead_member_as_soon_as_it_stalls_and_the_others_do_not_wait(dies: str) -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=1), LARGE)
    cell = population.cells[2]
    lost = population.leaves[cell.ring[3]]
    for peer in population.seats.peers:
        population.seats.start(peer)

    def moves() -> bool:
        return cell.sum is not None and cell.sum.due_at is not None

    before = dies == "before the plan"
    population.timeline.run(60.0, lambda: population.rounds[lost.number].phase is RowPhase.READY if before else moves())
    population._vanish(lost)
    population.timeline.run(60.0, moves)
    assert cell.sum is not None
    assert cell.sum.due_at is not None
    sum, due_at, began_at = cell.sum, cell.sum.due_at, population.timeline.now
    assert sum.attempt == 0
    assert began_at < sum.began_at + 1.0
    population.timeline.run(60.0, lambda: sum.attempt == 1)
    stalls_at = max(sum.began_at, lost.silent_since) + STALL_S
    assert stalls_at <= population.timeline.now < stalls_at + 0.01
    population.timeline.run(200.0, lambda: cell.row is not None)
    assert lost.number not in cell.counted
    assert population.timeline.now < due_at + 0.2 * (due_at - began_at)


def test_everybody_hears_the_beginning_and_the_plan_of_its_row_whatever_is_lost_on_the_way() -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=1, loss=0.2))
    for peer in population.seats.peers:
        population.seats.start(peer)
    population.timeline.run(60.0, lambda: all(machine.sum.plan is not None for machine in population.rounds))
    assert population.timeline.now < 40.0
    population.timeline.run(60.0, lambda: all(cell.row is not None for cell in population.cells))
    assert all(len(cell.counted) > 0.8 * len(cell.ring) for cell in population.cells)


def test_newcomer_counts_from_its_second_round_on_its_list() -> None:
    population = Population(msgspec.structs.replace(CALM, rounds=3))
    population.timeline.at(3.0, population._join)
    counted: dict[int, bool] = {}

    def look() -> None:
        for cell in population.cells:
            if 70 in cell.ring and cell.row is not None:
                counted[cell.round] = 70 in cell.counted
        population.timeline.after(0.5, look)

    population.timeline.after(0.0, look)
    assert population.run().violation == ""
    assert counted == {1: False, 2: False, 3: True}


def test_seeded_members_that_follow_two_plans_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RowRound._sum

    def another(self: RowRound, now: float) -> list[RowEffect]:
        effects = plain(self, now)
        return [replace(e, gone=(0,)) if isinstance(e, SumRow) and not self.heads else e for e in effects]

    monkeypatch.setattr(RowRound, "_sum", another)
    assert Population(msgspec.structs.replace(CALM, rounds=1)).run().violation == "one plan of a row"


def test_seeded_member_that_says_what_only_a_head_may_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RowRound.trained

    def usurps(self: RowRound, tokens: int, root: bytes, now: float) -> list[RowEffect]:
        loss = RowLoss(term=self.term, round=self.round, base=self._base, turn=self.turn, attempt=1, gone=(0,))
        others = [peer for peer in self.list.row[:3] if peer != self.me]
        return [*plain(self, tokens, root, now), *(Tell(peer, loss, self.me) for peer in others)]

    monkeypatch.setattr(RowRound, "trained", usurps)
    outcome = Population(msgspec.structs.replace(CALM, rounds=1)).run()
    assert outcome.violation == "nobody refused"
    assert "not the head of its row" in outcome.detail


def test_work_of_a_row_is_that_of_a_flat_sum_and_grows_for_those_who_take_over() -> None:
    rates = [(5e6, 12e6), (60e6, 60e6), (60e6, 120e6), (12e6, 12e6), (60e6, 60e6)]
    plain, after = row_work(rates, 1e6), row_work(rates, 1e6, gone=[2])
    assert sum(plain.sent) == pytest.approx(2 * 4 * 1e6)
    assert sum(after.sent) == pytest.approx(2 * 3 * 1e6)
    assert after.sent[2] == 0
    shares = [(sent / 1e6 - 1) / 3 for sent in plain.sent]
    heirs = [(sent / 1e6 - 1) / 2 for place, sent in enumerate(after.sent) if place != 2]
    gained = [heir - share for heir, share in zip(heirs, [s for p, s in enumerate(shares) if p != 2], strict=True)]
    assert max(gained) - min(gained) < 0.002
    assert sum(gained) == pytest.approx(shares[2])
    assert plain.took_s == pytest.approx(max(sent / min(rate) for sent, rate in zip(plain.sent, rates, strict=True)))
