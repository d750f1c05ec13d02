"""A small flood against real nodes that train: it is refused, they go on, and the bench says so."""

from __future__ import annotations

import math
import os

import pytest

from shoal.lab.bench.flood import FloodBench, FloodResult, halves, run, to_lines
from shoal.lab.case import tell_nothing
from shoal.lab.targets import missed
from shoal.protocol.errors import ConfigError
from shoal.swarm.limits import Reason

needs_two_processors = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda pid: [0])(0)) < 2, reason="nodes and attacker need a processor each"
)


@pytest.mark.long
@needs_two_processors
def test_nodes_train_through_a_flood() -> None:
    before = os.sched_getaffinity(0)
    result = run(FloodBench(nodes=2, windows=1, seconds=10, scale=0.5), tell_nothing)
    assert os.sched_getaffinity(0) == before
    assert result.refused_per_s[Reason.HANDSHAKE_RATE.value] > 0
    assert result.refused_per_s[Reason.LANE_HELLO.value] > 0
    assert {"half-open connections", "giant frames", "hellos due", "dials"} <= set(result.per_s)
    for rate in (result.alone_tokens_per_s, result.attacked_tokens_per_s, result.ratio, result.work_ratio):
        assert math.isfinite(rate)
        assert rate > 0
    assert result.daemon_share_attacked < 0.5  # of one processor; unbounded it is all of it
    assert any("under attack" in line for line in to_lines(result))


def test_result_is_told_with_the_processor_time_beside_the_rates() -> None:
    result = FloodResult(
        nodes=3,
        node_processors=2,
        windows=1,
        alone_tokens_per_s=1000.0,
        attacked_tokens_per_s=950.0,
        ratio=0.95,
        ratios=(0.95,),
        work_ratio=0.96,
        work_ratios=(0.96,),
        attacker_share=0.5,
        packets_share=0.02,
        daemon_share_alone=0.02,
        daemon_share_attacked=0.15,
        trainers_share_alone=1.8,
        trainers_share_attacked=1.7,
        per_s={"hellos": 200.0},
        held={"slow readers": 50.0},
        refused_per_s={Reason.HANDSHAKE_RATE.value: 7.0},
        load=2.0,
    )
    assert missed(result.rows) == []
    lines = to_lines(result)
    assert "trainers      1.80 processors alone, 1.70 under attack" in lines
    assert "ratio         0.950; of tokens per second of the nodes' processor time 0.960" in lines
    assert any("the daemon takes 15.0% of one" in line for line in lines)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes have no processors of their own here")
def test_attacker_and_nodes_need_a_processor_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    assert halves() == ([3], [5, 8])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(ConfigError, match="two or more"):
        halves()
