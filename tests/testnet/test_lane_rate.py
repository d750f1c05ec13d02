from __future__ import annotations

import json

import pytest

from shoal.lab.bench.lane import CASE, LaneBench
from shoal.lab.case import CaseOptions
from shoal.protocol.errors import LocalError, NetworkError
from shoal.testnet import lane_rate
from shoal.testnet.lane_rate import LaneSpeed, measure_lane


def test_lane_speed_tells_medians_and_the_ratio_of_neighbours() -> None:
    speed = LaneSpeed(encrypted=(80.0, 40.0, 200.0), shared=(90.0, 88.0, 189.0), plaintext=(100.0, 80.0, 210.0))
    assert (speed.shared_mb_per_s, speed.shared_ratios) == (90.0, [0.9, 1.1, 0.9])
    assert (speed.encrypted_mb_per_s, speed.plaintext_mb_per_s) == (80.0, 100.0)
    assert speed.ratios == [0.8, 0.5, pytest.approx(200 / 210)]


def test_lane_rate_prints_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    CASE(LaneBench(repetitions=2, frames=40), CaseOptions(as_json=True))
    found = json.loads(capsys.readouterr().out)
    for name in ("encrypted", "shared", "plaintext"):
        runs = found[f"{name}_runs_mb_per_s"]
        assert len(runs) == 2
        assert min(runs) > 1
        assert found[f"{name}_mb_per_s"] == pytest.approx(sum(runs) / 2, abs=0.1)


def test_lane_rate_notices_changed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_rate, "_payloads", lambda: memoryview(bytes(lane_rate.POOL_BYTES)))
    with pytest.raises(LocalError, match="arrived changed"):
        measure_lane(frames=2, repetitions=1)


def test_lane_rate_says_when_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_rate, "DEADLINE_S", 0.2)
    monkeypatch.setattr(lane_rate.sys, "executable", "false")
    with pytest.raises(NetworkError, match="did not call"):
        measure_lane(frames=2, repetitions=1)
