"""The simulator: one trace for one seed, small swarms under faults, and every promise broken once to see it judged."""

from __future__ import annotations

from functools import partial
from struct import pack
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from shoal.collectives.finals import FinalFormat
from shoal.lab.simulate import judge as judge_module
from shoal.lab.simulate import watch as watch_module
from shoal.lab.simulate.many import simulate_many, violation_of
from shoal.lab.simulate.network import IN_FLIGHT_S, Timeline
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.peer import QUEUES
from shoal.lab.simulate.peer_rounds import DOERS
from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, Fault, Lie, Scenario, random_scenario
from shoal.lab.simulate.shrink import as_test, shrink
from shoal.lab.simulate.simulation import SIMULATED_TICK_S, Simulation, run_scenario, settled_s
from shoal.protocol import agreement as agreement_module
from shoal.protocol import certificate as certificate_module
from shoal.protocol import facts as gathering_module
from shoal.protocol import round as round_module
from shoal.protocol import terms as terms_module
from shoal.protocol import view_change as view_change_module
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.effects import DrawGenesis, MemberEffect
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import TICK_S, detection_bound_s
from shoal.protocol.voting import lead
from tests.lab.simulate.seeded_bugs import (
    GivesNobodyUp,
    GoesBack,
    HidesItsVote,
    LeavesOneOut,
    NeverMoves,
    OneLossIsDeath,
    OneVoteIsEnough,
    ProposesTwice,
    VotesTwice,
    anyone_decides,
    half_decides,
    halved,
)

PLAIN = Scenario(peers=4, rounds=2, seed=3)
KILLED = Scenario(peers=4, rounds=3, seed=5, fault=(Fault(kind="kill", peer=1, at_s=2.0),))


def test_seed_gives_the_same_trace() -> None:
    seed = 8
    one, other = run_scenario(random_scenario(seed)), run_scenario(random_scenario(seed))
    assert (one.trace_digest, one.events, one.virtual_s) == (other.trace_digest, other.events, other.virtual_s)
    assert one.control_bytes_per_peer_per_s == other.control_bytes_per_peer_per_s
    different = run_scenario(msgspec.structs.replace(random_scenario(seed), seed=seed + 1))
    assert different.trace_digest != one.trace_digest


def test_trace_is_the_hash_of_all_that_was_noted() -> None:
    timeline, rows = Timeline(), []
    for at in range(10_000):
        timeline.now = at / 7
        row = (at % 9, at, 2**32 - 1 - at, at**4 - 2**62)
        timeline.note(*row)
        rows.append(pack("<dHIIq", timeline.now, *row))
        if at in (3, 5000):
            assert timeline.digest() == blake3(b"".join(rows)).hexdigest()
    assert timeline.digest() == blake3(b"".join(rows)).hexdigest()


def test_real_keys_lead_to_the_same_rounds_as_stand_ins() -> None:
    scenario = Scenario(peers=3, rounds=2, seed=4)
    outcome = run_scenario(msgspec.structs.replace(scenario, real_keys=True))
    assert (outcome.violation, outcome.rounds_certified, outcome.wrong_values) == ("", 2, 0)


@pytest.mark.parametrize("seed", range(6))
def test_small_swarm_under_faults_keeps_every_promise(seed: int) -> None:
    scenario = random_scenario(seed, rounds=3)
    outcome = run_scenario(scenario)
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified == 3
    assert (outcome.forks, outcome.wrong_values) == (0, 0)


def test_state_of_every_peer_is_that_of_the_reference() -> None:
    simulation = Simulation(KILLED)
    outcome = simulation.run()
    assert outcome.rounds_certified == 3
    for peer in simulation.peers:
        head = peer.disk.chain[-1]
        assert np.array_equal(peer.disk.state, simulation.judge.states[head.hash])
    assert np.any(simulation.peers[0].disk.state != 0)


def test_every_kind_of_fault_and_lie_was_met_within_a_hundred_seeds() -> None:
    faults = [fault for seed in range(100) for fault in random_scenario(seed).fault]
    assert {f.kind for f in faults} == {
        "kill", "crash", "stop", "slow", "lossy", "partition", "lie", "leave", "join", "pause", "trainer", "finish",
        "outage", "rollback", "amend",
    }  # fmt: skip
    assert {f.lie for f in faults if f.lie} == set(get_args(Lie))
    assert any(f.one_way for f in faults)


