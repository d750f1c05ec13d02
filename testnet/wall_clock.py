"""The wall clock of one node, which a fault sets while the node runs: a file says how far it is from the machine's.

    python -m shoal.testnet.wall_clock FILE MODULE ARGUMENT…

The machine's clock cannot be set for one node alone. So a node whose clock is to be set is started by this line: it has
`time` answer with what the file adds, and becomes the module. Nothing of the node is imported before, so none of its
parts keeps the true clock. Monotonic clocks go on as they are, as they do where a clock is set; so do times of files,
the node's trainer, which tells no time, and what no node asks: `datetime`, and `localtime` of nothing.

The node's log is then told by a clock that jumps; `TrueTimes` puts its events back to the times of the machine.
"""

from __future__ import annotations

import math
import mmap
import runpy
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from shoal.node.reporting.events import Event

E = TypeVar("E", bound="Event")
Change = tuple[float, float]
"""When a clock was set, by the machine's, and how far it is ahead of that since, both in seconds."""

AHEAD_LIMIT_S: Final = 90 * 86_400.0
AHEAD_LEAST_S: Final = 30.0
"""A clock that is set by less cannot be told from one that is late to log."""
SLACK_S: Final = 5.0
"""Events stand in a log this much out of order at the most."""
_AHEAD: Final = struct.Struct("<d")
_NS: Final = 1_000_000_000


class WallClock:
    """The clock of one node, and when it was set: in a new file, as right as the machine's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: list[Change] = [(-math.inf, 0.0)]
        path.write_bytes(_AHEAD.pack(0.0))

    def set(self, ahead_s: float) -> None:
        """Set it so far ahead of the machine's, or behind, for all processes that read it. Blocks for a moment."""
        self.changes.append((time.time(), ahead_s))
        with self.path.open("r+b", buffering=0) as file:
            file.write(_AHEAD.pack(ahead_s))


class TrueTimes:
    """Times of one node's events by the machine's clock, for events in the order in which they stand in its log.

    changes: when the node's clock was set; more may come.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self._at = 0
        self._last = -math.inf

    def of(self, event: E) -> E:
        """The event with the time of the machine's clock."""
        ahead_s = self._changes[self._find(event.at)][1]
        if not ahead_s:
            self._last = max(self._last, event.at)
            return event
        true = round(event.at - ahead_s, 6)
        self._last = max(self._last, true)
        return msgspec.structs.replace(event, at=true)

    def _find(self, at: float) -> int:
        """The first setting, from the last event's on, under which this time is none before that event's."""
        for place in range(self._at, len(self._changes)):
            begun, ahead_s = self._changes[place]
            ended = self._changes[place + 1][0] if place + 1 < len(self._changes) else math.inf
            if max(self._last, begun) - SLACK_S <= at - ahead_s <= ended + SLACK_S:
                self._at = place
                break
        return self._at


# -- in the node's process -----------------------------------------------------------------------------------


def shift(path: Path) -> None:
    """Have this process's `time` be as far from the machine's clock as the file says, whenever it is asked."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), _AHEAD.size, access=mmap.ACCESS_READ)

    def ahead_s() -> float:
        found: float = _AHEAD.unpack_from(mapped)[0]
        return found

    def ahead_ns() -> int:
        return int(ahead_s() * _NS)

    time.time = time.clock_gettime = _Shifted(time.clock_gettime, ahead_s)
    time.time_ns = time.clock_gettime_ns = _Shifted(time.clock_gettime_ns, ahead_ns)


class _Shifted:
    """A function of `time` that adds something to the wall clock. As those it is none that a class would bind."""

    def __init__(self, told: Callable[..., Any], ahead: Callable[[], Any]) -> None:
        self._told, self._ahead = told, ahead

    def __call__(self, which: int = time.CLOCK_REALTIME) -> Any:
        return self._told(which) + (self._ahead() if which == time.CLOCK_REALTIME else 0)


def main() -> None:
    """Become the module of the command line, under the clock of the file."""
    path, module, *arguments = sys.argv[1:]
    shift(Path(path))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
