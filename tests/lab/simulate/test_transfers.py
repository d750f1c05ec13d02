"""Simulated newcomers fetch the certified state from several donors, of whom some die, hang, crawl or lie meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.lab.simulate.fetching import Fetching
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Fault, Scenario, random_scenario
from shoal.lab.simulate.serving import Serving
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.lab.simulate.states import Header
from shoal.lab.simulate.talk import ChunkRequest, GetHeader
from shoal.node.state import chunk_requests as requests_module
from shoal.node.state.chunk_requests import STALL_S, Transfer
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import RemoteError

JOIN = Fault(kind="join", at_s=6.0)
NEWCOMER = 4
"""It asks for a state at 7.69 s, and has it 0.9 s later if nothing befalls its donors."""
STRUCK_S = 7.8


class Transfers(list[Fetching]):
    """The transfers of whole states that ended, in order."""

    def of(self, number: int) -> list[Fetching]:
        return [one for one in self if one.peer.number == number]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    found, plain = Transfers(), Fetching._end

    def end(fetching: Fetching) -> None:
        if isinstance(fetching.job.question, GetHeader):
            found.append(fetching)
        plain(fetching)

    monkeypatch.setattr(Fetching, "_end", end)
    return found


def joined(*faults: Fault, rounds: int = 3) -> Scenario:
    return Scenario(peers=4, rounds=rounds, seed=3, fault=(*faults, JOIN))


def run(scenario: Scenario) -> Simulation:
    """A run in which nothing is violated and everyone who runs has the certified state at the end."""
    simulation = Simulation(scenario)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    for peer in simulation.peers:
        if peer.running:
            head = peer.disk.chain[-1]
            assert peer.disk.held == head.hash
            assert peer.disk.state.tobytes() == simulation.judge.states[head.hash].tobytes()
    return simulation


def brought(simulation: Simulation, fetching: Fetching) -> dict[int, int]:
    """Bytes by the number of the donor."""
    return {simulation.numbers[donor]: size for donor, size in fetching.transfer.arrived_bytes.items()}


def left_out(simulation: Simulation, fetching: Fetching) -> dict[int, str]:
    return {simulation.numbers[donor]: why for donor, why in fetching.transfer.out.items()}


def test_newcomer_gets_the_state_from_all_members_at_once(ended: Transfers) -> None:
    simulation = run(msgspec.structs.replace(joined(), seed=29))
    (fetching,) = ended
    assert fetching.peer.number == NEWCOMER
    sizes = brought(simulation, fetching)
    assert set(sizes) == {0, 1, 2, 3}
    assert sum(sizes.values()) == 19 * simulation.state_chunk_bytes
    assert max(sizes, key=lambda number: sizes[number]) == 0  # by far the fastest
    assert left_out(simulation, fetching) == {}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(kind="kill", peer=3, at_s=STRUCK_S, duration_s=1.0), "its lane broke"),
        (Fault(kind="crash", peer=3, at_s=STRUCK_S, duration_s=8.0), ""),  # others take over what it owes
        (Fault(kind="stop", peer=3, at_s=STRUCK_S, duration_s=8.0), ""),
        (Fault(kind="lie", lie="chunk", peer=3, at_s=STRUCK_S, duration_s=1.0), "not the certified one"),
        (Fault(kind="lie", lie="header", peer=3, at_s=6.0, duration_s=2.0), ""),
    ],
    ids=["killed", "crashed", "hung", "lying", "lying about the header"],
)
def test_state_comes_although_the_fastest_donor_fails_in_the_middle(ended: Transfers, fault: Fault, why: str) -> None:
    simulation = run(joined(fault))
    fetching = ended.of(NEWCOMER)[0]
    assert fetching.transfer.done
    assert why in left_out(simulation, fetching).get(3, "")
    assert set(brought(simulation, fetching)) >= {0, 1}
    if fault.lie == "header":
        assert 3 not in brought(simulation, fetching)


def test_slow_donor_does_not_hold_the_transfer_up(ended: Transfers) -> None:
    simulation = run(joined(Fault(kind="slow", peer=3, at_s=STRUCK_S, duration_s=20.0, factor=1000.0)))
    fetching = ended.of(NEWCOMER)[0]
    assert fetching.transfer.done
    assert sum(brought(simulation, fetching).values()) == 19 * simulation.state_chunk_bytes


def test_donor_that_owes_two_transfers_has_its_time_for_each() -> None:
    simulation = Simulation(joined())
    peer, donations, state, finals = simulation.peers[0], simulation.donations, b"state", b"finals"
    peer.peer_rounds = SimpleNamespace(transfers=[None, None])  # type: ignore[assignment]
    donations.asked(peer, 1, {(finals, 0): 1})
    simulation.timeline.run(STALL_S - 0.5, lambda: False)
    donations.asked(peer, 1, {(state, 0): 1})
    simulation.timeline.run(STALL_S, lambda: False)
    donations.settled(peer, 1, finals, 0)  # given up by the one
    donations.check(peer, 2 * STALL_S - 0.5)  # and not yet by the other
    with pytest.raises(Violation, match=r"1 chunks owed by peer 1, 6\.0 s without a byte"):
        donations.check(peer, 2 * STALL_S + 0.5)


def test_newcomer_without_donors_says_so_and_has_the_state_when_they_are_back(ended: Transfers) -> None:
    stops = [Fault(kind="stop", peer=peer, at_s=STRUCK_S, duration_s=10.0) for peer in range(4)]
    simulation = run(joined(*stops))
    first, *later = ended.of(NEWCOMER)
    assert not first.transfer.done
    assert set(left_out(simulation, first).values()) == {"sent nothing for 5 s"}
    assert "no peer has the state" in str(first.transfer.failure("the state"))
    assert later[-1].transfer.done
    assert sum(brought(simulation, later[-1]).values()) < 19 * simulation.state_chunk_bytes  # what came is not repeated


def test_peer_that_was_away_fetches_the_state(ended: Transfers) -> None:
    away = Fault(kind="kill", peer=2, at_s=1.0, duration_s=17.0)
    simulation = run(Scenario(peers=4, rounds=5, seed=3, fault=(away,)))
    (fetching,) = ended
    assert (fetching.peer.number, fetching.transfer.done) == (2, True)
    assert set(brought(simulation, fetching)) == {0, 1, 3}


def test_seeds_with_a_newcomer_strike_its_donors_while_it_fetches() -> None:
    near = []
    for seed in range(200):
        scenario = random_scenario(seed)
        joins = [fault.at_s for fault in scenario.fault if fault.kind == "join"]
        near += [f for f in scenario.fault if f.kind != "join" and any(0 <= f.at_s - at_s <= 4 for at_s in joins)]
    assert {f.kind for f in near} >= {"kill", "stop", "slow", "lie"}
    assert {f.lie for f in near} >= {"chunk", "header"}


# -- seeded bugs: each promise can be seen broken ----------------------------------------------------------------


class WaitsForEver(Transfer):
    """Gives no donor up."""

    def look(self, now: float) -> list[Any]:
        return []


class AsksEveryone(Transfer):
    """Asks all donors for every chunk."""

    def requests(self, now: float) -> list[Any]:
        asks = super().requests(now)
        for donor in self._donors.values():
            asks += [self._ask(donor, chunk, now) for chunk in list(self._askers) if chunk not in donor.owed]
        return sorted(asks, key=lambda ask: ask.donor)


HUNG = joined(*(Fault(kind="stop", peer=peer, at_s=STRUCK_S, duration_s=10.0) for peer in range(4)))
LIAR = joined(Fault(kind="lie", lie="chunk", peer=3, at_s=STRUCK_S, duration_s=6.0), rounds=4)


def test_seeded_wait_for_a_donor_that_hangs_is_found() -> None:
    outcome = run_scenario(HUNG, Components(transfer=WaitsForEver))
    assert outcome.violation == "no wait too long"
    assert f"peer {NEWCOMER} still waits" in outcome.detail


def test_seeded_requests_without_bound_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_scenario(joined(), Components(transfer=AsksEveryone)).violation == "bounded requests"
    monkeypatch.setattr(requests_module._Donor, "has_room", lambda donor, size: True)
    outcome = run_scenario(joined())
    assert outcome.violation == "bounded requests"
    assert "brought nothing yet" in outcome.detail


def test_seeded_trust_in_any_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Header, "check", lambda header, chunk, data: None)
    assert run_scenario(LIAR).violation == "the reference"


def test_seeded_forgiveness_of_wrong_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # It misses two rounds and asks for the finals of both, of the second the liar. Stopped at 7.5 s it would miss one,
    # ask another peer for that, and never come back to the liar.
    behind = Fault(kind="stop", peer=NEWCOMER, at_s=9.5, duration_s=8.0)
    scenario = msgspec.structs.replace(LIAR, rounds=5, fault=(*LIAR.fault, behind))
    assert run_scenario(scenario).violation == ""
    monkeypatch.setattr(DonorScores, "offended", lambda scores, peer, now: None)
    assert run_scenario(scenario).violation == "wrong bytes once"


def test_seeded_donor_that_lets_its_round_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[[Serving, int], None] = Serving._next

    def everything(serving: Serving, life: int) -> None:
        for other, queue in serving._queues.items():
            while queue:
                frame = queue.popleft()
                serving._swarm.ship(serving._peer, other, frame, frame.length)
                serving._leaving.append(serving._swarm.network.places[serving._peer.number].up_free_at)
        plain(serving, life)

    monkeypatch.setattr(Serving, "_next", everything)
    outcomes = [run_scenario(random_scenario(seed)).violation for seed in (3, 4)]
    assert "a donor's duties" in outcomes


def test_request_for_more_chunks_than_allowed_is_refused() -> None:
    simulation = Simulation(joined())
    simulation.run()
    with pytest.raises(RemoteError, match="257 chunks at once"):
        simulation.peers[0].peer_rounds.serving.take(1, ChunkRequest(bytes(8), tuple(range(257))))
