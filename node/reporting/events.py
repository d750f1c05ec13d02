"""The node's event log: one JSON object a line, appended as things happen, for people and tools to read later.

It is kept in two files of bounded size (`event_files`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoal.node.reporting.event_files import EVENT_LOG_LIMIT_BYTES, start_anew

Scalar = str | int | float | bool | None
EventField = Scalar | Sequence[str] | Mapping[str, Scalar]
Listener = Callable[[Mapping[str, EventField]], None]

logger = logging.getLogger(__name__)


class EventLog:
    """Appends events to `events.jsonl`; safe to call from any thread, never raises for a full disk.

    limit_bytes: when the file would be larger another begins; where none can, later events are left out of it.
    Each line has `at` (wall clock, seconds to the microsecond, for people and benchmarks: no meaning depends on it),
    `event`, and the event's own fields as listed in docs/interfaces.md.
    """

    def __init__(self, path: Path, *, limit_bytes: int = EVENT_LOG_LIMIT_BYTES) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._limit_bytes = limit_bytes
        self._file: BinaryIO = path.open("ab")
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Let `listener` hear every later event as it is written, in the thread that wrote it; it must be quick."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: EventField) -> None:
        """Append one event."""
        record = {"at": round(time.time(), 6), "event": event, **fields}
        line = _line(record).encode() + b"\n"
        # A log that cannot be written must not stop the node; the store reports a full disk.
        with self._lock, suppress(OSError):
            if not self._file.closed:
                self._make_room(len(line))
                self._file.write(line)
                self._file.flush()
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:
                logger.exception("a listener of the event log failed")

    def _make_room(self, more_bytes: int) -> None:
        """Begin another file where this one would be too large. Raises OSError."""
        size = os.fstat(self._file.fileno()).st_size
        if size and size + more_bytes > self._limit_bytes:
            file = start_anew(self._path, self._limit_bytes)
            full, self._file = self._file, file
            full.close()

    def close(self) -> None:
        """Close the file; later events are lost."""
        with self._lock, suppress(OSError):  # as in `write`: what the disk had no room for is still in the buffer
            self._file.close()


def _line(record: Mapping[str, EventField]) -> str:
    """One JSON object; what is no finite number, which JSON cannot say, becomes null."""
    try:
        return json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        return json.dumps(finite, separators=(",", ":"))
