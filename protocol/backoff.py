"""Backoff: pauses between one try and the next that double until a limit."""

from __future__ import annotations


class Backoff:
    """Pauses of `first_s` seconds and then twice as long each time, up to `limit_s`, until it begins anew."""

    __slots__ = ("_first_s", "_limit_s", "pause_s")

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s = self.pause_s = first_s
        self._limit_s = limit_s

    def next_s(self) -> float:
        """Take the pause that is due; the one after it is longer."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, self._limit_s)
        return pause_s

    def reset(self) -> None:
        """Begin anew, with the first pause."""
        self.pause_s = self._first_s

    def note(self, *, failed: bool) -> None:
        """Make the next pause longer after a try that failed, and the first again after any other."""
        if failed:
            self.next_s()
        else:
            self.reset()

    def exhaust(self) -> None:
        """Make the next pause the longest."""
        self.pause_s = self._limit_s
