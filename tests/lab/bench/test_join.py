"""`shoal bench join`: what its numbers come to, what cannot fit, and newcomers of a small swarm of real nodes."""

from __future__ import annotations

import json

import psutil  # type: ignore[import-untyped]
import pytest

from shoal.lab.bench.join import CASE, JoinBench, Joined, run, speed_of
from shoal.lab.case import CaseOptions, tell_nothing
from shoal.protocol.errors import ConfigError

REQUIRED = {"state_mb", "donors", "seconds", "mb_per_s", "lane_mb_per_s", "donor_rate_ratio"}


def test_rates_are_of_the_state_and_serving_is_weighed_by_what_a_core_has_left() -> None:
    joined = [Joined(4.0, 1.0), Joined(2.0, 0.5), Joined(2.5, 0.25)]
    found = speed_of(JoinBench(state_mb=500, donors=2), joined, 400.0)
    assert (found.seconds, found.mb_per_s, found.lane_ratio) == (2.5, 200.0, 0.5)
    assert (found.donor_cpu_s_per_gb, found.donor_rate_ratio) == (1.0, 0.9)
    assert found.runs_s == (4.0, 2.0, 2.5)
    assert [row.met for row in found.rows] == [None, True]


def test_donors_and_the_newcomer_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 3_000_000_000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(ConfigError, match="4 nodes of"):
        run(JoinBench(), tell_nothing)


@pytest.mark.long
def test_newcomers_fetch_the_state_of_real_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    CASE(JoinBench(state_mb=8, donors=2, repetitions=1), CaseOptions(as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= REQUIRED
    assert (found["state_mb"], found["donors"], len(found["runs_s"])) == (8, 2, 1)
    assert found["mb_per_s"] == pytest.approx(8 / found["seconds"], abs=0.06)
    assert found["lane_mb_per_s"] > 1
    assert found["donor_rate_ratio"] < 1
