"""A failing scenario made short: every candidate is a scenario, and whom a fault names stays the one it named."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.simulate import simulation as simulate_module
from shoal.lab.simulate.crowd import run_crowd
from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, Churn, Fault, Scenario, random_scenario
from shoal.lab.simulate.shrink import as_test, candidates, shrink
from tests.lab.simulate.seeded_bugs import BlamesEverything

JOINED = """
[[fault]]
kind = "join"
at_s = 1.0
[[fault]]
kind = "lie"
peer = 4
at_s = 2.0
lie = "report"
"""


def size(scenario: Scenario) -> tuple[float, ...]:
    """What a step makes shorter, in the order in which it counts."""
    easy = sum(
        (f.duration_s or 0.0) + f.at_s + f.forgets + f.one_way + (f.torn is not None) + (f.phase is not None)
        for f in scenario.fault
    )
    shape = (scenario.churn != Churn()) + scenario.rebases + scenario.calm_rounds + scenario.sparse + scenario.fragments
    shape += scenario.site
    return scenario.peers + scenario.rounds + len(scenario.fault), scenario.loss + shape, easy


def with_join_named(seed: int) -> Scenario:
    """A random scenario with two newcomers more, of whom the second is named by faults."""
    scenario, rng = random_scenario(seed), random.Random(seed)
    joins = sum(fault.kind == "join" for fault in scenario.fault)
    last = scenario.peers + joins + 1
    more = (
        Fault(kind="join", at_s=rng.uniform(0, 20)),
        Fault(kind="join", at_s=rng.uniform(0, 20)),
        Fault(kind="lie", peer=last, at_s=20.0, lie="report"),
        Fault(kind="partition", at_s=21.0, groups=((last,), (0, last - 1))),
    )
    return msgspec.structs.replace(scenario, fault=(*scenario.fault, *more))


def large(seed: int) -> Scenario:
    """A swarm with followers."""
    rng = random.Random(seed)
    peers = rng.choice((65, 66, 100, 1000, 20_000))
    return Scenario(peers=peers, rounds=rng.randint(1, 5), loss=0.01, churn=Churn(share_per_round=rng.choice((0, 0.1))))


@pytest.mark.parametrize("draw", [random_scenario, with_join_named, large])
def test_every_candidate_is_a_shorter_scenario(draw: Callable[[int], Scenario]) -> None:
    for seed in range(150):
        scenario = draw(seed)
        found = list(candidates(scenario))
        assert found
        for smaller in found:
            assert msgspec.convert(msgspec.to_builtins(smaller), Scenario) == smaller
            assert size(smaller) < size(scenario)


@pytest.mark.parametrize("draw", [random_scenario, with_join_named, large])
def test_shrinking_ends_at_what_of_which_nothing_can_be_taken_away(draw: Callable[[int], Scenario]) -> None:
    """Whatever is kept by chance, it ends before its trials do, and whatever always fails ends at next to nothing."""
    for seed in range(100):
        asked: list[Scenario] = []

        def fails(scenario: Scenario, asked: list[Scenario] = asked, seed: int = seed) -> str:
            asked.append(scenario)
            first = len(asked) == 1
            return "made up" if first or random.Random(f"{seed} {scenario}").random() < 0.5 else ""

        smallest = shrink(draw(seed), fails, trials=10_000)
        assert len(asked) < 1000
        assert len(asked) == len(set(asked)), "nothing is tried twice"
        assert set(candidates(smallest)) <= set(asked)
        least = Scenario(peers=1, rounds=1, seed=smallest.seed)
        assert shrink(draw(seed), lambda scenario: "made up") == least


def test_a_join_goes_with_what_befalls_its_newcomer_and_later_newcomers_keep_their_faults() -> None:
    first, second = Fault(kind="join", at_s=9.0), Fault(kind="join", at_s=3.0)  # the second is there first: peer 4
    ours = Fault(kind="kill", peer=4, at_s=10.0)
    theirs = Fault(kind="stop", peer=5, at_s=11.0)
    both = Fault(kind="partition", at_s=12.0, groups=((4, 0), (5, 1)))

    def apart_from(one: int, *others: int) -> Fault:
        return Fault(kind="partition", at_s=13.0, groups=((one,), others))

    scenario = Scenario(peers=4, rounds=1, fault=(first, second, ours, theirs, both, apart_from(4, 5, 1)))
    without = [smaller.fault for smaller in candidates(scenario) if sum(f.kind == "join" for f in smaller.fault) == 1]
    assert without == [
        (second, ours, Fault(kind="partition", at_s=12.0, groups=((4, 0), (1,))), apart_from(4, 1)),
        (first, msgspec.structs.replace(theirs, peer=4), Fault(kind="partition", at_s=12.0, groups=((0,), (4, 1)))),
    ]


def test_shrink_of_a_file_with_a_join_that_a_fault_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_module, "Components", partial(simulate_module.Components, judge=BlamesEverything))
    (tmp_path / "faults.toml").write_text(JOINED)
    asked = ["simulate", "--peers", "4", "--rounds", "1", "--faults", str(tmp_path / "faults.toml"), "--shrink"]
    assert execute(asked) == 1
    assert "Scenario(peers=1, rounds=1, seed=1, loss=0.0, fault=faults)" in capsys.readouterr().err


def test_churn_keeps_a_swarm_large_and_without_it_the_swarm_gets_small() -> None:
    scenario = Scenario(peers=20_000, rounds=1, loss=0.01, churn=Churn(share_per_round=0.05))
    asked: list[Scenario] = []

    def fails(scenario: Scenario, *, churning: bool) -> str:
        asked.append(scenario)
        return "made up" if scenario.peers >= 3 and bool(scenario.churn.share_per_round) >= churning else ""

    smallest = shrink(scenario, partial(fails, churning=True))
    assert (smallest.peers, smallest.churn, smallest.loss) == (FLAT_LIMIT_PEERS + 1, scenario.churn, 0.0)
    assert len(asked) < 60
    assert shrink(scenario, partial(fails, churning=False)).peers == 3


def test_large_swarm_that_fails_only_with_so_many_is_shrunk_to_them_in_few_trials() -> None:
    asked: list[Scenario] = []

    def fails(scenario: Scenario) -> str:
        asked.append(scenario)
        return "made up" if scenario.peers >= 777 else ""

    assert shrink(Scenario(peers=10_000, rounds=1), fails).peers == 777
    assert len(asked) < 80


def test_scenario_with_followers_is_shrunk_to_one_of_them_and_printed_as_the_test_that_it_is() -> None:
    def fails(scenario: Scenario) -> str:
        return "the reference" if scenario.peers > FLAT_LIMIT_PEERS else ""

    smallest = shrink(Scenario(peers=70, rounds=2, churn=Churn(share_per_round=0.05)), fails)
    assert smallest == Scenario(peers=65, rounds=1)
    source = as_test(smallest, "the reference")
    assert "run_crowd(scenario).violation" in source
    namespace: dict[str, object] = {}
    exec(compile(source, "shrunk", "exec"), namespace)
    assert namespace["run_crowd"] is run_crowd
