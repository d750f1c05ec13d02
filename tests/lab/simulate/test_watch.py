"""The links and the detector of a simulated peer do what those of a node do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.lab.simulate.judge import LOSS_BORNE_SHARE
from shoal.lab.simulate.network import IN_FLIGHT_S
from shoal.lab.simulate.scenario import Fault, Scenario
from shoal.lab.simulate.simulation import SIMULATED_TICK_S, Simulation, run_scenario
from shoal.lab.simulate.watch import REMAKE_LIMIT, Hello, Reset
from shoal.protocol.lateness import LATE_LIMIT_S
from shoal.protocol.membership import PROBE_INTERVAL_S, SUSPICION_S, MembershipMachine, State, detection_bound_s
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.swarm.dialling import DIAL_BACKOFF_LIMIT_S, DIAL_DEFERRAL_S
from shoal.swarm.links import REST_LIMIT_S
from shoal.swarm.members import REDIAL_DEADLINE_S, REDIAL_PAUSE_S

WAS_SLOW = Scenario(
    peers=4,
    rounds=20,  # which last until long after it is quick again
    seed=3,
    fault=(Fault(kind="join", at_s=6.0), Fault(kind="slow", peer=3, at_s=7.0, duration_s=20.0, factor=1000.0)),
)
LOSSY = msgspec.structs.replace(WAS_SLOW, seed=8, loss=LOSS_BORNE_SHARE)


class Swarm(Simulation):
    """A swarm whose messages are kept: when, from, to, and what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.said: list[tuple[float, int, int, object]] = []

    def send(self, peer: Any, to: int, message: object, size: int) -> None:
        self.said.append((self.timeline.now, peer.number, to, message))
        super().send(peer, to, message, size)

    def until(self, at_s: float) -> None:
        """Let it run."""
        if not self.timeline.events:
            for peer in self.peers:
                self.start(peer)
        with self.keys.in_use():
            self.timeline.run(at_s, lambda: False)

    def state(self, observer: int, number: int) -> State | None:
        return self.peers[observer].watch.machine.state_of(self.peers[number].id)

    def greetings(self, sender: int, to: int, after_s: float) -> list[float]:
        return [
            at
            for at, one, other, message in self.said
            if (one, other) == (sender, to) and at > after_s and isinstance(message, Hello) and not message.answer
        ]


def settled(peers: int = 3, seed: int = 1) -> Swarm:
    """All are linked with all."""
    swarm = Swarm(Scenario(peers=peers, rounds=100, seed=seed))
    swarm.until(6.0)
    assert all(len(peer.watch.links) == peers - 1 for peer in swarm.peers)
    return swarm


# -- pings ---------------------------------------------------------------------------------------------------------


def test_every_ping_over_a_link_is_answered() -> None:
    swarm = settled()
    swarm.until(20.0)
    pings = {(other, one, m.nonce) for at, one, other, m in swarm.said if isinstance(m, Ping) and at < 19.0}
    acks = {(one, other, m.nonce) for _, one, other, m in swarm.said if isinstance(m, Ack)}
    assert pings
    assert pings <= acks


def test_suspicion_is_refuted_and_others_are_asked() -> None:
    """A machine that vanished is asked after through others; who is suspected and lives says so."""
    swarm = settled()
    swarm._kill(swarm.peers[1], silently=True, forgets=False)
    swarm.until(20.0)
    kinds: set[type] = {type(message) for _, _, _, message in swarm.said}
    assert kinds >= {PingRequest, Suspicion}
    assert swarm.state(0, 1) is State.DEAD
    before = swarm.peers[2].watch.machine.incarnation
    accused = Suspicion(peer=swarm.peers[2].id, incarnation=before)
    swarm.peers[0].watch._say(2, accused)
    swarm.until(21.0)
    assert swarm.peers[2].watch.machine.incarnation == before + 1


@pytest.mark.parametrize("scenario", [WAS_SLOW, LOSSY], ids=["lossless", "lossy"])
def test_peer_that_was_slow_is_given_up_by_nobody(scenario: Scenario) -> None:
    outcome = run_scenario(scenario)
    assert (outcome.violation, outcome.detail, outcome.false_evictions) == ("", "", 0)


WAKES_MEANWHILE = Scenario(
    peers=3,
    rounds=1,
    seed=5177,
    fault=(
        Fault(kind="pause", at_s=0.48, phase="plan", peer=2, duration_s=3.34),
        Fault(kind="join", at_s=0.0),
        Fault(kind="stop", at_s=1.26, phase="leaving", peer=3, duration_s=6.64),
        Fault(kind="slow", at_s=12.71, peer=1, duration_s=4.21, factor=23.9),
        Fault(kind="stop", at_s=15.59, peer=0, duration_s=11.73),
    ),
)
"""Peer 3, silent for 6.6 s, answers just after peer 0 fell silent: who saw that waits longer for peer 0 as well."""


def test_answer_that_comes_late_after_a_peer_fell_silent_has_others_wait_longer_for_it() -> None:
    simulation = Simulation(WAKES_MEANWHILE)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert detection_bound_s(4) < max(simulation.found_after_s) < detection_bound_s(4, LATE_LIMIT_S)


def test_seeded_peer_that_is_given_up_by_nobody_is_found_where_answers_were_late_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = MembershipMachine._waited_s

    def waited_s(machine: MembershipMachine, deadline_s: float, *rest: Any) -> float:
        return 60.0 if deadline_s == SUSPICION_S else plain(machine, deadline_s, *rest)

    monkeypatch.setattr(MembershipMachine, "_waited_s", waited_s)
    *others, silent = WAKES_MEANWHILE.fault
    for_long = (*others, msgspec.structs.replace(silent, duration_s=40.0))
    simulation = Simulation(msgspec.structs.replace(WAKES_MEANWHILE, fault=for_long))
    assert simulation.run().violation == "no wait too long"
    assert simulation.timeline.now == pytest.approx(silent.at_s + simulation._silence_bound_s(late_s=LATE_LIMIT_S))


