"""`shoal bench find`, with a swarm of two real nodes."""

from __future__ import annotations

import json

import pytest

from shoal.lab.bench.find import CASE, STAGES, FindBench
from shoal.lab.case import CaseOptions


@pytest.mark.long
def test_bench_find_times_a_newcomer_from_its_start_to_its_first_contribution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    CASE(FindBench(nodes=2, repetitions=1), CaseOptions(as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"nodes", "linked_s", "linked_all_s", "contributed_s", "newcomers"}
    (times,) = found["newcomers"]
    assert tuple(times) == STAGES
    assert 0 < times["started"] <= times["listening"] <= times["linked"] <= times["linked_all"]
    assert times["linked"] < times["contributed"]
    assert found["linked_s"] == times["linked"]