def test_peer_that_pauses_in_its_training_observes_the_round_and_trains_again_later() -> None:
    simulation = Simulation(Scenario(peers=3, rounds=6, fault=(Fault(kind="pause", peer=1, at_s=0.5, duration_s=6.0),)))
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified, outcome.false_evictions) == ("", 6, 0)
    head, paused = simulation.peers[0].disk.chain[-1], simulation.peers[1].id
    assert all(paused in value.members for value in simulation.peers[0].disk.chain)
    plans = {finals.plan.round: finals.plan for peer in simulation.peers for finals in peer.disk.finals.values()}
    weights = {round: plan.participants[plan.number(paused) or 0].weight for round, plan in plans.items()}
    assert weights[1] == 0
    assert weights[head.round] > 0


def test_liar_is_left_out_and_blamed() -> None:
    scenario = Scenario(
        peers=4, rounds=2, seed=8, fault=(Fault(kind="lie", peer=2, at_s=0.0, duration_s=30.0, lie="contribution"),)
    )
    simulation = Simulation(scenario)
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 2)
    bitmaps = [bits for rows in simulation.judge._bitmaps.values() for bits in rows]
    plans = list(simulation.judge._plans.values())
    liar = plans[0].number(simulation.peers[2].id)
    assert liar is not None
    assert any(not int.from_bytes(bits, "little") >> liar & 1 for bits in bitmaps)


def test_peer_that_accuses_everybody_evicts_nobody_but_itself() -> None:
    """A slow peer makes the reductions long enough for what it says to be heard."""
    scenario = Scenario(
        peers=4,
        rounds=3,
        seed=8,
        fault=(
            Fault(kind="lie", peer=2, at_s=0.0, duration_s=60.0, lie="accuse"),
            Fault(kind="slow", peer=0, at_s=0.0, duration_s=60.0, factor=30.0),
        ),
    )
    simulation = Simulation(scenario)
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 3)
    evicted = {simulation.numbers[PeerId(peer)] for some in simulation.judge._evicted.values() for peer in some}
    assert evicted == {2}


def test_peer_that_takes_nothing_from_the_next_lead_is_not_waited_for_in_the_same_reduction() -> None:
    """A lead that slept wakes, evicts another, and is overtaken by it; the two that had all finals are no quorum."""
    kill = Fault(kind="kill", peer=3, at_s=4.34, duration_s=13.9)
    stops = (
        Fault(kind="stop", peer=1, at_s=4.8, duration_s=11.12),
        Fault(kind="stop", peer=0, at_s=11.7, duration_s=7.44),
    )
    outcome = run_scenario(Scenario(peers=4, rounds=2, seed=136, fault=(kill, *stops)))
    assert (outcome.violation, outcome.detail) == ("", "")
    assert (outcome.rounds_certified, outcome.forks, outcome.wrong_values) == (2, 0, 0)
    assert outcome.virtual_s < 30


# -- seeded bugs: each promise can be seen broken ----------------------------------------------------------------


SILENT = Scenario(peers=4, rounds=6, seed=5, fault=(Fault(kind="crash", peer=1, at_s=1.0),))


def lead_dies(peers: int, seed: int) -> Scenario:
    """The lead of the first round vanishes before it can plan."""
    scenario = Scenario(peers=peers, rounds=2, seed=seed)
    simulation = Simulation(scenario)
    first = simulation.numbers[lead(simulation.genesis, 0)]
    return msgspec.structs.replace(scenario, fault=(Fault(kind="crash", peer=first, at_s=0.5),))


def test_seeded_double_vote_is_found() -> None:
    assert run_scenario(PLAIN, Components(machine=VotesTwice)).violation == "no double vote"


def test_seeded_vote_that_is_hidden_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "Agreement", HidesItsVote)
    faults = tuple(Fault(kind="lossy", peer=peer, at_s=0.0, duration_s=60.0, share=0.6) for peer in range(3))
    found = {run_scenario(Scenario(peers=3, rounds=6, seed=seed, fault=faults)).violation for seed in (5, 10)}
    assert "no double vote" in found


def test_seeded_second_proposal_is_found() -> None:
    assert run_scenario(PLAIN, Components(machine=ProposesTwice)).violation == "one proposal"


def test_seeded_view_that_goes_back_is_found() -> None:
    assert run_scenario(lead_dies(4, 3), Components(machine=GoesBack)).violation == "views"


def test_seeded_wait_for_a_dead_lead_is_found() -> None:
    outcome = run_scenario(lead_dies(3, 3), Components(machine=NeverMoves))
    assert outcome.violation in ("no wait too long", "progress")
    assert run_scenario(lead_dies(3, 3)).violation == ""


def test_seeded_wait_for_a_silent_peer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", GivesNobodyUp)
    assert run_scenario(SILENT).violation == "no wait too long"


LOSSY = Scenario(peers=8, rounds=20, seed=5, loss=0.05)
"""With as much loss as a detector has to bear. Of four, each hears something else from all within a ping's deadline."""


