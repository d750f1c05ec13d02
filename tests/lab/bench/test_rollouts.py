"""Whether policies of real nodes get better: whose rounds count, what follows from runs, and one small run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.bench.rollouts import HeldOutPoint, NodeRun, RolloutsBench, RolloutsRun, RolloutsSwarm, rows_of, run
from shoal.lab.results_file import add_result
from shoal.node.reporting.events import AgentStarted, HeldOutReward, Rollouts
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.manifest import load_manifest
from shoal.testnet.nodes import Life


def node(before: float, after: float, rewards: tuple[float, ...] = (0.5, 0.5)) -> NodeRun:
    return NodeRun(
        warm_up_reward=0.2,
        rewards=rewards,
        held_out=(HeldOutPoint(0, before), HeldOutPoint(2, after)),
        informative=3.0,
        external=4.0,
    )


def swarm_run(pair: str, seed: int, *nodes: NodeRun, warm_up_reward: float = 0.2) -> RolloutsRun:
    local, external = map(int, pair.split("/"))
    return RolloutsRun(
        local=local,
        external=external,
        warm_up_reward=warm_up_reward,
        rounds=2,
        seed=seed,
        learning_rate=1e-4,
        took_s=1.0,
        nodes=nodes,
    )


def medians(runs: list[RolloutsRun]) -> list[float | None]:
    return [None if row.measured is None else round(row.measured.median, 6) for row in rows_of(runs)]


def test_the_rise_is_the_median_of_seeds_and_none_may_fall() -> None:
    runs = [
        swarm_run("4/4", 1, node(0.2, 0.3), node(0.2, 0.3)),
        swarm_run("4/4", 2, node(0.2, 0.2), node(0.2, 0.16)),
        swarm_run("4/4", 3, node(0.1, 0.14), node(0.3, 0.42)),
        swarm_run("8/0", 1, node(0.2, 0.9, (0.4, 0.4)), node(0.2, 0.9, (0.4, 0.4))),
        swarm_run("8/0", 2, node(0.2, 0.9, (1.0, 1.0)), node(0.2, 0.9, (1.0, 1.0))),
    ]
    assert medians(runs) == [1.4, 0.9, 0.266667, 0.875]
    assert [row.met for row in rows_of(runs)] == [True, False, False, False]
    assert medians(runs[2:3]) == [1.4, 1.4, None, None], "nothing to compare it with"
    assert medians([swarm_run("4/4", 1, node(0.0, 0.3))]) == [None] * 4, "a rise from nothing has no measure"


def test_where_right_answers_are_rare_sharing_is_to_be_worth_more() -> None:
    one, other = node(0.1, 0.2, (0.12, 0.12)), node(0.1, 0.2, (0.1, 0.1))
    often = rows_of([swarm_run("4/4", 1, one), swarm_run("8/0", 1, other)])[-1]
    rare = rows_of([swarm_run("4/4", 1, one, warm_up_reward=0.05), swarm_run("8/0", 1, other, warm_up_reward=0.05)])[-1]
    assert (often.met, rare.met) == (True, False)
    pair = [swarm_run("4/4", 1, node(0.1, 0.33)), swarm_run("8/0", 1, node(0.1, 0.3))]
    assert [row.met for row in rows_of(pair)[2:]] == [True, False]
    mixed = [swarm_run("4/4", 1, one), swarm_run("8/0", 1, other, warm_up_reward=0.05)]
    assert rows_of(mixed)[-1].measured is None, "these did not begin alike"


def test_a_run_ends_when_every_node_made_its_rounds_and_was_tried_after_them(tmp_path: Path) -> None:
    swarm = RolloutsSwarm(tmp_path, RolloutsBench(nodes=2, rounds=2, warm_up_reward=0.05), (4, 4), 7)
    assert not swarm.warmed_up()
    for index in (0, 1):
        swarm.journal.add(index, AgentStarted(at=0.0, round=0, warm_up_reward=0.06))
        swarm.journal.add(index, HeldOutReward(at=0.0, round=0, reward=0.1))
    assert swarm.warmed_up()
    for at, reward in enumerate((0.25, None)):
        swarm.journal.add(0, Rollouts(at=1.0, round=at, reward=reward, external=4 * at, informative=at))
        swarm.journal.add(1, Rollouts(at=1.0, round=at, reward=1.0))
    swarm.journal.add(0, HeldOutReward(at=2.0, round=1, reward=0.9))
    swarm.journal.add(0, HeldOutReward(at=2.0, round=2, reward=0.2))
    assert swarm.has_made(2)
    assert not swarm.has_made(3)
    assert not swarm.is_through(2), "the other was not tried yet"
    swarm.journal.add(1, HeldOutReward(at=2.0, round=2, reward=0.2))
    assert swarm.is_through(2)
    found = swarm.run_of(0, 2)
    assert found.rewards == (0.25, 0.0)
    assert [(one.round, one.reward) for one in found.held_out] == [(0, 0.1), (1, 0.9), (2, 0.2)]
    assert (found.informative, found.external, found.warm_up_reward) == (0.5, 2.0, 0.06)
    with pytest.raises(NetworkError, match="node 0 made 2 of 3 rounds"):
        swarm.run_of(0, 3)


def test_a_node_that_made_its_rounds_may_end_and_one_that_fails_may_not(tmp_path: Path) -> None:
    swarm = RolloutsSwarm(tmp_path, RolloutsBench(nodes=2, rounds=2), (4, 4), 7)
    node = swarm.nodes[0]
    node.lives.append(Life(pid=1, started_at=0.0, ended_at=1.0, exit_code=0))
    assert swarm._crashed() is None
    node.lives[-1].exit_code = 1
    assert swarm._crashed() is node


def test_the_manifest_is_the_one_that_init_writes_but_for_what_is_measured(tmp_path: Path) -> None:
    def sections(pair: tuple[int, int], seed: int) -> dict[str, dict[str, object]]:
        bench = RolloutsBench(nodes=2, warm_up_reward=0.05)
        found: dict[str, dict[str, object]] = msgspec.to_builtins(
            RolloutsSwarm(tmp_path / f"{pair}{seed}", bench, pair, seed).manifest
        )
        return found

    assert execute(["init", "--strategy", "rollouts", "--data-dir", str(tmp_path), "-o", str(tmp_path / "m.toml")]) == 0
    written: dict[str, dict[str, object]] = msgspec.to_builtins(load_manifest(tmp_path / "m.toml"))
    ours = sections((4, 4), 0)
    for section in ("sync", "inner", "round", "rollouts", "agreement", "membership"):
        assert ours[section] == written[section], section
    assert ours["workload"] == written["workload"] | {"options": {"style": "rotary", "warm_up_reward": 0.05}}
    alone = sections((8, 0), 3)
    assert alone["rollouts"] == written["rollouts"] | {"local": 8, "external": 0}
    assert alone["workload"]["seed"] == 3


def test_what_the_file_has_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    there = [swarm_run(pair, seed, node(0.1, 0.2), node(0.1, 0.2)) for pair in ("4/4", "8/0") for seed in (1, 2)]
    for one in there:
        add_result(path, one)
    bench = RolloutsBench(nodes=2, rounds=2, seeds=(2,), results=path)  # type: ignore[arg-type]
    assert list(run(bench, lambda _: None)) == [there[1], there[3]]


@pytest.mark.parametrize("settings", ["4", "4/4,", "0/4", "a/b", "4/4;8/0"])
def test_settings_that_are_no_pairs_are_refused(settings: str) -> None:
    with pytest.raises(ConfigError, match="pairs like"):
        RolloutsBench(settings=settings)
