"""Simulated swarms where who has no seat follows: few links, a bounded wait, and nothing that was learnt is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.lab.cli.simulate import SimulateOptions, lines_of, scenario_of
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Churn, Fault, Scenario, outside_scenario
from shoal.lab.simulate.shrink import as_test, candidates
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.enlisting import OutsideLine
from shoal.protocol.neighbours import NEIGHBOUR_LIMIT
from shoal.protocol.round import RoundMachine

PLAIN = Scenario(peers=12, rounds=12, seed=3, voters=2, seats=2, outside=True)


def run(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified >= scenario.rounds
    assert 0 < outcome.waited_rounds <= outcome.waited_limit_rounds
    assert 0 < outcome.most_links_outside <= NEIGHBOUR_LIMIT
    assert simulation.residuals.lost == 0
    return simulation


def test_ten_who_have_no_vote_come_to_two_seats_in_turn_and_follow_meanwhile() -> None:
    simulation = run(PLAIN)
    entries = simulation.peers[0].disk.ledger.entries
    counted = {peer for entry in entries for peer in entry.value.counted}
    assert {peer.id for peer in simulation.peers[2:]} <= counted
    assert all(len(entry.value.counted) <= 2 for entry in entries)
    assert all(len(entry.value.members) < len(simulation.peers) for entry in entries), "never were all of them there"
    assert simulation.residuals.carried > len(entries)
    following = [peer for peer in simulation.peers if peer.peer_rounds.member.follows]
    assert len(following) >= 4
    assert len({peer.disk.ledger.head.hash for peer in simulation.peers}) == 1


def test_turns_go_on_with_messages_lost_while_some_die_some_come_back_and_some_come() -> None:
    faults = (
        Fault(kind="join", at_s=12.0),
        Fault(kind="kill", peer=5, at_s=14.0, duration_s=6.0),
        Fault(kind="crash", peer=7, at_s=16.0),
        Fault(kind="join", at_s=18.0),
        Fault(kind="kill", peer=9, at_s=20.0),
    )
    simulation = run(msgspec.structs.replace(PLAIN, voters=3, rounds=14, loss=0.01, fault=faults))
    counted = {peer for entry in simulation.peers[0].disk.ledger.entries for peer in entry.value.counted}
    assert {simulation.peers[number].id for number in (12, 13)} <= counted, "who came got a seat"


def test_turns_go_on_while_many_come_and_go_in_each_round() -> None:
    simulation = run(msgspec.structs.replace(PLAIN, peers=30, voters=3, seats=5, churn=Churn(share_per_round=0.08)))
    entries = simulation.peers[0].disk.ledger.entries
    newcomers = [peer for peer in simulation.peers[30:] if peer.running]
    assert simulation.died >= 8
    assert len(newcomers) >= 8
    counted = {peer for entry in entries for peer in entry.value.counted}
    assert any(peer.id in counted for peer in newcomers)


@pytest.mark.parametrize("seed", [3, 5])
def test_random_faults_bend_no_turn(seed: int) -> None:
    outcome = run_scenario(outside_scenario(seed))
    assert (outcome.violation, outcome.detail) == ("", "")


def test_judge_sees_one_who_stands_in_the_line_and_is_passed_over() -> None:
    def careless(*, line: Any, **given: Any) -> RoundMachine:
        return RoundMachine(line=(), **given)

    outcome = run_scenario(msgspec.structs.replace(PLAIN, rounds=20), Components(machine=careless))
    assert outcome.violation in ("waiting outside", "seats")


def test_judge_sees_one_who_counts_without_having_enlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(msgspec.structs.replace(PLAIN, seats=4, rounds=8))
    monkeypatch.setattr(OutsideLine, "admitted", frozenset(peer.id for peer in simulation.peers))
    monkeypatch.setattr(OutsideLine, "admits", lambda line, peer: True)
    assert simulation.run().violation == "newcomers wait"


def test_waiting_outside_takes_named_voters_and_is_told_and_shrunk() -> None:
    for wrong in ({"voters": 0}, {"voters": 12, "seats": 63}):
        with pytest.raises(ValueError, match="takes named voters, and with the seats up to 64"):
            msgspec.structs.replace(PLAIN, **wrong)
    churned = msgspec.structs.replace(PLAIN, churn=Churn(share_per_round=0.25))
    told = as_test(churned, "seats")
    assert "import Churn, Scenario" in told
    assert "churn=Churn(share_per_round=0.25)" in told
    assert "outside=True" in told
    assert any(not shorter.outside for shorter in candidates(PLAIN))
    assert all(shorter.outside for shorter in candidates(churned) if shorter.churn != Churn())
    scenario = scenario_of(SimulateOptions(peers=4, rounds=2, voters=2, seats=1, outside=True))
    lines = [line for line in lines_of(run_scenario(scenario)) if line.startswith("outside")]
    assert len(lines) == 1
    assert lines[0].startswith("outside    2 have no vote, 0 died, and at most ")
