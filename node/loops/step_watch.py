"""A look at whether a training loop calls `Swarm.step`, from a thread of its own: the loop's code is not entered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StepWatch:
    """Tells of each `period_s` in which no step was said, between `begin` and `end`.

    tell: called in the watch's thread with the seconds since the last call, and only if `is_wanted` then.
    """

    def __init__(self, *, period_s: float, is_wanted: Callable[[], bool], tell: Callable[[float], None]) -> None:
        self._period_s = period_s
        self._is_wanted = is_wanted
        self._tell = tell
        self._since: float | None = None  # when the loop went on by itself; None while a call waits for the swarm
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal steps", daemon=True)

    def begin(self) -> None:
        """Watch from here on, once."""
        self.called(waits=False)
        self._thread.start()

    def called(self, *, waits: bool) -> None:
        """Note that `step` is called, and waits for the swarm; or that it is done."""
        self._since = None if waits else time.monotonic()

    def end(self) -> None:
        """Have the thread end."""
        self._ended.set()

    def _watch(self) -> None:
        wait_s = self._period_s
        while not self._ended.wait(wait_s):
            since = self._since
            silent_s = 0.0 if since is None else time.monotonic() - since
            wait_s = self._period_s - silent_s
            if wait_s <= 0:
                wait_s = self._period_s
                if self._is_wanted():
                    self._tell(silent_s)