# -- links ---------------------------------------------------------------------------------------------------------


def test_killed_process_is_known_to_be_dead_when_its_machine_refused_twice() -> None:
    swarm = settled()
    swarm._kill(swarm.peers[1], silently=False, forgets=False)
    began = swarm.timeline.now
    round_trip_s = 2 * 1.1 * max(max(row) for row in swarm.network._delays)
    swarm.until(began + REMAKE_LIMIT * (REDIAL_PAUSE_S + round_trip_s) + round_trip_s)
    assert swarm.state(0, 1) is swarm.state(2, 1) is State.DEAD
    assert swarm.timeline.now - began < REMAKE_LIMIT * (REDIAL_PAUSE_S + REDIAL_DEADLINE_S)
    for observer in (0, 2):
        assert len(swarm.greetings(observer, 1, began)) >= 2


def test_link_that_cannot_be_made_again_is_no_proof_of_a_death() -> None:
    """Between two peers of four a wall is put up: they give each other's link up, and nobody up."""
    swarm = settled(peers=4)
    swarm.network.part([0], [1])
    swarm.network.part([1], [0])
    for one, other in ((0, 1), (1, 0)):
        swarm.peers[one].watch.broke(other, swarm.peers[other].life)
    began = swarm.timeline.now
    swarm.until(began + REMAKE_LIMIT * (REDIAL_PAUSE_S + REDIAL_DEADLINE_S) - 0.01)
    assert not swarm.peers[0].watch.machine._peers[swarm.peers[1].id].cut
    assert len(swarm.greetings(0, 1, began)) == REMAKE_LIMIT == 2  # as `Members._remake` has it
    swarm.until(began + 30.0)
    assert swarm.peers[0].watch.machine._peers[swarm.peers[1].id].cut
    assert 1 not in swarm.peers[0].watch.links
    assert swarm.state(0, 1) is swarm.state(1, 0) is State.ALIVE
    assert len(swarm.greetings(0, 1, began)) > REMAKE_LIMIT  # dialled like anybody else


def test_of_two_without_a_link_the_lower_peer_id_dials_first() -> None:
    swarm = settled()
    lower, higher = sorted((0, 1), key=lambda number: swarm.peers[number].id)
    assert swarm.peers[lower].watch._deferral_s(higher) == 0.0
    assert swarm.peers[higher].watch._deferral_s(lower) == DIAL_DEFERRAL_S
    swarm.peers[higher].watch.links.clear()
    assert swarm.peers[higher].watch._deferral_s(lower) == 0.0  # nobody has heard of it


def test_link_of_who_is_given_up_rests_until_it_says_something() -> None:
    swarm = settled()
    swarm.peers[1].hung = True
    began = swarm.timeline.now
    swarm.until(began + detection_bound_s(3) + 4 * SIMULATED_TICK_S)
    assert swarm.state(0, 1) is State.DEAD
    watch = swarm.peers[0].watch
    assert 1 not in watch.links
    assert watch.resting == {1: swarm.peers[1].life}
    with swarm.keys.in_use():  # it reads votes, and what they certify
        swarm.peers[1].wake()
    swarm.until(swarm.timeline.now + IN_FLIGHT_S + PROBE_INTERVAL_S)
    assert swarm.state(0, 1) is swarm.state(1, 0) is State.ALIVE
    assert 1 in watch.links
    assert not watch.resting
    assert not swarm.greetings(0, 1, began)
    assert not swarm.greetings(1, 0, began)


def test_link_that_rests_for_long_is_ended_and_made_again_by_who_is_back() -> None:
    swarm = settled()
    swarm.peers[1].hung = True
    began = swarm.timeline.now
    swarm.until(began + detection_bound_s(3) + 4 * SIMULATED_TICK_S + REST_LIMIT_S)
    assert not swarm.peers[0].watch.resting
    with swarm.keys.in_use():
        swarm.peers[1].wake()
    swarm.until(swarm.timeline.now + IN_FLIGHT_S + DIAL_BACKOFF_LIMIT_S)
    assert 1 in swarm.peers[0].watch.links
    assert swarm.greetings(1, 0, began) or swarm.greetings(0, 1, began)


def test_reset_of_an_earlier_link_leaves_the_present_one() -> None:
    swarm = settled()
    watch = swarm.peers[0].watch
    watch._linked_at[1] = swarm.timeline.now
    watch.reset(1, Reset(nobody=False))
    assert 1 in watch.links
    swarm.until(swarm.timeline.now + 2 * IN_FLIGHT_S)
    watch.reset(1, Reset(nobody=False))
    assert 1 not in watch.links


def test_message_on_a_link_that_is_being_made_waits_for_the_admission() -> None:
    swarm = settled()
    watch, life = swarm.peers[0].watch, swarm.peers[1].life
    watch.broke(1, life)
    watch._remakes.clear()
    message = Nack(target=swarm.peers[2].id, nonce=7)
    assert not watch.keep(1, life, message)  # nothing is under way
    watch._greet(1, answer=False)
    assert watch.keep(1, life, message)
    heard: list[object] = []
    swarm.peers[0].receive = lambda sender, message: heard.append(message)  # type: ignore[method-assign]
    watch._linked(1, Hello(life, 1, answer=True))
    assert heard == [message]