def test_seeded_death_of_one_lost_ping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", OneLossIsDeath)
    outcome = run_scenario(LOSSY)
    assert (outcome.violation, outcome.false_evictions) == ("no false eviction", 1)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="lossy", peer=1, at_s=0.0, share=0.1),
        Fault(kind="lie", peer=1, at_s=0.0, lie="vouch"),
        Fault(kind="leave", peer=1, at_s=100.0),
    ],
    ids=["lossy", "lie", "still to come"],
)
def test_false_eviction_that_a_fault_may_justify_is_counted_alone(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", OneLossIsDeath)
    outcome = run_scenario(msgspec.structs.replace(LOSSY, rounds=10, fault=(fault,)))
    assert outcome.violation == ""
    assert outcome.false_evictions > 0


def test_false_eviction_of_one_that_was_slow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MembershipMachine", OneLossIsDeath)
    slow = Fault(kind="slow", peer=1, at_s=0.0, duration_s=5.0, factor=30.0)
    assert run_scenario(msgspec.structs.replace(LOSSY, fault=(slow,))).violation == "no false eviction"


def test_false_eviction_is_one_when_no_silence_of_the_last_fault_can_be_meant() -> None:
    late_s = 4 * (SIMULATED_TICK_S - TICK_S)
    for peers in (2, 16, FLAT_LIMIT_PEERS):
        assert IN_FLIGHT_S + detection_bound_s(peers) + late_s < settled_s(peers)


def test_seeded_sum_that_leaves_one_out_is_found() -> None:
    assert run_scenario(PLAIN, Components(reduction=LeavesOneOut)).violation == "nothing left out"


def test_seeded_final_of_another_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalFormat, "sign", halved)
    outcome = run_scenario(PLAIN)
    assert (outcome.violation, outcome.wrong_values) == ("the reference", 1)


def test_seeded_quorum_of_a_minority_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate_module, agreement_module, view_change_module, terms_module):
        monkeypatch.setattr(module, "is_quorum", anyone_decides)
    outcome = run_scenario(PLAIN)
    assert (outcome.violation, outcome.detail) == ("no double vote", "a vote without a prepare certificate")


def test_seeded_certificate_by_a_minority_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "Agreement", OneVoteIsEnough)
    assert run_scenario(PLAIN).violation == "no fork"


def test_fork_is_counted_when_both_halves_of_a_partition_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate_module, agreement_module, view_change_module, terms_module, judge_module):
        monkeypatch.setattr(module, "outweighs" if module is judge_module else "is_quorum", half_decides)
    halves = Fault(kind="partition", at_s=0.0, duration_s=60.0, groups=((0, 1), (2, 3)))
    outcome = run_scenario(Scenario(peers=4, rounds=2, seed=1, fault=(halves,)))
    assert (outcome.violation, outcome.forks) == ("no fork", 1)


def test_queue_beyond_its_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering_module, "READIES_LIMIT", 10**6)
    _, size = QUEUES["announcements"]
    monkeypatch.setitem(QUEUES, "announcements", (3, size))
    outcome = run_scenario(PLAIN)
    assert outcome.violation == "bounded queues"
    assert "4 announcements" in outcome.detail


# -- a failing scenario made short -------------------------------------------------------------------------------


def test_shrunk_scenario_still_fails_and_is_printed_as_a_test() -> None:
    components = Components(reduction=LeavesOneOut)
    smallest = shrink(random_scenario(6, rounds=2), partial(violation_of, components=components), trials=12)
    assert violation_of(smallest, components) == "nothing left out"
    source = as_test(smallest, "nothing left out")
    namespace: dict[str, Any] = {}
    exec(compile(source, "shrunk", "exec"), namespace)
    namespace[f"test_seed_{smallest.seed}_keeps_nothing_left_out"]()  # the product passes it
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(namespace, "run_scenario", partial(run_scenario, components=components))
        with pytest.raises(AssertionError):
            namespace[f"test_seed_{smallest.seed}_keeps_nothing_left_out"]()


def test_many_seeds_are_told_with_their_faults() -> None:
    report = simulate_many(200, 3, rounds=2, limit_s=1e9)
    assert (report["seeds"], report["violations"], report["rounds_certified"]) == (3, 0, 6)


def test_every_effect_of_a_member_is_done_or_cannot_come_about_here() -> None:
    """Everybody draws the same S(0); nobody shows evidence."""
    never = {DrawGenesis, NeedEvidence}
    assert DOERS.keys() | never == set(MemberEffect.__args__)
    assert DOERS.keys().isdisjoint(never)
