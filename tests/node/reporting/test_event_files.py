"""The event log in two files: bounded, and read whole by whoever reads it, also while it grows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.node.dashboard.site import read_history
from shoal.node.reporting import event_files
from shoal.node.reporting.event_files import (
    EVENT_LOG_LIMIT_BYTES,
    LogFollower,
    blocks_of,
    earlier_of,
    read_end,
)
from shoal.node.reporting.event_log import EventLog, LogTail, read_kind, read_log
from shoal.node.reporting.events import Evaluated, Left
from shoal.node.rounds.evaluations import past_losses
from shoal.testnet.reports.report_log import SwarmRounds
from shoal.testnet.reports.report_log import read_history as read_for_report
from shoal.testnet.reports.report_merge import find_logs

LIMIT_BYTES = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def fill(path: Path, rounds: range, *, limit_bytes: int = LIMIT_BYTES) -> None:
    """A life of a node that evaluates these rounds."""
    log = EventLog(path, limit_bytes=limit_bytes)
    for round in rounds:
        log.write(Evaluated(round=round, loss=float(round), metric="loss"))
    log.close()


def lines_of(path: Path) -> list[bytes]:
    """The lines of both files."""
    return b"".join(blocks_of(path)).splitlines()


def rounds_in(lines: list[bytes]) -> list[int]:
    return [json.loads(line)["round"] for line in lines]


def test_log_takes_two_files_of_bounded_size_and_keeps_the_newest_events(path: Path) -> None:
    most = 0
    log = EventLog(path, limit_bytes=LIMIT_BYTES)
    for round in range(500):
        log.write(Evaluated(round=round, loss=1.0))
        sizes = [file.stat().st_size for file in path.parent.iterdir()]
        assert all(size <= LIMIT_BYTES for size in sizes)
        most = max(most, sum(sizes))
        kept = rounds_in(lines_of(path))
        assert kept == list(range(kept[0], round + 1))
        assert kept[0] == 0 or sum(sizes) >= LIMIT_BYTES
    log.close()
    assert LIMIT_BYTES < most <= 2 * LIMIT_BYTES
    assert sorted(file.name for file in path.parent.iterdir()) == ["events.1.jsonl", "events.jsonl"]


def test_node_s_log_has_that_limit(path: Path) -> None:
    EventLog(path).close()
    with path.open("ab") as file:
        file.truncate(EVENT_LOG_LIMIT_BYTES - 10)
    log = EventLog(path)
    log.write(Left(reason="told"))
    log.close()
    assert earlier_of(path).stat().st_size == EVENT_LOG_LIMIT_BYTES - 10 + len("\n"), "its last line is ended"
    assert rounds_missing(path) == ["left"]


def rounds_missing(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_bytes().splitlines()]


def test_log_whose_next_file_cannot_begin_grows_no_further_and_stops_no_node(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(log: Path) -> None:
        raise OSError(28, "No space left on device")

    log = EventLog(path, limit_bytes=LIMIT_BYTES)
    heard: list[object] = []
    log.listen(lambda event: heard.append(event.round if isinstance(event, Evaluated) else event))
    with monkeypatch.context() as patched:
        patched.setattr("shoal.node.reporting.event_log.start_anew", refuse)
        for round in range(200):
            log.write(Evaluated(round=round, loss=1.0))
    assert path.stat().st_size <= LIMIT_BYTES
    log.write(Evaluated(round=200, loss=1.0))
    log.close()
    assert heard == list(range(201))
    assert rounds_in(lines_of(path))[-1] == 200


def test_log_that_was_removed_begins_anew(path: Path) -> None:
    log = EventLog(path, limit_bytes=LIMIT_BYTES)
    log.write(Evaluated(round=0, loss=1.0))
    path.unlink()
    for round in range(1, 200):
        log.write(Evaluated(round=round, loss=1.0))
    log.close()
    assert rounds_in(lines_of(path))[-1] == 199


def test_node_killed_between_the_two_names_goes_on(path: Path) -> None:
    fill(path, range(3))
    path.replace(earlier_of(path))  # the one name was given, the other not yet
    assert rounds_in(lines_of(path)) == [0, 1, 2]
    fill(path, range(3, 5))
    assert rounds_in(lines_of(path)) == [0, 1, 2, 3, 4]


# -- those that read it ----------------------------------------------------------------------------------------


def test_every_reader_reads_both_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, range(1, 60))
    kept = rounds_in(lines_of(path))
    assert earlier_of(path).exists()
    newest = rounds_in(path.read_bytes().splitlines())
    assert kept[0] < newest[0]
    assert list(past_losses(path)) == kept
    assert [event.round for event in read_history(path) if isinstance(event, Evaluated)] == kept
    assert [event.round for event in LogTail(path).read() if isinstance(event, Evaluated)] == kept
    history = read_for_report(path, "a", SwarmRounds())
    assert (history.lines, history.damaged) == (len(kept), 0)
    assert find_logs([path.parent]) == [(path.parent.name, path)]
    assert find_logs([earlier_of(path), path]) == [(path.parent.name, path)]
    assert find_logs([earlier_of(path)]) == [("events.1", earlier_of(path))]


def test_line_that_a_crash_cut_short_spoils_no_other_file_s(path: Path) -> None:
    fill(path, range(3))
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"event":"evalu')
    path.replace(earlier_of(path))
    fill(path, range(3, 5))
    assert list(past_losses(path)) == [0, 1, 2, 3, 4]
    history = read_for_report(path, "a", SwarmRounds())
    assert (history.lines, history.damaged) == (5, 1)


@pytest.mark.parametrize("limit_bytes", [0, 1, 100, LIMIT_BYTES // 2, LIMIT_BYTES + 200, 1 << 20])
def test_end_is_whole_lines_over_both_files(path: Path, limit_bytes: int) -> None:
    fill(path, range(60))
    whole = b"".join(blocks_of(path))
    end = read_end(path, limit_bytes)
    assert whole.endswith(end)
    assert len(end) <= limit_bytes
    assert end == whole[len(whole) - len(end) :]
    assert not end or end in (whole, whole[whole.index(b"\n", len(whole) - len(end) - 1) + 1 :])


def test_there_is_nothing_to_read_without_a_log(path: Path) -> None:
    assert list(read_log(path)) == []
    assert LogFollower(path).read() == b""
    for read in (lambda: read_end(path, 9), lambda: list(blocks_of(path))):
        with pytest.raises(FileNotFoundError):
            read()


def follow(path: Path) -> Callable[[], list[int]]:
    tail = LogTail(path)
    return lambda: [event.round for event in tail.read() if isinstance(event, Evaluated)]


@pytest.mark.parametrize("every", [1, 7, 40])
def test_follower_reads_each_event_once_however_often_another_file_begins(path: Path, every: int) -> None:
    read, seen = follow(path), list[int]()
    log = EventLog(path, limit_bytes=LIMIT_BYTES)
    for round in range(400):
        log.write(Evaluated(round=round, loss=1.0))
        if round % every == 0:
            seen += read()
    seen += read()
    assert seen == list(range(400))
    assert earlier_of(path).exists()
    log.close()


def test_follower_that_comes_too_seldom_goes_on_with_what_there_is(path: Path) -> None:
    read = follow(path)
    fill(path, range(3))
    assert read() == [0, 1, 2]
    fill(path, range(3, 300))
    kept = rounds_in(lines_of(path))
    assert kept[0] > 3
    assert read() == kept
    fill(path, range(300, 303))
    assert read() == [300, 301, 302]


def test_follower_is_not_misled_by_an_inode_that_another_file_was_given(path: Path, tmp_path: Path) -> None:
    read = follow(path)
    fill(path, range(3))
    assert read() == [0, 1, 2]
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    fill(other, range(10, 20))
    path.write_bytes(other.read_bytes())  # the inode stays, and there is more in it than was read
    assert read() == list(range(10, 20))


def test_follower_reads_no_more_than_it_may_at_once(path: Path) -> None:
    fill(path, range(80))
    follower, pieces = LogFollower(path), list[bytes]()
    while piece := follower.read(100):
        assert len(piece) <= 100
        pieces.append(piece)
    assert b"".join(pieces) == b"".join(blocks_of(path))


def test_files_are_those_of_one_moment_though_names_change_twice_between_two_looks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, range(100), limit_bytes=1 << 20)
    plain, opened = Path.open, list[Path]()

    def open_then_change_names(self: Path, *arguments: Any, **options: Any) -> Any:
        file = plain(self, *arguments, **options)
        if arguments == ("rb",):
            opened.append(self)
            if opened == [path]:  # the first look: what it saw is gone from both names before the second
                for rounds in (range(100, 200), range(200, 300)):
                    event_files.start_anew(path).close()
                    fill(path, rounds, limit_bytes=1 << 20)
        return file

    monkeypatch.setattr(Path, "open", open_then_change_names)
    assert [event.round for event in read_kind(path, Evaluated)] == list(range(100, 300))


def test_log_is_read_whole_while_a_node_writes_it(path: Path) -> None:
    """No event is lost or comes twice for a reader between two of whose files the names change."""
    rounds, done = 3000, threading.Event()

    def write() -> None:
        fill(path, range(rounds))
        done.set()

    read, seen = follow(path), list[int]()
    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        seen += read()
        kept = [event.round for event in read_kind(path, Evaluated)]
        assert kept == list(range(kept[0], kept[-1] + 1)) if kept else True
    writer.join()
    seen += read()
    assert seen == sorted(set(seen))
    assert seen[-1] == rounds - 1
    assert path.name == event_files.LOG_NAME
