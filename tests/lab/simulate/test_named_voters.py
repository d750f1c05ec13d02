"""Simulated swarms whose voters are named: strangers contribute and certify nothing, whatever befalls either."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shoal.lab.simulate.scenario import Fault, Scenario, random_scenario, with_named_voters
from shoal.lab.simulate.shrink import as_test, candidates
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol import amending as amending_module
from shoal.protocol import chain as chain_module
from shoal.protocol import leading as leading_module
from shoal.protocol import round as round_module
from shoal.protocol.voting import Voting
from tests.protocol.seeded import ChangesVotersTooEarly

PLAIN = Scenario(peers=5, rounds=4, seed=2, voters=3)


def test_strangers_work_counts_and_three_founders_alone_certify_with_one_killed() -> None:
    killed = Fault(kind="kill", peer=1, at_s=6.0)
    simulation = Simulation(msgspec.structs.replace(PLAIN, fault=(killed,), rounds=6))
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 6)
    ids = [peer.id for peer in simulation.peers]
    entries = simulation.peers[0].disk.ledger.entries
    assert all(set(entry.signers) <= set(ids[:3]) for entry in entries)
    plan, _ = simulation.judge.plan_of(entries[-1].value)
    assert {p.peer for p in plan.participants if p.weight} == {*ids[:1], *ids[2:]}
    assert entries[-1].value.members == tuple(sorted([*ids[:1], *ids[2:]]))


def test_four_founders_of_whom_one_may_lie_certify_with_one_killed_and_not_with_two() -> None:
    scenario = Scenario(peers=5, rounds=4, seed=2, voters=4, lying=True)
    for killed, certified in ((1, True), (2, False)):
        faults = tuple(Fault(kind="kill", peer=peer, at_s=0.5) for peer in range(killed))
        outcome = run_scenario(msgspec.structs.replace(scenario, fault=faults))
        assert outcome.violation == ""
        assert (outcome.rounds_certified == 4) is certified


def test_strangers_go_on_without_no_quorum_of_founders_until_the_authority_says_who_votes() -> None:
    faults = tuple(Fault(kind="kill", peer=peer, at_s=9.0) for peer in range(2))
    stalled = Simulation(msgspec.structs.replace(PLAIN, fault=faults, rounds=8))
    assert stalled.run().rounds_certified < 8, "three others are no quorum"
    rebased = Simulation(msgspec.structs.replace(PLAIN, fault=faults, rounds=8, rebases=True))
    outcome = rebased.run()
    assert (outcome.violation, outcome.met["rebased"]) == ("", 1)
    ledger = rebased.peers[2].disk.ledger
    assert ledger.voters == (rebased.peers[2].id,)
    assert set(ledger.head.members) == {peer.id for peer in rebased.peers[2:]}


# -- voters that change ------------------------------------------------------------------------------------------

CHANGED = msgspec.structs.replace(
    PLAIN,
    rounds=9,
    fault=(Fault(kind="voters", peer=0, at_s=9.0, adds=3, removes=0), Fault(kind="kill", peer=0, at_s=16.0)),
)


def signers(simulation: Simulation) -> dict[int, set[int]]:
    entries = simulation.peers[1].disk.ledger.entries
    numbers = {peer.id: peer.number for peer in simulation.peers}
    return {entry.value.round: {numbers[peer] for peer in entry.signers} for entry in entries}


def amended_in(simulation: Simulation) -> list[int]:
    entries = simulation.peers[1].disk.ledger.entries
    return [entry.value.round for entry in entries if entry.value.amended]


def test_fourth_takes_the_place_of_a_founder_that_is_killed_then() -> None:
    """And votes: there is no majority without it, once another founder is dead."""
    faults = (*CHANGED.fault, Fault(kind="kill", peer=2, at_s=20.0))
    simulation = Simulation(msgspec.structs.replace(CHANGED, fault=faults))
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 9)
    (changed,) = amended_in(simulation)
    assert outcome.met["voters changed"] > 0
    for round, some in signers(simulation).items():
        assert some <= ({0, 1, 2} if round <= changed else {1, 2, 3})
    assert 3 in set.union(*signers(simulation).values())
    ledger = simulation.peers[1].disk.ledger
    assert set(ledger.voters) == {simulation.peers[number].id for number in (1, 2, 3)}


def test_change_waits_for_a_voter_that_died_meanwhile_and_no_round_does() -> None:
    faults = (
        Fault(kind="voters", peer=0, at_s=12.0, adds=3, removes=0),
        Fault(kind="kill", peer=3, at_s=12.05, duration_s=3.0),
    )
    simulation = Simulation(msgspec.structs.replace(PLAIN, rounds=12, fault=faults))
    outcome = simulation.run()
    assert (outcome.violation, outcome.rounds_certified) == ("", 12)
    (changed,) = amended_in(simulation)
    entries, there = simulation.peers[1].disk.ledger.entries, simulation.peers[3].id
    without = [entry.value.round for entry in entries if there not in entry.value.members and entry.value.round > 4]
    assert without
    assert without[-1] + 1 == changed, "in the first round after which it is a member again"


def voters_of_before(simulated: pytest.MonkeyPatch) -> None:
    simulated.setattr(chain_module.Chain, "voting", property(lambda chain: chain._votings[max(0, chain.height - 1)]))


def no_other_voters(simulated: pytest.MonkeyPatch) -> None:
    simulated.setattr(Voting, "after", lambda voting, value: voting)


def voters_too_early(simulated: pytest.MonkeyPatch) -> None:
    simulated.setattr(round_module, "Agreement", ChangesVotersTooEarly)


def votes_for_who_is_no_member(simulated: pytest.MonkeyPatch) -> None:
    for module in (amending_module, leading_module):
        simulated.setattr(module, "holds_state", lambda value, *, voting: True)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (voters_of_before, {"named voters vote", "no double vote", "no fork", "progress"}),
        (no_other_voters, {"named voters vote", "no double vote", "no fork"}),
        (votes_for_who_is_no_member, {"named voters vote"}),
    ],
)
def test_seeded_bug_in_a_change_of_voters_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    away = Fault(kind="kill", peer=3, at_s=9.05, duration_s=30.0)
    fault = (*CHANGED.fault[:1], away) if plant is votes_for_who_is_no_member else CHANGED.fault
    assert run_scenario(msgspec.structs.replace(CHANGED, fault=fault)).violation in found


def test_seeded_change_that_counts_in_its_own_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    voters_too_early(monkeypatch)
    faults = tuple(Fault(kind="voters", peer=0, at_s=at_s, removes=1) for at_s in (4.0, 6.0))
    outcome = run_scenario(Scenario(peers=3, rounds=6, seed=2, voters=2, fault=faults))
    assert outcome.violation in ("no double vote", "no fork")


def test_scenario_of_changing_voters_says_whom_and_is_shrunk_with_them() -> None:
    for given in ({"kind": "voters", "peer": 0}, {"kind": "leave", "peer": 0, "adds": 1}):
        with pytest.raises(ValueError, match="whom it adds or removes"):
            Fault(at_s=1.0, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give voters"):
        msgspec.structs.replace(CHANGED, voters=0)
    with pytest.raises(ValueError, match="names a peer that there is not"):
        msgspec.structs.replace(CHANGED, fault=(Fault(kind="voters", peer=0, at_s=1.0, adds=5),))
    assert "Fault(kind='voters', at_s=9.0, peer=0, adds=3, removes=0)" in as_test(CHANGED, "no fork")
    fewer = [one.fault[0] for one in candidates(CHANGED) if one.peers == 4]
    assert {(one.adds, one.removes) for one in fewer} == {(3, 0), (2, 0)}


def test_seeds_have_the_same_faults_with_named_voters_and_changes_of_these() -> None:
    scenarios = [random_scenario(seed) for seed in range(60)]
    named = [with_named_voters(one) for one in scenarios]
    assert [tuple(f for f in one.fault if f.kind != "voters") for one in named] == [one.fault for one in scenarios]
    changes = [fault for one in named for fault in one.fault if fault.kind == "voters"]
    assert any(fault.adds is not None and fault.removes is None for fault in changes)
    assert any(fault.removes is not None for fault in changes)
    assert all(one.voters >= 2 for one in named)
    assert any(one.lying for one in named)
    assert any(0 < one.voters < one.peers and not one.lying for one in named)


@pytest.mark.parametrize("seed", [3, 6])
def test_seed_of_named_voters_keeps_every_promise(seed: int) -> None:
    outcome = run_scenario(with_named_voters(random_scenario(seed)))
    assert (outcome.violation, outcome.rounds_certified) == ("", 4)


def test_failing_seed_is_told_with_its_voters_and_shrunk_with_them() -> None:
    scenario = Scenario(peers=5, rounds=2, seed=1, voters=4, lying=True)
    assert "fault=faults, voters=4, lying=True)" in as_test(scenario, "no fork")
    smaller = list(candidates(scenario))
    assert {(one.peers, one.voters, one.lying) for one in smaller} >= {(4, 4, True), (5, 4, False), (5, 0, False)}
    assert all(one.voters <= one.peers for one in smaller)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"voters": 6}, "up to 64 peers"), ({"voters": 3, "lying": True}, "4 named voters"), ({"lying": True}, "4 named")],
)
def test_scenario_that_cannot_be_is_refused(given: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Scenario(peers=5, rounds=1, **given)
