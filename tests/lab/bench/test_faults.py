"""What survivors of a fault returned: told by its values, read from reports, and counted; once with real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.lab.bench import fault_group, faults
from shoal.lab.bench.allreduce import Strike
from shoal.lab.bench.fault_group import Group, GroupSpec, Outcome, Repetition, running_group, strike_once, valued
from shoal.lab.bench.fault_peer import Began, Listening, Report, Returned, error_line, read_report
from shoal.lab.bench.fault_values import BLOCK_VALUES, origin_of, sets_of
from shoal.lab.bench.faults import FaultsBench, FaultsResult, Struck, describe, missing, repetition_of, to_lines
from shoal.lab.bench.machine import this_machine
from shoal.protocol.errors import ConfigError, NetworkError

NUMEL = BLOCK_VALUES + 1000
SPEC = GroupSpec(system="gloo", peers=3, numel=NUMEL, fault="sigkill", watch_s=2.0)
VECTORS = SPEC.vectors


def mean(*peers: int) -> F32:
    """The mean as a system would compute it, in float32, starting from its own vector."""
    total = VECTORS[peers[0]].copy()
    for peer in peers[1:]:
        total += VECTORS[peer]
    return total / np.float32(len(peers))


# -- values --------------------------------------------------------------------------------------------------


def test_all_sets_are_there_once_and_larger_ones_first() -> None:
    assert sets_of(3) == [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]


@pytest.mark.parametrize("peers", sets_of(3))
def test_the_mean_over_any_set_is_exact_over_that_one(peers: tuple[int, ...]) -> None:
    found = origin_of(mean(*reversed(peers)), VECTORS)
    assert (found.exact, found.contributors, found.wrong_share) == (True, len(peers), 0.0)
    assert found.shares["+".join(map(str, peers))] == 1.0
    assert sum(found.shares.values()) == 1.0, "the others that are near in some elements are not told"


def test_values_of_two_means_are_wrong_by_the_share_of_the_smaller_part() -> None:
    values, part = mean(0, 1, 2), NUMEL // 4
    values[:part] = VECTORS[1][:part]
    found = origin_of(values, VECTORS)
    assert (found.exact, found.contributors) == (False, 3)
    assert found.wrong_share == pytest.approx(0.25, abs=1e-4)
    assert found.shares == pytest.approx({"0+1+2": 0.75, "1": 0.25}, abs=1e-4)


def test_one_wrong_value_of_all_is_seen() -> None:
    values = mean(0, 1)
    values[-1] += 1e-4
    found = origin_of(values, VECTORS)
    assert (found.exact, found.contributors, found.wrong_share) == (False, 2, 1 / NUMEL)


def test_a_sum_over_two_that_is_divided_by_three_is_no_mean() -> None:
    found = origin_of((VECTORS[0] + VECTORS[1]) / np.float32(3), VECTORS)
    assert (found.exact, found.shares) == (False, {})
    assert found.wrong_share > 0.999


@pytest.mark.parametrize("values", [np.full(NUMEL, np.nan, np.float32), np.zeros(0, np.float32), mean(0)[:-1]])
def test_what_are_no_such_values_at_all_is_wrong(values: F32) -> None:
    found = origin_of(values, VECTORS)
    assert (found.exact, found.contributors, found.wrong_share, found.shares) == (False, 0, 1.0, {})


# -- reports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report", [Listening("file:///x"), Began(1.5), Returned(2.0, "RuntimeError: no"), Returned(3.0, "", 2)]
)
def test_a_report_is_read_as_it_was_written(report: Report) -> None:
    assert read_report(msgspec.json.encode(report) + b"\n") == report


@pytest.mark.parametrize("line", [b"", b"Nov 28 [INFO] hello\n", b"{}", b'{"type":"Began"}', b'{"type":"Gone","at":1}'])
def test_a_line_that_is_no_report_is_none(line: bytes) -> None:
    assert read_report(line) is None


def test_an_error_is_told_in_one_line() -> None:
    assert (
        error_line(RuntimeError("[/gloo/pair.cc:537] Read error [::1]:9: reset"))
        == "RuntimeError: Read error [::1]:9: reset"
    )
    assert error_line(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert error_line(TimeoutError()) == "TimeoutError: "


# -- processes that are no system at all ---------------------------------------------------------------------


class Scripted(Group):
    """A group whose peers run these programs."""

    programs: dict[int, str]

    def _open(self, index: int) -> subprocess.Popen[bytes]:
        with self._log(index).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", self.programs.get(index, GOOD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                env={"INDEX": str(index)},
                start_new_session=True,
            )


GOOD = """
import json, os, shutil, sys, time
index = int(os.environ["INDEX"])
def report(kind, **fields): print(json.dumps({"type": kind, **fields}), flush=True)
assert sys.stdin.readline().split() == [str(before) for before in range(index)]
report("Listening", address=str(index))
for number, _ in enumerate(sys.stdin):
    report("Began", at=time.monotonic())
    if number == REDUCTIONS: AFTER
    shutil.copy("mean", f"values-{index}")
    report("Returned", at=time.monotonic())
