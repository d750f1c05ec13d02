"""Event log, with its one writer and its one reader: one JSON object a line, appended as things happen.

What can stand there is declared in `events`; the two files of bounded size that hold it are `event_files`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from shoal.node.reporting.event_files import (
    EVENT_LOG_LIMIT_BYTES,
    LogFollower,
    blocks_of,
    ends_a_line,
    read_end,
    start_anew,
)
from shoal.node.reporting.events import EVENTS, Event, UnknownEvent
from shoal.protocol.errors import ConfigError

LINE_LIMIT_BYTES: Final = 1 << 20
"""A line that is longer is none."""

Listener = Callable[[Event], None]
E = TypeVar("E", bound=Event)

logger = logging.getLogger(__name__)


# -- writing -----------------------------------------------------------------------------------------------------------


class EventLog:
    """Appends events to `events.jsonl`; safe to call from any thread, never raises for a full disk.

    limit_bytes: when the file would be larger another begins; where none can, later events are left out of it.
    Each line has `at` (wall clock, seconds to the microsecond), `event`, and the event's own fields.
    """

    def __init__(self, path: Path, *, limit_bytes: int = EVENT_LOG_LIMIT_BYTES) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._limit_bytes = limit_bytes
        if path.is_fifo():
            raise ConfigError(f"{path} is a pipe; move it away: others can read the log as it grows")
        self._file: BinaryIO = path.open("ab+")
        with suppress(OSError):
            if not ends_a_line(self._file):  # as a node left it that did not live to end it
                self._file.write(b"\n")
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Let `listener` hear every later event as it is written, in the thread that wrote it; it must be quick."""
        self._listeners.append(listener)

    def write(self, event: Event) -> None:
        """Append one event, as of now."""
        event = msgspec.structs.replace(event, at=round(time.time(), 6))
        line = line_of(event)
        # A log that cannot be written must not stop the node; the store reports a full disk.
        with self._lock, suppress(OSError):
            if not self._file.closed:
                self._make_room(len(line))
                self._file.write(line)
                self._file.flush()
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of the event log failed")

    def _make_room(self, more_bytes: int) -> None:
        """Begin another file where this one would be too large. Raises OSError."""
        size = os.fstat(self._file.fileno()).st_size
        if size and size + more_bytes > self._limit_bytes:
            file = start_anew(self._path)
            full, self._file = self._file, file
            full.close()

    def close(self) -> None:
        """Close the file; later events are lost."""
        with self._lock, suppress(OSError):  # as in `write`: what the disk had no room for is still in the buffer
            self._file.close()


def line_of(event: Event) -> bytes:
    """The line of an event: `at` first, by which a file is known. What is no finite number becomes null."""
    record = {"at": event.at, **msgspec.to_builtins(event)}
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        text = json.dumps(finite, separators=(",", ":"))
    return text.encode() + b"\n"


# -- reading -----------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, frozen=True):
    at: float
    event: str


_head = msgspec.json.Decoder(_Head)
_decoders: Final = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}


def parse_event(line: bytes) -> Event | None:
    """The event that a line holds; None if it is cut short, or not one. Of an unknown one, its time and name."""
    try:
        head = _head.decode(line)
        decoder = _decoders.get(head.event)
        return UnknownEvent(at=head.at, called=head.event) if decoder is None else decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def scan_log(log: Path) -> Iterator[Event | None]:
    """All events of a log, both files of it, oldest first; None for each line that is none.

    Memory is bounded, whatever the file holds. Raises OSError, if there is no log among others.
    """
    return (None if line is None else parse_event(line) for line in _lines(blocks_of(log)))


def read_log(log: Path) -> Iterator[Event]:
    """All events of a log, both files of it, oldest first; none where there is no log. Raises OSError."""
    with suppress(FileNotFoundError):
        yield from (event for event in scan_log(log) if event is not None)


def read_kind(log: Path, kind: type[E]) -> Iterator[E]:
    """Read the events of one kind from a log."""
    return (event for event in read_log(log) if isinstance(event, kind))


def read_last(log: Path, limit_bytes: int) -> list[Event]:
    """The events of the last so many bytes of a log. Raises OSError if there is none."""
    found = map(parse_event, read_end(log, limit_bytes).split(b"\n"))
    return [event for event in found if event is not None]


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """The lines of a log, None for one that is too long or that no line break ends; blank ones are none."""
    rest, skipping = b"", False
    for block in blocks:
        first, *others = (rest + block).split(b"\n")
        complete = [first, *others][:-1]
        rest = others[-1] if others else first
        if skipping and complete:
            complete, skipping = complete[1:], False
            yield None
        yield from (line for line in complete if line)
        if skipping or len(rest) > LINE_LIMIT_BYTES:
            rest, skipping = b"", True
    if rest or skipping:
        yield None


class LogTail:
    """Reads the events that were appended to a log since the last look.

    from_end_bytes: how much before the end it begins; None for the beginning. skipped: lines so far that are no events.
    """

    def __init__(self, log: Path, *, from_end_bytes: int | None = None) -> None:
        self._follower = LogFollower(log, from_end_bytes=from_end_bytes)
        self._rest = b""
        self.skipped = 0

    def read(self, limit_bytes: int | None = None) -> list[Event]:
        """Read the events completed since, of at most `limit_bytes`; none if there is no log yet. Raises OSError."""
        *lines, self._rest = (self._rest + self._follower.read(limit_bytes)).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
        events = [parse_event(line) for line in lines]
        self.skipped += sum(event is None for event in events)
        return [event for event in events if event is not None]
