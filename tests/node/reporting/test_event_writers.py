"""What goes from the event log to TensorBoard's files and to Weights & Biases, and what a stuck or broken one costs.

Weights & Biases is not installed here and would need its server: its adapter runs against a module that keeps what it
is told.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import trio

from shoal.cli.main import execute
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.event_sinks import ScalarSink, TensorBoardSink, WandbSink, check_installed
from shoal.node.reporting.event_writers import NUMBERS, EventWriters, Measured, numbers_of
from shoal.node.reporting.events import Certified, Contributed, Evaluated, Linked
from shoal.protocol.errors import ConfigError
from tests.waiting import running

CERTIFIED = Certified(
    round=3,
    digest="aa",
    members=("a", "b"),
    contributors=2,
    coverage=1.0,
    tokens=640,
    reduce_s=1.5,
    total_s=2.5,
    lanes_sent=9,
)


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []
        self.closed = False

    def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
        self.told.append((name, value, round))

    def close(self) -> None:
        self.closed = True


def written(
    events: EventLog, sinks: dict[str, Callable[[], ScalarSink]], write: Callable[[], None], **limits: int
) -> EventWriters:
    """Run the writers while `write` writes, to their end."""

    async def run() -> EventWriters:
        writers = EventWriters(events, sinks, **limits)
        async with running(writers):
            await trio.to_thread.run_sync(write)
        return writers

    return trio.run(run)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl")
    yield log
    log.close()


def test_numbers_of_an_event() -> None:
    assert dict(numbers_of(CERTIFIED)) == {
        "round/contributors": 2.0,
        "round/coverage": 1.0,
        "round/tokens": 640.0,
        "round/reduce_s": 1.5,
        "round/total_s": 2.5,
        "round/members": 2.0,
        "bytes/lanes_sent": 9.0,
        "bytes/lanes_received": 0.0,
        "bytes/control_sent": 0.0,
        "bytes/control_received": 0.0,
    }
    assert list(numbers_of(Evaluated(loss=None, round=1))) == []


def test_every_number_is_a_field_of_its_event() -> None:
    assert set(NUMBERS) == set(get_args(Measured))
    for kind, names in NUMBERS.items():
        assert set(names) <= set(kind.__struct_fields__), kind


def test_all_that_was_written_reaches_the_sinks_before_the_end(events: EventLog) -> None:
    one, other = Kept(), Kept()

    def write() -> None:
        for number in range(1000):
            events.write(Evaluated(round=number, loss=float(number), metric="m"))
        events.write(Linked(peer="x"))

    writers = written(events, {"one": lambda: one, "other": lambda: other}, write)
    assert one.told == other.told == [("evaluation/loss", float(number), number) for number in range(1000)]
    assert (one.closed, other.closed, writers.left_out) == (True, True, 0)


def test_tensorboard_reads_what_was_written(events: EventLog, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")

    def write() -> None:
        events.write(Evaluated(round=2, loss=4.5, metric="bits per byte"))
        events.write(CERTIFIED)

    written(events, {"tensorboard": lambda: TensorBoardSink(tmp_path / "tb")}, write)
    (file,) = (tmp_path / "tb").iterdir()
    found = {
        value.tag: (value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value, event.step)
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found["evaluation/loss"] == (4.5, 2)
    assert found["round/tokens"] == (640.0, 3)


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("metric", name, step_metric))

    def log(self, numbers: dict[str, float]) -> None:
        self.calls.append(("log", numbers))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb_adapter_tells_rounds_and_finishes(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = FakeRun(), {}
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **arguments: asked.update(arguments) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    check_installed(tensorboard=False, wandb=True)

    def write() -> None:
        events.write(Evaluated(round=2, loss=4.5, metric="m"))
        events.write(Evaluated(round=3, loss=math.nan, metric="m"))

    written(events, {"wandb": lambda: WandbSink("shoal", name="x" * 500, folder=tmp_path)}, write)
    assert asked == {"project": "shoal", "name": "x" * 128, "dir": str(tmp_path)}
    assert run.calls == [
        ("metric", "round", None),
        ("metric", "*", "round"),
        ("log", {"round": 2, "evaluation/loss": 4.5}),
        "finish",
    ]


def test_a_stuck_sink_does_not_hold_up_the_node(events: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Stuck(Kept):
        def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
            begun.set()
            assert go_on.wait(60)
            super().scalar(name, value, round=round, at=at)

    stuck = Stuck()

    def write() -> None:
        events.write(Evaluated(round=0, loss=0.0, metric="m"))
        assert begun.wait(60)
        for number in range(1, 100):
            events.write(Evaluated(round=number, loss=0.0, metric="m"))
        go_on.set()

    writers = written(events, {"stuck": lambda: stuck}, write, limit=10)
    assert [round for _, _, round in stuck.told] == list(range(11))
    assert writers.left_out == 89
    assert "89 events were not written" in caplog.text


def test_a_broken_sink_is_given_up_alone(events: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kept):
        def scalar(self, name: str, value: float, *, round: int, at: float) -> None:
            raise RuntimeError("no server")

    def unopened() -> ScalarSink:
        raise OSError("no folder")

    whole = Kept()

    def write() -> None:
        for number in range(3):
            events.write(Evaluated(round=number, loss=0.0, metric="m"))

    with caplog.at_level(logging.WARNING):
        written(events, {"broken": Broken, "unopened": unopened, "whole": lambda: whole}, write)
    assert len(whole.told) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "unopened is given up: OSError: no folder",
        "broken is given up: RuntimeError: no server",
    ]


def test_a_library_that_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    for wanted, remedy in ((True, r"pip install 'shoal\[tensorboard\]'"), (False, "pip install wandb")):
        with pytest.raises(ConfigError, match=remedy):
            check_installed(tensorboard=wanted, wandb=not wanted)


def test_wandb_that_is_missing_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, data = tmp_path / "s.toml", tmp_path / "node"
    assert execute(["init", "--data-dir", str(data), "-o", str(manifest)]) == 0
    capsys.readouterr()
    assert (
        execute(["run", str(manifest), "--data-dir", str(data), "--wandb", "shoal", "--listen", "/ip4/127.0.0.1/tcp/0"])
        == 2
    )
    assert "pip install wandb" in capsys.readouterr().err


def test_a_number_that_json_cannot_say_is_null(events: EventLog, tmp_path: Path) -> None:
    events.write(Contributed(round=1, loss=math.nan, tokens=5))
    events.write(Contributed(round=2, loss=2.0, tokens=5))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["loss"], first["tokens"], second["loss"]) == (None, 5, 2.0)
