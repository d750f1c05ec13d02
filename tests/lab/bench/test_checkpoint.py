"""`shoal bench checkpoint` measures the real parts, and says what it measured."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import execute


def test_checkpoint_measures_copies_beside_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "checkpoint", "--state-mb", "40", "--repetitions", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 40_000_000 <= found["state_bytes"] < 40_000_000 + 2 * 4 * 2048 * 2048 + 1000
    assert len(found["blocked_runs_s"]) == len(found["copy_runs_s"]) == len(found["write_runs_s"]) == 2
    assert all(seconds > 0 for seconds in found["blocked_runs_s"] + found["copy_runs_s"] + found["write_runs_s"])
    assert found["ratio"] == pytest.approx(found["blocked_s"] / found["copy_s"], rel=0.01)


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
