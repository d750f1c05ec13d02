"""Wall clocks that are set while nodes run: in the process, in the log that it keeps, and in a swarm of real nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.node.reporting.events import RoundStarted
from shoal.testnet.nodes import Launch, node_command
from shoal.testnet.scenario import Fault, Scenario
from shoal.testnet.wall_clock import TrueTimes, WallClock
from tests.testnet.real_nodes import run_real

DAY_S = 86_400.0
ASKED = """\
import json, logging, sys, time
KEPT = time.time  # as a default argument keeps it
for _ in sys.stdin:
    formatted = logging.Formatter("%(asctime)s", "%Y-%m-%d").format(logging.makeLogRecord({"created": time.time()}))
    print(json.dumps({
        "kept": KEPT(), "ns": time.time_ns() / 1e9, "real": time.clock_gettime(time.CLOCK_REALTIME),
        "real_ns": time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9, "day": formatted,
        "monotonic": time.monotonic(), "steady": time.clock_gettime(time.CLOCK_MONOTONIC), "argv": sys.argv[1:],
        "of": time.gmtime(0).tm_year, "name": __name__,
    }), flush=True)
"""


def test_a_process_tells_what_its_clock_says_and_its_monotonic_clocks_go_on(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(ASKED)
    clock = WallClock(tmp_path / "clock")
    command = [sys.executable, "-m", "shoal.testnet.wall_clock", str(clock.path), "asked", "one", "--two"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(tmp_path)}, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead_s in (0.0, 3600.0, -40 * DAY_S, 0.0):
            clock.set(ahead_s)
            before, steady = time.time(), time.monotonic()
            print(file=process.stdin, flush=True)
            told = json.loads(process.stdout.readline())
            after, later = time.time(), time.monotonic()
            for name in ("kept", "ns", "real", "real_ns"):
                assert before - 1e-3 <= told[name] - ahead_s <= after + 1e-3, (name, ahead_s)
            assert told["day"] in {time.strftime("%Y-%m-%d", time.localtime(at + ahead_s)) for at in (before, after)}
            assert steady <= told["monotonic"] <= told["steady"] <= later
            assert (told["argv"], told["of"], told["name"]) == (["one", "--two"], 1970, "__main__")
        process.stdin.close()
        assert process.wait() == 0


def test_events_of_a_clock_that_was_set_are_put_back_to_the_times_at_which_they_were() -> None:
    changes = [(-float("inf"), 0.0), (100.0, 60.0), (200.0, -DAY_S), (300.0, 0.0)]
    true = [1.0, 50.0, 99.9, 100.1, 150.0, 199.0, 200.5, 201.0, 299.0, 301.0, 302.0]
    ahead = [0.0] * 3 + [60.0] * 3 + [-DAY_S] * 3 + [0.0] * 2
    times = TrueTimes(changes)
    told = [times.of(RoundStarted(at=at + by, round=1)) for at, by in zip(true, ahead, strict=True)]
    assert [event.at for event in told] == pytest.approx(true)
    # A time that two settings explain is that of the one under which nothing goes back.
    times = TrueTimes([(-float("inf"), 0.0), (100.0, 60.0), (200.0, 0.0)])
    assert [times.of(RoundStarted(at=at, round=1)).at for at in (90.0, 258.0, 205.0)] == [90.0, 198.0, 205.0]


def test_events_of_a_clock_that_never_was_set_are_as_they_are() -> None:
    times = TrueTimes([(-float("inf"), 0.0)])
    event = RoundStarted(at=5.0, round=1)
    assert times.of(event) is event


def test_a_node_that_has_a_clock_of_its_own_is_started_under_it() -> None:
    launch = Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), clock=Path("/o/nodes/2.clock"))
    command = node_command(launch)
    assert command[1:6] == ["-m", "shoal.testnet.wall_clock", "/o/nodes/2.clock", "shoal.cli.main", "run"]


# -- real nodes ----------------------------------------------------------------------------------------------


def test_nobody_in_a_swarm_notices_that_clocks_are_set_and_the_report_has_true_times(tmp_path: Path) -> None:
    faults = (
        Fault(kind="clock", node=1, round=2, phase="reduce", progress=0.5, ahead_s=9 * DAY_S),
        Fault(kind="clock", node=0, round=3, ahead_s=-1800.0, duration_s=2.0),
        Fault(kind="restart", node=1, round=5, phase="train", duration_s=0.5),
    )
    scenario = Scenario(nodes=3, rounds=7, workload="regression", inner_steps=5, codec="int8", faults=faults)
    report = run_real(scenario, tmp_path)
    assert [(fault.error, fault.unmet) for fault in report.faults] == [(None, None)] * 3
    assert [node.missed for node in report.nodes] == [()] * 3
    assert [entry.contributors for entry in report.rounds if entry.round in (2, 3, 4)] == [3, 3, 3]
    for node in report.nodes:  # by the machine's clock, though two of the logs are by others
        assert all(0 <= span.start_s <= (span.end_s or span.start_s) <= report.wall_s for span in node.spans)
    logged = [json.loads(line) for line in (tmp_path / "nodes" / "1" / "events.jsonl").read_text().splitlines()]
    certified = {event["round"]: event["at"] for event in logged if event["event"] == "certified"}
    assert certified[3] - certified[1] > 8 * DAY_S
    assert max(certified) >= 7
    assert certified[max(certified)] - certified[3] < 300, "after its restart its clock is as wrong as before"
