"""The simulator: a vote that is needed from a member that lacks a final which nobody sends any more."""

from __future__ import annotations

import pytest

from shoal.lab.simulate.peer import SimulatedPeer
from shoal.lab.simulate.scenario import Scenario
from shoal.lab.simulate.simulation import Simulation
from shoal.lab.simulate.talk import Payload
from shoal.protocol.messages import Message, Vote
from shoal.protocol.voting import lead
from shoal.swarm.lanes.frame import FrameKind


class DiesBeforeTheCertificate(Simulation):
    """The lead's finals never reach `laggard`; when the third member votes, and before that is heard, the lead dies."""

    victim = laggard = -1
    owed = died = False

    def ship(self, peer: SimulatedPeer, to: int, message: object, size: float) -> float:
        final = isinstance(message, Payload) and message.kind is FrameKind.FINAL
        if final and (peer.number, to) == (self.victim, self.laggard):
            self.owed = True
            return self.timeline.now
        return super().ship(peer, to, message, size)

    def say(self, peer: SimulatedPeer, message: Message) -> None:
        before = isinstance(message, Vote) and not self.died
        if before and peer.number == self.victim:
            return
        super().say(peer, message)
        if before:
            self.died = True
            self._kill(self.peers[self.victim], silently=False, forgets=False)


@pytest.mark.parametrize("further", [1, 2])
@pytest.mark.parametrize("seed", [3, 5])  # whose lead sums chunks, and so has finals to send
def test_member_whose_vote_is_needed_gets_finals_of_the_dead_from_who_has_them(seed: int, further: int) -> None:
    """The value is bound by one vote, so nothing is repaired; and it takes both of the two that live to certify it."""
    simulation = DiesBeforeTheCertificate(Scenario(peers=3, rounds=1, seed=seed))
    simulation.victim = simulation.numbers[lead(simulation.genesis, 0)]
    simulation.laggard = (simulation.victim + further) % 3
    outcome = simulation.run()
    assert simulation.owed
    assert simulation.died
    assert (outcome.violation, outcome.rounds_certified) == ("", 1)
    assert (outcome.forks, outcome.wrong_values) == (0, 0)
    assert outcome.virtual_s < 15
