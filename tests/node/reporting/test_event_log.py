"""The event log: written on a disk without room; lines become typed events, however they arrive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from shoal.node.reporting.event_log import (
    EventLog,
    LogTail,
    line_of,
    parse_event,
    read_kind,
    read_last,
    read_log,
    scan_log,
)
from shoal.node.reporting.events import EVENTS, CaughtUp, Certified, Evaluated, Holding, Left, TaskRewards, UnknownEvent
from shoal.protocol.amending import Setting
from shoal.protocol.errors import ConfigError

FULL = Path("/dev/full")
HOLDING = b'{"at":1.5,"event":"holding","round":3,"phase":"reduce","progress":0.4}'


def test_event_behind_one_that_was_cut_short_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(HOLDING + b"\n" + HOLDING[:20])
    log = EventLog(path)
    log.write(Left())
    log.close()
    assert [type(event) for event in read_log(path)] == [Holding, Left]


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which is Linux's")
def test_a_full_disk_stops_neither_events_nor_their_end() -> None:
    log, heard = EventLog(FULL), list[object]()
    log.listen(lambda event: heard.append(event.name))
    log.write(CaughtUp(round=1))
    log.write(Left(reason="asked"))
    assert heard == ["caught_up", "left"]
    log.close()
    log.write(Left(reason="late"))
    with pytest.raises(OSError, match="No space left"), FULL.open("w") as file:
        file.write("this is what a full disk does")


def test_parse_event_reads_events_it_knows_and_the_head_of_others() -> None:
    assert parse_event(HOLDING) == Holding(at=1.5, round=3, phase="reduce", progress=0.4)
    assert parse_event(b'{"at":2,"event":"news","of":[1]}') == UnknownEvent(at=2.0, called="news")


def test_parse_event_steps_over_what_is_not_one() -> None:
    for line in (b"", HOLDING[:20], HOLDING[:20] + HOLDING, b"\xff", b'{"at":1,"event":"holding"}', b"[]"):
        assert parse_event(line) is None


def test_tail_reads_each_completed_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = LogTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(HOLDING[:30])
        assert tail.read() == []
        file.write(HOLDING[30:] + b"\n" + HOLDING + b"\n" + HOLDING[:9])
        assert len(tail.read()) == 2
        # The node was killed in the middle of a line, and a new one goes on after it.
        file.write(b'{"at":3,"event":"started"}\n' + HOLDING + b"\n")
        assert [event.name for event in tail.read()] == ["holding"]
    assert tail.skipped == 1
    assert tail.read() == []


def test_events_keep_their_fields() -> None:
    line = b'{"at":1,"event":"certified","term":"0.0","round":2,"digest":"ab","value":"cd","members":["x"],"view":0}'
    event = parse_event(line)
    assert isinstance(event, Certified)
    assert (event.term, event.round, event.digest, event.members) == ("0.0", 2, "ab", ("x",))


def test_tail_takes_half_lines_later_and_reads_a_replaced_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = LogTail(path, from_end_bytes=1000)
    assert tail.read() == []
    path.write_bytes(b'{"at":1,"event":"started"}\nnonsense\n{"at":2,"eve')
    assert [event.name for event in tail.read()] == ["started"]
    with path.open("ab") as file:
        file.write(b'nt":"left"}\n')
    assert [event.name for event in tail.read()] == ["left"]
    path.write_bytes(b'{"at":3,"event":"failed"}\n')
    assert [event.name for event in tail.read()] == ["failed"]


def test_an_event_is_read_as_it_was_written() -> None:
    for name, kind in EVENTS.items():
        values = {field.name: _value_of(field.type) for field in msgspec.structs.fields(kind)}
        event = kind(**values)
        assert event.name == name
        assert parse_event(line_of(event)) == event
        assert line_of(event).startswith(b'{"at":1.5,"event":"' + name.encode() + b'"')


def _value_of(declared: object) -> Any:
    """Some value of a field's type that is not its default."""
    for kind, value in _VALUES.items():
        if declared == kind:
            return value
    raise AssertionError(declared)


_VALUES: Final[dict[object, object]] = {
    float: 1.5,
    float | None: 1.5,
    int: 3,
    int | None: 3,
    bool: True,
    str: "a\n",
    str | None: "é",
    tuple[str, ...]: ("a", "b"),
    Mapping[str, int]: {"a": 1},
    Mapping[str, float]: {"a": 0.5},
    Mapping[str, str]: {"a\n": "\x1b"},
    Mapping[str, TaskRewards]: {"a": TaskRewards(own=1, reward=0.5, external=2, external_reward=0.25)},
    Mapping[str, Setting]: {"sync.inner_steps": 3, "audit.work": 0.5, "a": True, "b": "c"},
}


def test_a_line_of_another_version_is_read_as_far_as_it_is_known() -> None:
    assert parse_event(b'{"at":1,"event":"certified","round":2,"digest":"ab","mood":{"of":[1]}}') == Certified(
        at=1.0, round=2, digest="ab"
    )
    assert parse_event(b'{"at":1,"event":"evaluated","round":2,"loss":null}') == Evaluated(at=1.0, round=2, loss=None)


def test_whole_log_is_read_over_what_is_damaged(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert list(read_log(log)) == []
    for read in (lambda: list(scan_log(log)), lambda: read_last(log, 100)):
        with pytest.raises(FileNotFoundError):
            read()
    log.write_bytes(HOLDING + b"\nnonsense\n" + line_of(CaughtUp(at=2.0, round=7)) + HOLDING)
    holding = Holding(at=1.5, round=3, phase="reduce", progress=0.4)
    assert list(scan_log(log)) == [holding, None, CaughtUp(at=2.0, round=7), None]
    assert list(read_log(log)) == [holding, CaughtUp(at=2.0, round=7)]
    assert list(read_kind(log, CaughtUp)) == [CaughtUp(at=2.0, round=7)]
    log.write_bytes(HOLDING + b"\n" + line_of(CaughtUp(at=2.0, round=7)))
    assert read_last(log, len(HOLDING)) == [CaughtUp(at=2.0, round=7)]


def test_log_that_is_a_pipe_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match=r"events\.jsonl is a pipe; move it away"):
        EventLog(tmp_path / "events.jsonl")
