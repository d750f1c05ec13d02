"""Simulated swarms beyond the limit of one plan: cells, verdicts of neighbours, heads that are replaced, exact rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.testnet.simulate_cells import REACH, Crowd
from shoal.testnet.simulate_scenario import Churn, Scenario

CALM = Scenario(peers=70, rounds=2, seed=1, loss=0.01)


def test_cells_certify_rounds_in_which_every_peer_counts() -> None:
    crowd = Crowd(CALM)
    outcome = crowd.run()
    assert (outcome.violation, outcome.rounds_certified, outcome.wrong_values) == ("", 2, 0)
    assert (outcome.false_evictions, outcome.deaths_found) == (0, 0)
    assert all(len(leaf.near) == 2 * REACH for leaf in crowd.leaves)
    tokens = sum(50 + number % 101 for number in range(70))
    certified = crowd.seats.peers[0].disk.chain
    assert certified[1].tokens == tokens
    assert len(certified[1].members) == len(crowd.cells) == 4


def test_mean_of_rows_is_the_mean_of_all() -> None:
    crowd = Crowd(msgspec.structs.replace(CALM, rounds=1))
    crowd.run()
    made = [crowd.made(number, 1) for number in range(70)]
    mean = sum(weight * values.astype(np.float64) for values, weight in made) / sum(weight for _, weight in made)
    state = crowd.seats.peers[0].disk.state
    scale = float(np.abs(mean).max())
    assert float(np.abs(state + mean).max()) < 0.03 * scale  # int8: two encodings of a mean


def test_death_of_a_head_and_of_a_member_is_found_by_neighbours_and_rounds_go_on() -> None:
    crowd = Crowd(msgspec.structs.replace(CALM, rounds=3))
    head = crowd.leaves[crowd.cells[1].head]
    member = crowd.leaves[crowd.cells[2].members()[3]]
    crowd.timeline.at(3.0, crowd._vanish, head)
    crowd.timeline.at(4.0, crowd._vanish, member)
    outcome = crowd.run()
    assert (outcome.violation, outcome.rounds_certified, outcome.false_evictions) == ("", 3, 0)
    assert len(crowd.evicted_after_s) == 2
    assert max(crowd.evicted_after_s) < 15.0
    assert crowd.cells[1].head != head.number
    assert member.number not in crowd.cells[2].members()
    successor = crowd.seats.peers[-1].id
    assert successor in crowd.seats.judge.values[crowd.seats.peers[0].disk.chain[-1].hash].members


def test_seed_gives_the_same_trace_under_churn() -> None:
    scenario = msgspec.structs.replace(CALM, rounds=1, churn=Churn(share_per_round=0.05))
    one, other = Crowd(scenario).run(), Crowd(scenario).run()
    assert one.violation == ""
    assert (one.trace_digest, one.events) == (other.trace_digest, other.events)
    assert Crowd(msgspec.structs.replace(scenario, seed=2)).run().trace_digest != one.trace_digest


def test_seeded_row_that_is_not_the_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Crowd._sum

    def wrong(self: Crowd, counted: tuple[int, ...], round: int) -> tuple[F32, int]:
        return plain(self, counted[1:], round)[0], plain(self, counted, round)[1]

    monkeypatch.setattr(Crowd, "_sum", wrong)
    assert Crowd(msgspec.structs.replace(CALM, rounds=1)).run().violation == "the reference"
