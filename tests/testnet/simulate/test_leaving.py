"""Simulated members that leave with what the others need: the only copy of a state, the only vote."""

from __future__ import annotations

from shoal.node.rounds.departure import LEAVE_PATIENCE_S
from shoal.protocol.round import RoundMachine
from shoal.testnet.simulate.outcome import Kit
from shoal.testnet.simulate.scenario import random_scenario
from shoal.testnet.simulate.simulation import Simulation, run_scenario

LAST_COPY = random_scenario(995)
"""One of three is killed and another slow, so that the third certifies a round alone; then it leaves."""
LEFT_AT_S = next(fault.at_s for fault in LAST_COPY.fault if fault.kind == "leave")


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
    assert LEFT_AT_S < simulation.left_at[0] < LEFT_AT_S + LEAVE_PATIENCE_S
    assert {peer.number for peer in simulation.peers if peer.running} == {1, 2, 3}
    for peer in simulation.peers[1:]:
        assert peer.course.obtaining.current
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
    outcome = run_scenario(LAST_COPY, Kit(machine=Careless))
    assert (outcome.violation, outcome.detail) == ("the only copy", "peer 0 leaves with that of round 4")


def test_seeded_leave_of_the_only_voter_stops_the_others_with_the_state_in_hand() -> None:
    simulation = Simulation(LAST_COPY, Kit(machine=Selfish))
    outcome = simulation.run()
    assert outcome.violation == ""
    heads = {peer.disk.chain[-1].round for peer in simulation.peers if peer.running}
    assert heads == {4}
    assert all(peer.course.obtaining.current for peer in simulation.peers if peer.running)
