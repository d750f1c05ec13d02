"""Simulated swarms that go on with whoever stays: one that moved ahead is needed, or the last planner has left."""

from __future__ import annotations

import msgspec
import pytest

from shoal.lab.simulate.scenario import Fault, Scenario
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.departure import LEAVE_TIMEOUT_S
from shoal.protocol.facts import RoundFacts
from shoal.protocol.voting import is_quorum

LEFT = Scenario(
    peers=5,
    rounds=2,
    seed=1259,
    fault=(Fault(kind="leave", at_s=0.0, peer=0), Fault(kind="leave", at_s=3.0, peer=2)),
)
KILLED_AND_LEFT = Scenario(
    peers=4,
    rounds=3,
    seed=1594,
    fault=(
        Fault(kind="kill", at_s=3.55, peer=0, duration_s=1.74),
        Fault(kind="kill", at_s=4.93, peer=1, duration_s=0.93),
        Fault(kind="leave", at_s=5.44, peer=3),
    ),
)


@pytest.mark.parametrize(("scenario", "staying"), [(LEFT, {1, 3, 4}), (KILLED_AND_LEFT, {0, 1, 2})])
def test_quorum_that_stays_certifies_although_one_moved_ahead(scenario: Scenario, staying: set[int]) -> None:
    simulation = Simulation(scenario)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified == scenario.rounds
    assert outcome.virtual_s < 20.0
    heads = {peer.number: peer.disk.chain[-1] for peer in simulation.peers if peer.running}
    assert heads.keys() == staying
    assert {simulation.numbers[peer] for head in heads.values() for peer in head.members} == staying


PLANNER_LEAVES = Scenario(peers=2, rounds=2, seed=1, fault=(Fault(kind="leave", at_s=0.6, peer=0),))


def test_one_of_two_that_heard_the_planner_leave_goes_on_alone() -> None:
    simulation = Simulation(PLANNER_LEAVES)
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 2)
    assert simulation.peers[1].disk.chain[1].leaves == (simulation.peers[0].id,)


def test_seeded_standstill_after_a_leave_that_was_heard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundFacts, "has_quorum", lambda facts: is_quorum(facts.previous, facts.alive - facts.leaves))
    assert run_scenario(PLANNER_LEAVES).violation == "progress"


@pytest.mark.parametrize(("silent_s", "rounds"), [(4.0, 2), (LEAVE_TIMEOUT_S + 5.0, 0)], ids=["a while", "for long"])
def test_leave_that_nobody_hears_at_first_is_said_until_the_leaver_has_no_more_patience(
    silent_s: float, rounds: int
) -> None:
    """Whoever is never heard takes the quorum along, which is no violation."""
    silence = Fault(kind="partition", at_s=0.5, duration_s=silent_s, groups=((0,), (1,)), one_way=True)
    outcome = run_scenario(msgspec.structs.replace(PLANNER_LEAVES, fault=(silence, *PLANNER_LEAVES.fault)))
    assert (outcome.violation, outcome.rounds_certified) == ("", rounds)


LEAVER_AND_DEAD = Scenario(
    peers=3,
    rounds=3,
    seed=82556,
    fault=(
        Fault(kind="outage", at_s=0.0, phase="train", into_s=0.1, peer=1, duration_s=1.0),
        Fault(kind="kill", at_s=7.03, peer=0, duration_s=7.04, torn=1.0),
        Fault(kind="kill", at_s=8.54, phase="train", peer=1, duration_s=1.06),
        Fault(kind="leave", at_s=14.37, peer=2),
    ),
    rebases=True,
)


def test_leave_reaches_the_last_voter_though_it_was_dead_when_the_leaver_promised() -> None:
    simulation = Simulation(LEAVER_AND_DEAD)
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 3)
    assert simulation.peers[1].disk.chain[3].leaves == (simulation.peers[2].id,)
    assert not simulation.met["rebased"]


ALONE_AND_QUICK = Scenario(
    peers=3,
    rounds=2,
    seed=50221,
    fault=(
        Fault(kind="kill", at_s=1.0, peer=1, duration_s=4.66),
        Fault(kind="slow", at_s=7.11, peer=2, duration_s=5.75, factor=19.9),
    ),
)


def test_others_come_back_to_one_whose_rounds_are_shorter_than_their_way_to_its_state() -> None:
    simulation = Simulation(ALONE_AND_QUICK)
    outcome = simulation.run()
    assert outcome.violation == ""
    machines = [peer.peer_rounds.machine for peer in simulation.peers]
    assert len({machine.round for machine in machines if machine is not None}) == 1
    assert None not in machines
    assert outcome.virtual_s < 60


@pytest.mark.parametrize(("seed", "stopped"), [(3, (0, 3)), (3, (1, 3)), (4, (2, 3)), (8, (0, 1))])
def test_half_that_was_stopped_makes_no_round_without_the_half_that_waited_for_it(
    seed: int, stopped: tuple[int, int]
) -> None:
    """Those who woke up hold the casting vote; the others went on to a view without the lead that was stopped."""
    faults = tuple(Fault(kind="stop", at_s=3.0, peer=peer, duration_s=15.0) for peer in stopped)
    simulation = Simulation(Scenario(peers=4, rounds=5, seed=seed, fault=faults))
    assert simulation.run().violation == ""
    waited = {peer.id for peer in simulation.peers if peer.number not in stopped}
    chain = max((peer.disk.chain for peer in simulation.peers), key=len)
    assert [value.round for value in chain[1:] if not waited <= set(value.members)] == []
