"""A small flood against real nodes that train: it is refused, they go on, and the bench says so."""

from __future__ import annotations

import math

import pytest

from shoal.cli.bench_flood import to_lines
from shoal.swarm.limits import Reason
from shoal.testnet.bench_flood import FloodResult, measure_flood


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
