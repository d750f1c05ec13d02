"""What simulated peers give is judged by value: what they learnt, and of earlier work what no round counted."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.collectives.finals import Finals
from shoal.lab.simulate.scenario import Fault, Scenario
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.node.state.contributions import Contributions, Made

LOSSY_CODEC = Scenario(peers=4, rounds=4, seed=4)
"""In int8, which loses something of every value."""
SLOW = Fault(kind="slow", peer=1, at_s=0.0, duration_s=30.0, factor=60.0)
"""A peer that the others go on without in the middle of a reduction."""


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_work_is_carried_on_in_every_shape_of_a_round(sparse: bool, fragments: int) -> None:
    kill = Fault(kind="kill", peer=2, at_s=9.0, duration_s=3.0)
    scenario = Scenario(peers=4, rounds=6, seed=4, sparse=sparse, fragments=fragments, fault=(kill, SLOW))
    outcome = run_scenario(scenario)
    assert (outcome.violation, outcome.detail, outcome.wrong_values) == ("", "", 0)
    assert outcome.rounds_certified == 6
    assert outcome.met["work carried on"] > 6


def test_round_of_a_fragment_changes_the_state_there_alone() -> None:
    simulation = Simulation(Scenario(peers=3, rounds=2, fragments=5))
    assert simulation.run().violation == ""
    for value in simulation.peers[0].disk.chain[1:]:
        changed = simulation.judge.states[value.hash] != simulation.judge.states[value.base]
        here = simulation.fragments.of_round(value.round)
        assert changed.any()
        for there, _ in here.spans():
            changed[there] = False
        assert not changed.any()


def test_work_on_disk_is_found_by_the_next_life_and_given_as_it_was() -> None:
    kill = Fault(kind="kill", peer=1, at_s=4.2, duration_s=1.0)
    outcomes = [run_scenario(Scenario(peers=4, rounds=3, seed=seed, fault=(kill,))) for seed in range(4)]
    assert all(outcome.violation == "" for outcome in outcomes)
    assert any(outcome.met.get("work found") for outcome in outcomes)


def test_seeded_residual_that_comes_again_although_it_was_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_counted(self: Contributions, made: Made, finals: Finals | None) -> Any:
        return None

    monkeypatch.setattr(Contributions, "_included", nothing_counted)
    assert run_scenario(LOSSY_CODEC).violation == "work counted once"


def test_what_sparse_finals_have_no_place_for_comes_again() -> None:
    outcome = run_scenario(Scenario(peers=8, rounds=4, seed=4, sparse=True))
    assert (outcome.violation, outcome.detail, outcome.rounds_certified) == ("", "", 4)


def test_seeded_loss_of_what_sparse_finals_have_no_place_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Contributions.settle

    def settle_without(self: Contributions, round: int, included: Any, finals: Any = None, *, rounds: int = 1) -> None:
        settle(self, round, included, rounds=rounds)

    monkeypatch.setattr(Contributions, "settle", settle_without)
    outcome = run_scenario(Scenario(peers=8, rounds=4, seed=4, sparse=True))
    assert outcome.violation == "work counted once"


def test_seeded_residual_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contributions, "settle_by", lambda self, chain, finals: self.drop())
    assert run_scenario(LOSSY_CODEC).violation == "work counted once"


def test_work_of_a_round_that_a_rollback_keeps_is_judged_by_what_that_round_counted() -> None:
    """Peer 6 comes back when nobody has the finals of round 2 any more, which the swarm went back to: once is the
    limit, so its contribution to it counts, though a term has ended since."""
    faults = (
        Fault(kind="leave", at_s=3.02, peer=3),
        Fault(kind="partition", at_s=7.31, duration_s=6.86, groups=((1, 2, 3, 4, 5, 7), (0, 6))),
        Fault(kind="join", at_s=9.59),
        Fault(kind="rollback", at_s=15.69, phase="train", peer=7),
    )
    outcome = run_scenario(Scenario(peers=8, rounds=1, seed=343, fault=faults, calm_rounds=3))
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.met["rollback ordered"] == 1
