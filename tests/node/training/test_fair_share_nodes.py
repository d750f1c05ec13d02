"""Real nodes, one of them four times slower: from the second round on they are ready together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.protocol.manifest import render_manifest
from tests.node.lab import BATCH, Swarm, assert_exact, eventually

STEPS = 60
STEP_S = (0.01, 0.01, 0.04)
LONG_STEP_S = 0.1
ROUNDS = 4


@contextmanager
def waiting_swarm(folder: Path, *steps_s: float) -> Iterator[Swarm]:
    """Nodes whose steps wait for so long each, started together."""
    with Swarm(folder, nodes=len(steps_s), workload=WORKLOAD_NAME, options={}) as swarm:
        sync = msgspec.structs.replace(swarm.manifest.sync, inner_steps=STEPS, balance=True)
        swarm.manifest = msgspec.structs.replace(swarm.manifest, sync=sync)
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        for index, seconds in enumerate(steps_s):
            (folder / f"step{index}").write_text(str(seconds))
        swarm.start_together(**{f"node{i}": data_of(folder, i) for i in range(len(steps_s))})
        yield swarm


def data_of(folder: Path, index: int) -> tuple[str, str]:
    return "--data", str(folder / f"step{index}")


@pytest.mark.long
def test_who_comes_back_in_the_midst_of_a_round_contributes_what_it_has_when_the_others_are_ready(
    tmp_path: Path,
) -> None:
    with waiting_swarm(tmp_path, *[LONG_STEP_S] * 3) as swarm:
        first, _, third = swarm.nodes
        third.certified(2)
        third.kill()
        first.certified(3)
        eventually(lambda: (first.ask("status")["step"] or 0) in range(STEPS // 6, STEPS // 2), "a part of the round")
        third.start(*data_of(tmp_path, 2), join=[first])
        back = third.wait("contributed")
        assert 0 < back["tokens"] < STEPS * BATCH
        assert first.certified(back["round"])["contributors"] == 3
        after = third.wait("contributed", round=back["round"] + 1)
        assert after["tokens"] > 0.7 * STEPS * BATCH
        assert_exact(swarm.report(third.certified(back["round"] + 1)["round"]))


@pytest.mark.long
def test_a_slow_node_makes_fewer_steps_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with waiting_swarm(tmp_path, *STEP_S) as swarm:
        for node in swarm.nodes:
            node.certified(ROUNDS)
        made = [{e["round"]: e for e in node.events("contributed")} for node in swarm.nodes]
        assert [of_node[1]["tokens"] for of_node in made] == [STEPS * BATCH] * 3
        seconds = [[of_node[round]["seconds"] for of_node in made] for round in range(1, ROUNDS + 1)]
        steps = [[of_node[round]["tokens"] / BATCH for of_node in made] for round in range(1, ROUNDS + 1)]
        assert seconds[0][2] > 2 * max(seconds[0][:2])
        for round in range(1, ROUNDS):
            assert abs(sum(steps[round]) - 3 * STEPS) < STEPS / 2, steps  # each by its own reading of the records
            assert steps[round][2] < 0.7 * STEPS < STEPS < min(steps[round][:2]), steps
            assert seconds[round][2] < 1.5 * min(seconds[round][:2]), seconds
        assert_exact(swarm.report(ROUNDS))
