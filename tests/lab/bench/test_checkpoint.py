"""`shoal bench checkpoint` and `shoal bench restart`: they measure the real parts, and say what they measured."""

from __future__ import annotations

import json
import time

import pytest

from shoal.cli.main import execute
from shoal.lab.bench.restart import Restart, RestartBench, RestartSpeed, run, to_document, to_lines
from shoal.lab.case import tell_nothing


def test_checkpoint_measures_copies_beside_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "checkpoint", "--state-mb", "40", "--repetitions", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 40_000_000 <= found["state_bytes"] < 40_000_000 + 2 * 4 * 2048 * 2048 + 1000
    assert len(found["blocked_runs_s"]) == len(found["copy_runs_s"]) == len(found["write_runs_s"]) == 2
    assert all(seconds > 0 for seconds in found["blocked_runs_s"] + found["copy_runs_s"] + found["write_runs_s"])
    assert found["ratio"] == pytest.approx(found["blocked_s"] / found["copy_s"], rel=0.01)


def test_restart_is_measured_on_a_node_that_was_killed() -> None:
    began = time.monotonic()
    speed = run(RestartBench(state_mb=1, repetitions=1), tell_nothing)
    (restart,) = speed.restarts
    assert restart.exact
    assert 0 < restart.import_torch_s < restart.total_s < time.monotonic() - began
    assert speed.state_bytes == pytest.approx(1_000_000, rel=0.01)


def test_restart_is_told_with_and_without_importing_torch() -> None:
    speed = RestartSpeed(
        state_bytes=10_000_000,
        restarts=tuple(Restart(total_s=total, import_torch_s=2.0, exact=True) for total in (4.0, 3.0, 5.0)),
    )
    found = to_document(speed)
    assert (found["restart_s"], found["import_torch_s"], found["net_s"], found["exact"]) == (4.0, 2.0, 2.0, True)
    assert to_lines(speed) == [
        "3 restarts from a state of 10 MB, all exact",
        "process start to training 2.00 s (1.00–3.00)",
        "and importing torch        2.00 s (2.00–2.00)",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "checkpoint", "--folder", "/nowhere"],
        ["run", "none.toml", "--checkpoint-every", "-1"],
        ["run", "none.toml", "--checkpoint-keep", "0"],
    ],
)
def test_wrong_numbers_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert execute(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert arguments[2] in err or arguments[-2] in err
