"""A small flood against real nodes that train: it is refused, they go on, and the bench says so."""

from __future__ import annotations

import math

import pytest

from shoal.cli.bench.flood import to_lines
from shoal.swarm.limits import Reason
from shoal.testnet.bench.flood import FloodResult, measure_flood


def check(result: FloodResult) -> None:
    assert result.refused[Reason.HANDSHAKE_RATE.value] > 0
    assert result.refused[Reason.LANE_HELLO.value] > 0
    assert {"half-open connections", "giant frames"} <= set(result.per_s)
    for rate in (result.alone_tokens_per_s, result.control_tokens_per_s, result.attacked_tokens_per_s):
        assert math.isfinite(rate)
        assert rate > 0
    assert result.daemon_share_attacked < 0.5  # of one core; unbounded it is all of it


@pytest.mark.long
def test_nodes_train_through_a_flood() -> None:
    result = measure_flood(nodes=2, windows=1, seconds=15)
    check(result)
    assert any("under attack" in line for line in to_lines(result))


def test_result_is_told_with_the_processor_time_beside_the_rates() -> None:
    result = FloodResult(
        nodes=3,
        windows=1,
        alone_tokens_per_s=1000.0,
        control_tokens_per_s=800.0,
        attacked_tokens_per_s=760.0,
        ratio=0.95,
        ratios=(0.95,),
        wall_ratio=0.76,
        attacker_share=0.5,
        daemon_share_alone=0.02,
        daemon_share_attacked=0.15,
        trainers_share_alone=1.8,
        trainers_share_control=1.4,
        trainers_share_attacked=1.3,
        per_s={"hellos": 200.0},
        refused={Reason.HANDSHAKE_RATE.value: 7},
        load=2.0,
    )
    assert result.holds
    lines = to_lines(result)
    assert "trainers      1.80 cores alone, 1.40 in the control, 1.30 under attack" in lines
    assert any("0.950 of the control" in line for line in lines)
    assert any("the daemon takes 15.0% of a core" in line for line in lines)
