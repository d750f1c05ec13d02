"""Simulated members that leave with what the others need: the only copy of a state, the only vote, or together."""

from __future__ import annotations

import pytest

from shoal.lab.simulate.outcome import Components, Workload
from shoal.lab.simulate.scenario import Fault, Scenario
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.departure import LEAVE_TIMEOUT_S, TOGETHER_S
from shoal.protocol.round import RoundMachine

LEFT_AT_S = 15.01
LAST_COPY = Scenario(
    peers=3,
    rounds=4,
    seed=995,
    fault=(
        Fault(kind="kill", at_s=8.74, peer=2, duration_s=6.11, forgets=True),
        Fault(kind="join", at_s=10.17),
        Fault(kind="slow", at_s=10.37, peer=1, duration_s=7.69, factor=27.2),
        Fault(kind="leave", at_s=LEFT_AT_S, peer=0),
        Fault(kind="crash", at_s=15.72, peer=1, duration_s=6.02),
    ),
)
"""One of three is killed and another slow, so that the third certifies a round alone; then it leaves."""


class Gone(Simulation):
    """Remembers when a peer left."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left_at: dict[int, float] = {}

    def depart(self, number: int, life: int) -> None:
        super().depart(number, life)
        self.left_at.setdefault(number, self.timeline.now)


def test_member_with_the_only_copy_leaves_once_the_others_have_it_and_go_on_without() -> None:
    simulation = Gone(LAST_COPY)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert simulation.judge.certified
    alone = next(value for value in simulation.peers[1].disk.chain if value.members == (simulation.peers[0].id,))
    assert alone.round == 4
    assert LEFT_AT_S < simulation.left_at[0] < LEFT_AT_S + LEAVE_TIMEOUT_S
    assert {peer.number for peer in simulation.peers if peer.running} == {1, 2, 3}
    for peer in simulation.peers[2:]:  # the one who crashed has only just come back
        assert peer.peer_rounds.obtaining.current
        assert peer.disk.height > 5
        assert simulation.peers[0].id not in peer.disk.chain[-1].members


class Careless(RoundMachine):
    """Looks after nobody that lacks its state."""

    def holds_alone(self) -> bool:
        return False


class Selfish(RoundMachine):
    """Leaves although nobody else can certify."""

    def hands_over(self) -> bool:
        return False


def test_seeded_leave_with_the_only_copy_is_found() -> None:
    outcome = run_scenario(LAST_COPY, Components(machine=Careless))
    assert (outcome.violation, outcome.detail) == ("the only copy", "peer 0 leaves with that of round 4")


def test_seeded_leave_of_the_only_voter_stops_the_others_with_the_state_in_hand() -> None:
    simulation = Simulation(LAST_COPY, Components(machine=Selfish))
    outcome = simulation.run()
    assert outcome.violation == ""
    heads = {peer.disk.chain[-1].round for peer in simulation.peers if peer.running}
    assert heads == {4}
    assert all(peer.peer_rounds.obtaining.current for peer in simulation.peers if peer.running)


def joined_and_left(leaves_at_s: float) -> Scenario:
    """The first of a swarm leaves when the second has just come."""
    faults = (Fault(kind="join", at_s=9.0), Fault(kind="leave", at_s=leaves_at_s, peer=0))
    return Scenario(peers=1, rounds=8, seed=1, fault=faults)


@pytest.mark.parametrize(
    ("leaves_at_s", "alone"), [(9.3, 3), (9.6, 4)], ids=["the round nearly trained", "a round later, in training"]
)
def test_leaver_certifies_nothing_more_alone_while_a_newcomer_fetches_its_state(leaves_at_s: float, alone: int) -> None:
    simulation = Gone(joined_and_left(leaves_at_s), Components(work=Workload(state_bytes=60e6)))
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 8)
    founder, newcomer = simulation.peers
    members = {value.round: value.members for value in newcomer.disk.chain}
    together = alone + 1
    assert members[alone] == (founder.id,)
    assert simulation.decided_at[alone] < leaves_at_s
    assert members[together] == tuple(sorted((founder.id, newcomer.id)))
    counted_out = together + 1
    assert simulation.decided_at[counted_out] < simulation.left_at[0] < simulation.decided_at[counted_out] + 1.0
    assert members[counted_out] == (newcomer.id,)
    assert newcomer.disk.chain[counted_out].leaves == (founder.id,)


def test_leaver_whose_state_takes_too_long_to_fetch_goes_when_its_patience_is_over() -> None:
    simulation = Gone(joined_and_left(9.3), Components(work=Workload(state_bytes=12e8)))
    outcome = simulation.run()
    assert 9.3 + LEAVE_TIMEOUT_S <= simulation.left_at[0] < 9.3 + LEAVE_TIMEOUT_S + 1.0
    assert (outcome.violation, outcome.states_fetched) == ("", 0)  # nobody can go on: that is for a rebase to mend


@pytest.mark.parametrize("stays", range(3))
def test_two_of_three_that_leave_in_the_same_moment_leave_one_that_certifies_alone(stays: int) -> None:
    faults = tuple(Fault(kind="leave", at_s=14.0, peer=peer) for peer in range(3) if peer != stays)
    simulation = Gone(Scenario(peers=3, rounds=10, seed=1, fault=faults))
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.rounds_certified) == ("", "", 10)
    assert simulation.peers[stays].disk.chain[-1].members == (simulation.peers[stays].id,)
    assert all(14.0 + TOGETHER_S <= at < 14.0 + LEAVE_TIMEOUT_S for at in simulation.left_at.values())
