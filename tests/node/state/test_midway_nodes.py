"""Real nodes killed amid a round: what they had learnt in it until the last write counts, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.lab.bench.step_tally import NodeLog, NodeTally, read_node, tally
from shoal.lab.bench.tally_workload import WORKLOAD_NAME, steps_made
from shoal.node.state.resumption import MIDWAY
from tests.node.lab import Node, Swarm, eventually

INNER_STEPS = 100
LOST_LIMIT_STEPS = 40
"""Steps while a snapshot is written and this process notices it; a half of a round is what was lost without."""


def swarm_of(workplace: Path, nodes: int) -> Swarm:
    options: dict[str, str | int | float | bool] = {"numel": 5_000, "step_s": 0.02}
    sections: dict[str, dict[str, object]] = {"sync": {"inner_steps": INNER_STEPS, "codec": "fp32"}}
    return Swarm(workplace, nodes=nodes, workload=WORKLOAD_NAME, options=options, sections=sections)


def data(swarm: Swarm) -> dict[str, tuple[str, ...]]:
    return {f"node{index}": ("--data", str(node.folder)) for index, node in enumerate(swarm.nodes)}


def kill_amid_a_round(node: Node, round: int) -> int:
    """Kill a node once something of this round is on disk; returns how many steps it had made in it."""
    node.wait("contributed", round=round - 1)
    eventually((node.folder / "resume" / MIDWAY).exists, "what it learnt is on disk")
    node.kill()
    assert not node.events("contributed", round=round)
    since = node.events("contributed", round=round - 1)[0]["at"]
    return sum(at > since for at in steps_made(node.folder))


def tally_of(logs: list[NodeLog], index: int, rounds: int) -> NodeTally:
    problems: list[str] = []
    found = tally(logs[index], logs, rounds, (0.0, 0.0), problems)
    assert problems == []
    return found


@pytest.mark.long  # by value: test_resumption.py
def test_work_of_a_node_killed_amid_a_round_is_counted_once_in_a_later_one(tmp_path: Path) -> None:
    """Two rounds go by without it; its next contribution holds what it had learnt, and all that it makes in between."""
    with swarm_of(tmp_path, 3) as swarm:
        first, _, struck = swarm.nodes
        swarm.start_together(**data(swarm))
        made = kill_amid_a_round(struck, 3)
        first.certified(4)
        struck.start(*data(swarm)["node2"], join=[first])
        resumed = struck.wait("resumed")
        kept = resumed["tokens"]
        assert resumed == resumed | {"round": 2, "exact": True, "refused": ""}
        assert made - LOST_LIMIT_STEPS <= kept <= made
        again = struck.wait("contributed")
        assert again["tokens"] == kept + again["steps"]
        last = struck.certified(again["round"] + 1)["round"]
        for node in swarm.nodes:
            node.certified(last)
            node.kill()
        report = swarm.report(last)
        assert (report.forks, report.wrong_values) == (0, 0)
        logs = [read_node(index, node.peer_id, node.folder) for index, node in enumerate(swarm.nodes)]
        found = tally_of(logs, 2, last)
        assert (found.twice, found.lost) == (0, made - kept)
