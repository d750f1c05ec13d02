"""A disk that is full for a while: who cannot write ends with one line, nobody else does, and it comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.testnet.scenario import Fault, Scenario
from tests.testnet.real_nodes import run_real


@pytest.mark.long
def test_who_cannot_write_what_it_signs_ends_with_one_line_and_comes_back_when_there_is_room(tmp_path: Path) -> None:
    scenario = Scenario(
        nodes=4,
        rounds=12,
        workload=WORKLOAD_NAME,
        options={"inputs": 320, "outputs": 128, "step_s": 0.1},
        round={"chunk_values": 4096},
        # Room again before the first has ended, so that its last line is in its log, and after the second has.
        faults=(
            Fault(kind="full", node=1, round=2, phase="certify", duration_s=0.3),
            Fault(kind="full", node=2, round=7, phase="reduce", progress=0.4, duration_s=4.0),
        ),
    )
    report = run_real(scenario, tmp_path)
    lines = (tmp_path / "nodes" / "1" / "log.txt").read_text().splitlines()
    said = [line for line in lines if line.startswith("shoal: ")]
    assert said == [f"shoal: {tmp_path}/nodes/1: File too large; check the disk or choose another --data-dir"]
    assert not any("Traceback" in line for node in report.nodes for line in _log(tmp_path, node.index))
    for index, lives in ((0, 1), (1, 2), (2, 2), (3, 1)):
        events = map(json.loads, (tmp_path / "nodes" / str(index) / "events.jsonl").read_text().splitlines())
        assert sum(event["event"] == "started" for event in events) == lives, index


def _log(out: Path, index: int) -> list[str]:
    return (out / "nodes" / str(index) / "log.txt").read_text().splitlines()
