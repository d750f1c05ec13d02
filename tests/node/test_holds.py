"""Holds: met once, at their point and no earlier, released on command, and never for ever."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from shoal.node import holds as holds_module
from shoal.node.holds import Holds, round_to
from shoal.node.options import Hold
from shoal.node.reporting.event_log import EventLog
from shoal.protocol.errors import ConfigError
from tests.waiting import until


@dataclass
class Log:
    events: EventLog
    path: Path

    def read(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [{key: value for key, value in line.items() if key != "at"} for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    yield Log(events, path)
    events.close()


async def test_task_is_held_at_its_point_until_released(log: Log) -> None:
    holds = Holds((Hold(round=2, phase="certify"),), log.events)
    await holds.at(1, "certify")
    await holds.at(2, "plan")
    assert log.read() == []
    passed = trio.Event()

    async def pass_it() -> None:
        await holds.at(2, "certify")
        passed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_it)
        await until(lambda: log.read())
        assert not passed.is_set()
        assert log.read() == [{"event": "holding", "round": 2, "phase": "certify", "progress": 0.0}]
        holds.release()
    assert passed.is_set()
    assert log.read()[1:] == [{"event": "released", "round": 2, "phase": "certify"}]
    await holds.at(2, "certify")  # met once
    assert len(log.read()) == 2


async def test_thread_is_held_once_progress_is_reached(log: Log) -> None:
    holds = Holds((Hold(round=1, phase="reduce", progress=0.5),), log.events)
    passed: list[float] = []

    def work() -> None:
        for progress in (0.2, 0.4, 0.60001, 0.8):
            holds.at_in_thread(1, "reduce", progress)
            passed.append(progress)

    thread = threading.Thread(target=work)
    thread.start()
    await until(lambda: log.read())
    assert passed == [0.2, 0.4]
    assert log.read() == [{"event": "holding", "round": 1, "phase": "reduce", "progress": 0.6}]
    holds.release()
    thread.join(5)
    assert passed == [0.2, 0.4, 0.60001, 0.8]


def test_release_before_a_hold_does_not_release_it(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "HOLD_LIMIT_S", 0.05)
    holds = Holds((Hold(round=1, phase="train"), Hold(round=2, phase="train")), log.events)
    for round in (1, 2):
        holds.release()
        began = time.monotonic()
        holds.at_in_thread(round, "train")
        assert time.monotonic() - began >= 0.05
    assert [entry["event"] for entry in log.read()] == ["holding", "released"] * 2


async def test_hold_that_nobody_releases_ends_by_itself(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "HOLD_LIMIT_S", 0.05)
    holds = Holds((Hold(round=1, phase="plan"), Hold(round=1, phase="reduce")), log.events)
    await holds.at(1, "plan")
    holds.at_in_thread(1, "reduce", 1.0)
    assert [entry["event"] for entry in log.read()] == ["holding", "released"] * 2


def test_hold_that_is_renewed_lasts_as_long_again_and_no_longer(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    holds = Holds((Hold(round=1, phase="train"), Hold(round=2, phase="train")), log.events)
    renewals = iter([True, True, False, False])

    def wait(limit_s: float) -> bool:
        waits.append(limit_s)
        if next(renewals):
            holds.renew()
        return False

    monkeypatch.setattr(holds._released, "wait", wait)
    holds.at_in_thread(1, "train")
    assert waits == [holds_module.HOLD_LIMIT_S] * 3
    holds.renew()  # before the next is met: of no account for it
    holds.at_in_thread(2, "train")
    assert waits == [holds_module.HOLD_LIMIT_S] * 4


async def test_cancelled_hold_is_left_at_once(log: Log) -> None:
    holds = Holds((Hold(round=1, phase="plan"),), log.events)
    with trio.move_on_after(0.05) as scope:
        await holds.at(1, "plan")
    assert scope.cancelled_caught
    holds.release()


def test_hold_is_parsed_from_its_text() -> None:
    assert Hold.parse("3:reduce:0.4") == Hold(round=3, phase="reduce", progress=0.4)
    assert Hold.parse("1:train") == Hold(round=1, phase="train")
    for text in ("", "3", "x:train", "3:sleep", "3:reduce:2", "3:reduce:nan", "3:reduce:x", "3:reduce:-0.1"):
        with pytest.raises(ConfigError) as caught:
            Hold.parse(text)
        assert "\n" not in str(caught.value)
        assert repr(text) in str(caught.value)


def test_progress_in_events_has_three_decimals() -> None:
    assert [round_to(progress) for progress in (0.0, 1 / 3, 0.99999, 1.0)] == [0.0, 0.333, 1.0, 1.0]
