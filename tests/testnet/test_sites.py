"""Real nodes in sites, each behind an uplink: one of a site may die in mid-round, and the other goes on by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.testnet.links.namespaces import Uplink
from shoal.testnet.nodes import Launch, Runtime, node_command
from shoal.testnet.progress import ignore_progress
from shoal.testnet.reports.report import failures, ok
from shoal.testnet.scenario import Fault, Scenario
from shoal.testnet.swarm import Testnet, run_testnet
from tests.testnet.links_lab import needs_namespaces, plan, scenario

ROUNDS = 6
KILLED_IN = 3
UPLINKS = (Uplink(nodes=(0, 1), rate_mbit=100), Uplink(nodes=(2, 3), rate_mbit=100))


def test_nodes_of_an_uplink_are_a_site_whose_delegate_is_the_first(tmp_path: Path) -> None:
    together = Scenario(nodes=5, sites="together", uplinks=UPLINKS)
    testnet = Testnet(together, tmp_path, ignore_progress, Runtime())
    assert testnet.sites == {0: "site0", 1: "site0", 2: "site1", 3: "site1"}
    assert testnet.manifest.sites_together
    peers = [node.peer_id for node in testnet.nodes]
    assert peers == sorted(peers) == list(testnet.manifest.swarm.founders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nodes", "swarm.toml"]


def test_nodes_of_an_uplink_are_no_site_where_nothing_is_said(tmp_path: Path) -> None:
    apart = Testnet(Scenario(uplinks=UPLINKS), tmp_path, ignore_progress, Runtime())
    assert apart.sites == {}
    assert not apart.manifest.sites_together


@needs_namespaces
@pytest.mark.long
@pytest.mark.parametrize("progress", [0.0, 0.4])
def test_delegate_that_is_killed_in_a_reduce_takes_nobody_along(tmp_path: Path, progress: float) -> None:
    kill = Fault(kind="kill", node=0, round=KILLED_IN, phase="reduce", progress=progress)
    together = msgspec.structs.replace(scenario(ROUNDS, kill, uplinks=UPLINKS), sites="together")
    report = trio.run(run_testnet, together, tmp_path)
    assert failures(report) == []
    assert (ok(report), report.digests_equal, report.wrong_values, report.rounds_certified) == (True, True, 0, ROUNDS)
    indices = {node.peer_id: node.index for node in report.nodes}
    contributors = []
    for number in range(1, ROUNDS + 1):
        found = plan(report, tmp_path, number)
        contributors.append({indices[one.peer] for one in found.participants if one.weight})
        delegates = {indices[peer]: indices[to] for peer, to in found.delegates.items()}
        if number != KILLED_IN:  # there a plan may go on without the delegate
            assert delegates == ({1: 0, 3: 2} if number < KILLED_IN else {3: 2})
    assert contributors == [{0, 2}] * KILLED_IN + [{1, 2}] * (ROUNDS - KILLED_IN)
    assert (report.unaffected_absent, report.evicted_alive) == ((), 0)


SLOW, FAST = 1.4, 0.1
"""Seconds a step; of ten steps the slow ones are done when the grace of those who are fast is over."""


@needs_namespaces
@pytest.mark.long
@pytest.mark.parametrize("slow", [4, 5], ids=["delegate", "other"])
def test_work_of_who_is_in_time_counts_in_its_round_however_late_the_other_of_its_site_is(
    tmp_path: Path, slow: int
) -> None:
    def command(launch: Launch) -> list[str]:
        pause = launch.data_dir / "step_s"
        pause.write_text(str(SLOW if launch.data_dir.name == str(slow) else FAST))
        return [*node_command(launch), "--data", str(pause)]

    rounds, inner_steps, batch = 3, 10, 32
    late = Scenario(
        nodes=6,
        rounds=rounds,
        workload=WORKLOAD_NAME,
        options={"batch": batch},
        inner_steps=inner_steps,
        round={"grace_s": 10.0},
        uplinks=(*UPLINKS, Uplink(nodes=(4, 5), rate_mbit=100)),
        sites="together",
    )
    report = trio.run(partial(run_testnet, late, tmp_path, runtime=Runtime(command=command)))
    assert failures(report) == []
    own = inner_steps * batch
    assert [entry.tokens for entry in report.rounds] == [5 * own, 6 * own, 5 * own]
