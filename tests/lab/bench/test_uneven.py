"""The cost of a slow node: what is refused, and a short run of real nodes."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import execute
from shoal.lab.bench.train_swarm import Speeds
from shoal.lab.bench.uneven import UnevenBench, UnevenResult, to_lines


@pytest.mark.parametrize(("speed", "sound", "holds"), [(91.0, True, True), (89.0, True, False), (91.0, False, False)])
def test_swarm_must_make_nine_tenths_of_the_sum_and_nothing_wrong(speed: float, sound: bool, holds: bool) -> None:
    fair = Speeds(tokens_per_s=speed, ideal_tokens_per_s=100.0, blocked_fraction=0.0123)
    equal = Speeds(tokens_per_s=30.0, ideal_tokens_per_s=100.0, blocked_fraction=None)
    result = UnevenResult(bench=UnevenBench(), fair=fair, equal=equal, sound=sound)
    assert result.holds is holds
    lines = to_lines(result)
    assert f"{speed:.0f} of 100 tokens/s: {speed / 100:.2f}; blocked 1.2 %" in lines[1]
    assert "30 of 100 tokens/s: 0.30" in lines[2]
    assert lines[3].startswith("all is" if holds else "FAILED")


@pytest.mark.long
def test_real_nodes_with_a_slow_one_are_nearly_as_fast_as_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """As fast as it must be is for the benchmark to say; here the machine has other things to do."""
    execute(["bench", "uneven", "--nodes", "3", "--rounds", "4", "--inner-steps", "60", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] is True
    fair, equal = (found[kind]["tokens_per_s"] / found[kind]["ideal_tokens_per_s"] for kind in ("fair", "equal"))
    assert equal < 0.6 < fair
