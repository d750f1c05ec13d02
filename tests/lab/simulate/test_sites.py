"""Simulated swarms in sites: one of each contributes for all; what was handed over counts once, or is taken back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from shoal.collectives.reduce import Reduction
from shoal.lab.simulate.outcome import Components
from shoal.lab.simulate.scenario import Fault, Scenario, random_scenario, with_few_seats, with_sites
from shoal.lab.simulate.shrink import as_test, candidates
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FrameKind

PLAIN = Scenario(peers=6, rounds=4, seed=4, site=3)
TOKENS = sum(100 + 7 * number for number in range(6))
EVEN_S = dict.fromkeys(range(6), 2.6)
"""All train for about so long: nobody takes back what it offered before its delegate is ready."""


def run(
    scenario: Scenario, components: Components | None = None, *, train_s: dict[int, float] | None = None
) -> Simulation:
    """Run it without a violation. train_s: for how long some train."""
    simulation = Simulation(scenario, components or Components())
    for number, lasts_s in (train_s or {}).items():
        simulation.peers[number].train_s = lasts_s
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified >= scenario.rounds
    return simulation


def delegates(scenario: Scenario = PLAIN) -> list[int]:
    """The first of each site, by PeerId."""
    peers = Simulation(scenario).peers
    sites = [peers[first : first + scenario.site] for first in range(0, len(peers), scenario.site)]
    return [min(site, key=lambda peer: peer.id).number for site in sites]


def mates() -> list[int]:
    """The others of the site of the first delegate."""
    first = delegates()[0]
    return [number for number in range(6) if number // 3 == first // 3 and number != first]


def contributors(simulation: Simulation, round: int) -> list[int]:
    """Those whose contribution counts in a round."""
    plan, _ = simulation.judge.plan_of(simulation.peers[0].disk.ledger.value(round))
    return sorted(simulation.numbers[one.peer] for one in plan.participants if one.weight)


@pytest.mark.parametrize("shape", [{"site": 2}, {"fragments": 2}, {"sparse": True}, {"seed": 5}])
def test_of_each_site_one_contributes_for_all_and_all_tokens_count(shape: dict[str, Any]) -> None:
    scenario = msgspec.structs.replace(PLAIN, **shape)
    simulation = run(scenario, train_s=EVEN_S)
    ledger = simulation.peers[0].disk.ledger
    for round in (1, 2, 3, 4):
        assert contributors(simulation, round) == sorted(delegates(scenario))
        assert ledger.value(round).tokens == TOKENS
    assert simulation.met["handed over"] == 4 * (6 - len(delegates(scenario)))
    assert len({peer.disk.ledger.head.digest for peer in simulation.peers}) == 1


def test_finals_come_to_a_site_once() -> None:
    sent: Counter[tuple[bool, FrameKind]] = Counter()

    def counted(*, post: Any, **given: Any) -> Reduction:
        def posts(to: PeerId, kind: FrameKind, *rest: Any) -> None:
            sent[to in given["plan"].delegates, kind] += 1
            post(to, kind, *rest)

        return Reduction(post=posts, **given)

    simulation = run(PLAIN, Components(reduction=counted), train_s=EVEN_S)
    assert sent[False, FrameKind.FINAL] > 0
    assert sent[True, FrameKind.FINAL] == sent[True, FrameKind.CONTRIBUTION] == 0
    assert simulation.met["finals of the delegate"] == 4 * 4
    assert simulation.met["finals of others than the delegate"] == 0


def test_mate_that_takes_long_is_not_waited_for_and_contributes_by_itself() -> None:
    prompt, slow = mates()
    simulation = run(PLAIN, train_s={**EVEN_S, prompt: 3.2, slow: 6.0})
    for round in (1, 2, 3, 4):
        assert contributors(simulation, round) == sorted({*delegates(), slow})
        assert simulation.peers[0].disk.ledger.value(round).tokens == TOKENS


def test_work_at_a_delegate_that_is_too_late_for_the_round_is_taken_back_in_time() -> None:
    late, other = delegates()
    simulation = run(PLAIN, train_s={**EVEN_S, late: 12.0})
    assert contributors(simulation, 1) == sorted({*mates(), other})
    assert simulation.peers[0].disk.ledger.value(1).tokens == TOKENS - 100 - 7 * late
    assert simulation.met["not handed over"] >= len(mates())
    assert simulation.residuals.lost_on_the_way == 0


def test_delegate_that_pauses_has_nothing_of_what_was_offered() -> None:
    pause = Fault(kind="pause", peer=delegates()[0], at_s=3.0, duration_s=20.0)
    simulation = run(msgspec.structs.replace(PLAIN, fault=(pause,)), train_s={**EVEN_S, delegates()[0]: 12.0})
    assert contributors(simulation, 1) == sorted({*mates(), delegates()[1]})
    assert simulation.met["not handed over"] == len(mates())
    assert simulation.decided_at[1] < 3.0 + 4.0
    assert simulation.residuals.lost_on_the_way == 0


@pytest.mark.parametrize("phase", ["plan", "reduce", "certify"])
def test_round_of_a_site_whose_delegate_dies_goes_on(phase: Any) -> None:
    kill = Fault(kind="kill", peer=delegates()[0], at_s=4.0, phase=phase, duration_s=6.0)
    run(msgspec.structs.replace(PLAIN, fault=(kill,)))


def test_finals_are_had_from_others_where_the_delegate_hangs() -> None:
    stop = Fault(kind="stop", peer=delegates()[0], at_s=0.0, phase="reduce", into_s=0.3, duration_s=2.5)
    simulation = run(msgspec.structs.replace(PLAIN, fault=(stop,)))
    assert simulation.met["finals of others than the delegate"] > 0


def test_who_handed_over_trains_no_more_in_the_round_although_its_trainer_begins_anew() -> None:
    other = mates()[0]
    trainer = Fault(kind="trainer", peer=other, at_s=2.4)
    simulation = run(msgspec.structs.replace(PLAIN, fault=(trainer,)), train_s={delegates()[1]: 6.0})
    bases = list(simulation.peers[other].peer_rounds.work._bases)
    assert len(bases) == len(set(bases)) >= 4


@pytest.mark.parametrize("seed", [2, 7, 14, 16, 21, 34, 50, 299, 361, 6129, 6146, 6262])
def test_random_faults_have_nothing_counted_twice_or_lost(seed: int) -> None:
    outcome = run_scenario(with_sites(random_scenario(seed)))
    assert (outcome.violation, outcome.detail) == ("", "")


def test_a_fifth_of_the_random_swarms_are_in_sites_and_none_of_few_seats() -> None:
    drawn = [random_scenario(seed) for seed in range(300)]
    assert 40 <= sum(one.site > 1 for one in drawn) <= 80
    assert {with_sites(one).site for one in drawn} == {2, 3}
    assert {with_few_seats(one).site for one in drawn} == {1}
    with pytest.raises(ValueError, match="sites are for"):
        msgspec.structs.replace(PLAIN, seats=2)


def test_scenario_in_sites_can_be_shrunk() -> None:
    assert "site=3" in as_test(PLAIN, "seats")
    assert any(shorter.site == 1 for shorter in candidates(PLAIN))
