"""The benchmark of rounds with real nodes, small: every figure it gives is checked against what it must be.

What it takes from event logs, and what it recomputes, is tested with inputs written here.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from shoal.lab.bench.allreduce import Allreduce, Bench, measure
from shoal.lab.bench.times import read_node, round_at, times_of
from shoal.protocol.errors import ConfigError, NetworkError

NUMEL = 300_000
KEYS = {
    "peers", "numel", "codec", "median_s", "times_s", "round_s", "wire_bytes_per_peer", "peak_extra_bytes",
    "max_abs_error", "identical", "encrypted", "fault",
}  # fmt: skip


def run(bench: Bench, folder: Path) -> Allreduce:
    return trio.run(partial(measure, bench, folder=folder))


@pytest.mark.long
def test_a_run_gives_every_figure_and_each_is_what_it_must_be(tmp_path: Path) -> None:
    result = run(Bench(peers=2, numel=NUMEL, codec="int8", iters=2), tmp_path)
    printed = json.loads(msgspec.json.encode(result))
    assert printed.keys() >= KEYS
    assert (printed["peers"], printed["numel"], printed["codec"]) == (2, NUMEL, "int8")
    assert (printed["identical"], printed["exact"], printed["encrypted"]) == (True, True, True)
    assert printed["fault"] | {"kind": "none", "delay_s": 0.0} == printed["fault"]

    assert len(printed["times_s"]) == 2
    assert 0 < min(printed["times_s"]) <= printed["median_s"] <= max(printed["times_s"])
    assert printed["median_s"] < printed["round_s"] < 30
    assert printed["beyond_reduce_s"] > 0

    payload = NUMEL + 4 * -(-NUMEL // 4096)  # a byte for each value, and the scales
    expected = 2 * (2 - 1) / 2 * payload
    assert expected < printed["wire_bytes_per_peer"] < 1.2 * expected

    # Half a step when it is encoded, half a step of the mean, and no more of what was left over from before.
    assert 0.5 / 127 / 4 < printed["max_abs_error"] < 3 * 0.5 / 127
    assert printed["peak_growth_bytes"] >= payload  # the finals are kept at least
    assert printed["peak_extra_bytes"] == printed["peak_growth_bytes"] - 4 * NUMEL < 16 * NUMEL


@pytest.mark.parametrize(
    "wrong",
    [{"peers": 1}, {"peers": 65}, {"numel": 100}, {"iters": 0}, {"codec": "fp8"}, {"peers": 2, "fault": "sigkill"}],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Bench(**wrong)


def result_of(**changes: object) -> Allreduce:
    """A result in which nothing is wrong, but for the changes."""
    fields = dict.fromkeys(Allreduce.__struct_fields__, 0) | {
        "codec": "fp32", "times_s": [1.0], "rounds_s": [2.0], "breakdown": {},
        "identical": True, "exact": True, "encrypted": True, "fault": {"kind": "none"},
    }  # fmt: skip
    return msgspec.convert(fields | changes, Allreduce)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"exact": None}, True),
        ({"identical": False}, False),
        ({"exact": False}, False),
        ({"fault": {"kind": "sigkill", "survivors_identical": False}}, False),
        ({"fault": {"kind": "sigkill", "exact": False}}, False),
    ],
)
def test_any_wrong_value_makes_the_result_bad(changes: dict[str, object], ok: bool) -> None:
    assert result_of(**changes).ok is ok


# --- event logs ---


def line(at: float, event: str, round: int = 3, **fields: object) -> str:
    return json.dumps({"at": at, "event": event, "round": round, **fields})


def log(folder: Path, *, late_s: float = 0.0, between: tuple[str, ...] = (), **more: float) -> Path:
    """A node's log of round 3, everything in it `late_s` later; what it certified, with `more` of it."""
    certified = {"digest": "d", "coverage": 1.0, "contributors": 2, "lanes_sent": 70, "control_sent": 7, **more}
    lines = [
        line(10.0 + late_s, "planned"),
        *between,
        line(13.0 + late_s, "reduced", seconds=2.0),
        line(14.0 + late_s, "voted", view=0),
        line(15.0 + late_s, "voted", view=1),
        line(16.0 + late_s, "certified", **certified),
        '{"at": 17.0, "event": "plan',
    ]
    folder.mkdir()
    (folder / "events.jsonl").write_text("\n".join(lines))
    return folder


def test_times_are_from_the_first_plan_to_the_last_peer(tmp_path: Path) -> None:
    logs = [read_node(log(tmp_path / "a")), read_node(log(tmp_path / "b", late_s=0.5))]
    peers = round_at(logs, 3)
    times = times_of(peers)
    assert (times.reduce_s, times.work_out_s, times.agree_s, times.apply_s) == (2.5, 1.0, 1.0, 2.0)
    assert times.total_s == 6.5
    assert {(peer.digest, peer.contributors, peer.sent_bytes) for peer in peers} == {("d", 2, 77)}


def test_what_test_mode_keeps_of_a_round_is_not_in_its_time(tmp_path: Path) -> None:
    peers = round_at([read_node(log(tmp_path / "a", kept_s=1.25)), read_node(log(tmp_path / "b", kept_s=0.5))], 3)
    assert [peer.certified_at for peer in peers] == [14.75, 15.5]
    assert times_of(peers).apply_s == 1.5


def test_times_of_a_round_that_was_planned_again_begin_with_its_first_plan(tmp_path: Path) -> None:
    (only,) = round_at([read_node(log(tmp_path / "a", between=(line(10.5, "planned"),)))], 3)
    assert (only.planned_at, only.finals_at) == (10.0, 12.5)


def test_finals_of_a_repaired_reduction_are_not_later_than_what_was_made_of_them(tmp_path: Path) -> None:
    """Its seconds count from the first plan, two of three before the last one."""
    (only,) = round_at([read_node(log(tmp_path / "a", between=(line(12.5, "planned"),)))], 3)
    assert (only.planned_at, only.finals_at, only.reduced_at) == (10.0, 13.0, 13.0)


def test_a_round_that_a_node_did_not_go_through_is_no_round(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="node 1"):
        round_at([read_node(log(tmp_path / "a")), {}], 3)
