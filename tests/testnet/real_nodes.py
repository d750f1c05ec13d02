"""Scenarios that real nodes run to their end, and that no process is left of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import trio

from shoal.testnet.nodes import Runtime
from shoal.testnet.reports.report import Report, failures, ok
from shoal.testnet.scenario import Scenario
from shoal.testnet.swarm import run_testnet

DEADLINE_S = 300.0
"""It bounds a test that fails, not one that passes."""


def pids(out: Path) -> list[int]:
    """Of all processes that there ever were."""
    lines = [line for log in sorted(out.glob("nodes/*/events.jsonl")) for line in log.read_text().splitlines()]
    return [event["pid"] for event in map(json.loads, lines) if event["event"] == "started"]


def assert_none_left(out: Path) -> None:
    assert [pid for pid in pids(out) if os.path.exists(f"/proc/{pid}")] == []


def run_real(scenario: Scenario, out: Path, runtime: Runtime | None = None) -> Report:
    """Run it, and see that nothing is wrong, that the loss fell, and that no process is left."""

    async def limited() -> Report:
        with trio.fail_after(DEADLINE_S):
            return await run_testnet(scenario, out, runtime=runtime or Runtime())

    report = trio.run(limited)
    assert_none_left(out)
    assert ok(report), (failures(report), report.unverified, report.faults, report.rounds)
    assert (report.rounds_certified, report.forks, report.wrong_values) == (scenario.rounds, 0, 0)
    assert report.loss.first is not None
    assert report.loss.last is not None
    assert report.loss.last < report.loss.first
    return report
