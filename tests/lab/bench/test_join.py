from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.lab.bench import join as bench_join
from shoal.lab.bench import join_joiner as bench_join_joiner
from shoal.lab.bench.join import CASE, run
from shoal.lab.bench.join_donor import drawn_state
from shoal.lab.bench.join_joiner import JoinBench
from shoal.lab.case import CaseOptions, tell_nothing
from shoal.protocol.errors import LocalError, NetworkError

REQUIRED = {"state_mb", "donors", "seconds", "mb_per_s", "lane_mb_per_s", "donor_rate_ratio"}


def test_bench_join_prints_one_document_with_the_keys_that_others_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    CASE(JoinBench(state_mb=8, donors=3, repetitions=1, training=False), CaseOptions(as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= REQUIRED
    assert (found["state_mb"], found["donors"], found["donor_rate_ratio"]) == (8, 3, None)
    assert found["mb_per_s"] == pytest.approx(8 / found["seconds"], rel=0.01)
    assert found["lane_mb_per_s"] > 1
    assert sum(found["by_donor"]) == 8_000_000  # every byte came once, and from whom is told
    assert len(found["by_donor"]) == 3


@pytest.mark.long
def test_bench_join_measures_what_training_donors_keep() -> None:
    speed = run(JoinBench(state_mb=40, donors=1, repetitions=1, serving_s=0.6), tell_nothing)
    assert speed.donor_rate_ratio is not None
    assert 0 < speed.donor_rate_ratio < 3
    assert speed.donor_wall_ratio is not None
    assert speed.donor_wall_ratio > 0
    assert (speed.capped_donors, speed.cap_mb_per_s) == (1, 100.0)
    assert speed.capped_mb_per_s is not None
    assert 0 < speed.capped_mb_per_s <= 140  # the cap, with a quarter of the state in a burst of a tenth of a second


def test_bench_join_notices_changed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_join, "drawn_state", lambda numel: drawn_state(numel + 1))
    with pytest.raises(LocalError, match="arrived changed"):
        run(JoinBench(state_mb=1, donors=1, training=False), tell_nothing)


def test_bench_join_says_when_a_donor_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_join_joiner, "DEADLINE_S", 0.2)
    monkeypatch.setattr(bench_join_joiner.sys, "executable", "false")
    with pytest.raises(NetworkError, match="donor 0 of the benchmark did not call"):
        run(JoinBench(state_mb=1, donors=1, training=False), tell_nothing)


def test_donors_draw_the_same_state_in_every_process() -> None:
    first, second = drawn_state(1000), drawn_state(1000)
    assert np.array_equal(first.anchor, second.anchor)
    assert not np.array_equal(first.anchor, first.momentum)
