"""Simulated swarms of few seats: members take turns whatever befalls them, and nothing that they learnt is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Fault, Scenario, random_scenario, with_few_seats
from shoal.lab.simulate.shrink import as_test, candidates
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.round import RoundMachine
from shoal.protocol.seats import longest_wait

PLAIN = Scenario(peers=5, rounds=9, seed=3, seats=2)


def run(scenario: Scenario, components: Components | None = None) -> Simulation:
    simulation = Simulation(scenario, components or Components())
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified >= scenario.rounds
    return simulation


@pytest.mark.parametrize("voters", [0, 2])
def test_five_peers_take_turns_at_two_seats_and_all_that_was_learnt_is_carried(voters: int) -> None:
    simulation = run(msgspec.structs.replace(PLAIN, voters=voters))
    entries = simulation.peers[0].disk.ledger.entries
    counted = [entry.value.counted for entry in entries]
    assert all(len(some) <= 2 for some in counted)
    assert {peer for some in counted[:4] for peer in some} == {peer.id for peer in simulation.peers} or voters
    assert 1 <= simulation.judge.waited_most <= longest_wait(5, 2)
    assert simulation.residuals.carried > 0
    assert simulation.residuals.lost == 0
    assert len({peer.disk.ledger.head.digest for peer in simulation.peers}) == 1


def test_turns_go_on_with_messages_lost_and_two_killed_of_whom_one_comes_back() -> None:
    faults = (
        Fault(kind="kill", peer=4, at_s=6.0, duration_s=5.0),
        Fault(kind="kill", peer=5, at_s=9.0),
        Fault(kind="join", at_s=8.0),
    )
    simulation = run(Scenario(peers=6, rounds=10, seed=6, seats=2, loss=0.01, fault=faults))
    assert simulation.judge.waited_most <= longest_wait(7, 2)
    assert simulation.residuals.lost == 0


@pytest.mark.parametrize("seed", [1, 7, 12, 17])
def test_random_faults_bend_no_turn(seed: int) -> None:
    scenario = with_few_seats(random_scenario(seed))
    assert scenario.seats < scenario.peers
    outcome = run_scenario(scenario)
    assert (outcome.violation, outcome.detail) == ("", "")


@pytest.mark.parametrize("seed", [0, 15])
def test_round_of_one_seat_whose_holder_is_lost_counts_the_next_in_the_line(seed: int) -> None:
    scenario = msgspec.structs.replace(with_few_seats(random_scenario(seed)), seats=1)
    outcome = run_scenario(scenario)
    assert (outcome.violation, outcome.detail) == ("", "")


def test_judge_sees_seats_that_are_given_without_regard_to_the_line() -> None:
    def careless(*, line: Any, **given: Any) -> RoundMachine:
        return RoundMachine(line=(), **given)

    scenario = msgspec.structs.replace(PLAIN, rounds=12)
    outcome = run_scenario(scenario, Components(machine=careless))
    assert outcome.violation == "seats"
    assert "waits for 6 rounds" in outcome.detail


def test_scenario_of_few_seats_is_of_whole_rounds_and_can_be_shrunk() -> None:
    for wrong in ({"sparse": True}, {"fragments": 2}):
        with pytest.raises(ValueError, match="few seats are for"):
            msgspec.structs.replace(PLAIN, **wrong)
    assert "seats=2" in as_test(PLAIN, "seats")
    assert any(shorter.seats == 64 for shorter in candidates(PLAIN))
