"""`shoal bench join`: what its numbers come to, and what cannot fit."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]
import pytest

from shoal.lab.bench.join import JoinBench, Joined, run, speed_of
from shoal.lab.case import tell_nothing
from shoal.protocol.errors import ConfigError


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