""".replace("REDUCTIONS", str(fault_group.WARM_UP + fault_group.TIMED))
SILENT, BREAKING = GOOD.replace("AFTER", "time.sleep(600)"), GOOD.replace("AFTER", "sys.exit('torn apart')")
EARLY = GOOD.replace("AFTER", "report('Returned', at=0.0); continue")
RETURNING = GOOD.replace("AFTER", "time.sleep(0.3)")
GOOD = GOOD.replace("AFTER", "pass")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Scripted]:
    class Fresh(Scripted):
        programs: dict[int, str] = {}  # noqa: RUF012  # each test has its own

        def start(self) -> None:
            mean(0, 1, 2).tofile(self._folder / "mean")
            super().start()

    monkeypatch.setattr(fault_group, "Group", Fresh)
    return Fresh


def test_a_system_that_is_wrong_before_any_fault_is_not_struck(scripted: type[Scripted]) -> None:
    spec = GroupSpec(system="gloo", peers=4, numel=NUMEL, fault="sigkill", watch_s=2.0)
    with pytest.raises(NetworkError, match="peer 0 of gloo has the mean over 3, 0% wrong, undisturbed"):
        strike_once(spec)


def test_a_silent_peer_returned_nothing_and_one_that_broke_an_error(scripted: type[Scripted]) -> None:
    scripted.programs = {0: SILENT, 1: BREAKING, 2: SILENT}
    found = strike_once(SPEC)
    silent, broken = found.survivors
    assert silent == Outcome(kind="nothing")
    assert (broken.kind, broken.text) == ("error", "its process ended with 1: torn apart")
    assert (found.identical, found.cut_off, found.apart) == (False, None, None)


def test_values_are_read_from_the_file_that_a_peer_left(scripted: type[Scripted]) -> None:
    scripted.programs = {0: RETURNING, 1: RETURNING, 2: SILENT}
    found = strike_once(SPEC)
    assert found.identical
    assert [(one.kind, one.contributors) for one in found.survivors] == [("exact", 3)] * 2
    assert all(0 <= (one.after_s or -1) <= SPEC.watch_s for one in found.survivors)


def test_a_reduction_that_was_over_before_the_fault_is_not_counted(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_group, "TRIES", 2)
    scripted.programs = {0: EARLY, 1: EARLY, 2: SILENT}
    with pytest.raises(NetworkError, match="not struck in mid-reduce, 2 times: a peer had returned before the fault"):
        strike_once(SPEC)


def test_one_that_does_not_start_is_named_with_what_it_wrote(scripted: type[Scripted]) -> None:
    scripted.programs = {0: "raise SystemExit('no such module')"}
    with pytest.raises(NetworkError, match="peer 0 of gloo does not listen; the last it wrote is: no such module"):
        strike_once(SPEC)


def test_all_processes_are_gone_after_a_repetition(scripted: type[Scripted]) -> None:
    scripted.programs = {0: SILENT, 1: SILENT, 2: SILENT}
    with running_group(SPEC) as group:
        assert group.undisturbed_s() >= 0
        started = [process.started for process in group._processes]
    assert all(process.returncode is not None for process in started)


def test_gloo_returns_the_mean_undisturbed_and_no_other_values_when_one_is_killed() -> None:
    found = strike_once(GroupSpec(system="gloo", peers=3, numel=2_000_000, fault="sigkill", watch_s=20.0))
    assert len(found.survivors) == 2
    assert (found.usual_s or 0) > 0
    for one in found.survivors:  # an error, the mean or a hang: the kill races with the last of the values
        assert one.kind in ("error", "nothing") or (one.kind, one.contributors) == ("exact", 3)


# -- the table -----------------------------------------------------------------------------------------------

EXACT = Outcome(kind="exact", after_s=0.5, contributors=3)
STRIKE = Strike(
    total_s=2.0, after_s=(0.5, 0.7), contributors=(3, 3), coverage=(1.0, 0.75), identical=True, exact=True, apart=True
)


def test_a_strike_of_ours_is_told_as_others_are() -> None:
    found = repetition_of(STRIKE, 1.0)
    assert [(one.kind, one.after_s, one.contributors) for one in found.survivors] == [
        ("exact", 0.5, 3),
        ("exact", 0.7, 3),
    ]
    assert [list(describe(one)) for one in found.survivors] == [
        ["over 3"],
        ["over 3, 75.0% of their chunks, as certified"],
    ]
    assert (found.identical, found.apart) == (True, True)
    wrong = repetition_of(msgspec.structs.replace(STRIKE, exact=False, apart=False), 1.0)
    assert ({one.kind for one in wrong.survivors}, wrong.apart) == ({"wrong"}, False)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"survivors": (EXACT, Outcome(kind="nothing"))}, 1),
        ({"survivors": (EXACT, msgspec.structs.replace(EXACT, after_s=6.5))}, 1),
        ({"identical": False}, 2),
        ({"apart": False}, 1),
    ],
)
def test_every_survivor_that_is_not_exact_in_time_is_counted(changes: dict[str, object], count: int) -> None:
    good = Repetition(survivors=(EXACT, EXACT), identical=True, apart=True)
    struck = Struck(system="shoal", fault="partition", repetitions=(msgspec.structs.replace(good, **changes),))
    assert missing(struck, FaultsBench(repetitions=1)) == count
    assert missing(struck, FaultsBench(repetitions=2)) == count + 2, "what did not come about misses, too"


def test_the_table_says_what_came_back_and_whose_mean_it_is() -> None:
    values = mean(0, 1, 2)
    values[: NUMEL // 2] = VECTORS[0][: NUMEL // 2]
    wrong = valued(origin_of(values, VECTORS), 0.25, 3, "d")
    lone = Outcome(kind="exact", after_s=0.1, contributors=1, claimed=3, digest="e")
    struck = (
        Struck(system="shoal", fault="sigkill", repetitions=(repetition_of(STRIKE, 1.0),)),
        Struck(
            system="hivemind",
            fault="sigkill",
            repetitions=(
                Repetition(survivors=(wrong, Outcome(kind="nothing")), identical=False, cut_off=lone),
                Repetition(
                    survivors=tuple(Outcome(kind="error", after_s=1.0, text=f"X: y:{port}") for port in (40, 41)),
                    identical=False,
                ),
            ),
            error="and then it broke",
        ),
    )
    result = FaultsResult(bench=FaultsBench(), machine=this_machine(), struck=struck, notes=("a note",))
    text = "\n".join(to_lines(result))
    ours = "2 exact | 0.6 (0.5–0.7) | 1 of 1 | over 3; over 3, 75.0% of their chunks, as certified |"
    assert f"| shoal | sigkill | {ours}" in text
    assert "| hivemind | sigkill | 1 wrong, 2 error, 1 nothing | 1 (0.25–1) | 0 of 2 | 50% wrong (50% over 0" in text
    assert "; X: y:41; the one cut off: exact over 1, says over 3; and then it broke |" in text
    assert text.endswith("a note")
    assert [row.met for row in result.rows] == [False], "one of two repetitions is not there"
    assert result.ok
    assert json.loads(msgspec.json.encode(faults.CASE.document(result)))["bench"]["peers"] == 3


# -- options -------------------------------------------------------------------------------------------------


def test_systems_are_those_asked_for_or_all_and_others_are_refused() -> None:
    assert faults.chosen(faults.SYSTEMS, ("gloo", "shoal", "gloo"), "--systems") == ("shoal", "gloo")
    assert faults.chosen(faults.FAULTS, (), "--faults") == ("sigkill", "sigstop", "partition")
    with pytest.raises(ConfigError, match="--systems: 'glue' is not one of shoal, gloo, hivemind"):
        faults.run(FaultsBench(systems=("glue",)), lambda *given, **named: None)
    for wrong in ({"peers": 2}, {"peers": 5}, {"numel": 10}, {"repetitions": 0}, {"watch": 0.0}):
        with pytest.raises(ConfigError):
            FaultsBench(**wrong)


def test_what_cannot_be_done_here_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(faults, "why_not", lambda: "there is no root")
    struck: list[tuple[str, str]] = []

    def strike(spec: GroupSpec) -> Repetition:
        struck.append((spec.system, spec.fault))
        if len(struck) == 2:
            raise NetworkError("it broke")
        return Repetition(survivors=(EXACT, EXACT), identical=True)

    monkeypatch.setattr(faults, "strike_once", strike)
    bench = FaultsBench(systems=("gloo", "hivemind"), repetitions=1)
    result = faults.run(bench, lambda *given, **named: None)
    assert struck == [("gloo", "sigkill"), ("gloo", "sigstop")]
    assert [(one.fault, len(one.repetitions), one.error) for one in result.struck] == [
        ("sigkill", 1, ""),
        ("sigstop", 0, "it broke"),
    ]
    assert result.rows == ()
    assert [note.partition(":")[0] for note in result.notes] == ["hivemind is left out", "partitions are left out"]
