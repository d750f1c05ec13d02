"""The node's event log: one JSON object a line, appended as things happen, for people and tools to read later."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

Scalar = str | int | float | bool | None
EventField = Scalar | Sequence[str] | Mapping[str, Scalar]


class EventLog:
    """Appends events to `events.jsonl`; safe to call from any thread, never raises for a full disk.

    Each line has `at` (wall clock, seconds to the microsecond, for people and benchmarks: no meaning depends on it),
    `event`, and the event's own fields as listed in docs/protocol.md.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: EventField) -> None:
        """Append one event."""
        line = json.dumps({"at": round(time.time(), 6), "event": event, **fields}, separators=(",", ":"))
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError:
                return  # a log that cannot be written must not stop the node; the store reports a full disk

    def close(self) -> None:
        """Close the file; later events are lost."""
        with self._lock:
            self._file.close()
