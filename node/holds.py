"""Test mode: points at which a node stops until it is told to go on, so that a fault hits exactly there.

`at` is for the daemon's own tasks, `at_in_thread` for the lanes' threads. Both write a `holding` event when they stop.
"""

from __future__ import annotations

import threading

import trio

from shoal.node.options import Hold
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.events import Holding, Released

HOLD_LIMIT_S = 120.0
"""A hold of which nobody says anything for so long ends by itself: nothing waits for ever, not even a test."""


class Holds:
    """The holds of one run; each is met once."""

    def __init__(self, holds: tuple[Hold, ...], events: EventLog) -> None:
        self._waiting = list(holds)
        self._events = events
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._renewed = threading.Event()

    def replace(self, holds: tuple[Hold, ...]) -> None:
        """Hold at these points from now on, instead of those not met yet."""
        with self._lock:
            self._waiting = list(holds)

    def release(self) -> None:
        """Let whatever holds go on."""
        self._released.set()

    def renew(self) -> None:
        """Have whatever holds wait for another HOLD_LIMIT_S once it has done so."""
        self._renewed.set()

    def _meet(self, round: int, phase: str, progress: float) -> Hold | None:
        with self._lock:
            for hold in self._waiting:
                if hold.round == round and hold.phase == phase and progress >= hold.progress:
                    self._waiting.remove(hold)
                    self._released.clear()
                    self._renewed.clear()
                    self._events.write(Holding(round=round, phase=phase, progress=round_to(progress)))
                    return hold
        return None

    def _stand(self) -> None:
        while not self._released.wait(HOLD_LIMIT_S) and self._renewed.is_set():
            self._renewed.clear()

    def at_in_thread(self, round: int, phase: str, progress: float = 0.0) -> None:
        """Stop this thread here if a hold says so."""
        hold = self._meet(round, phase, progress)
        if hold is not None:
            self._stand()
            self._events.write(Released(round=round, phase=phase))

    async def at(self, round: int, phase: str, progress: float = 0.0) -> None:
        """Stop this task here if a hold says so."""
        hold = self._meet(round, phase, progress)
        if hold is not None:
            await trio.to_thread.run_sync(self._stand, abandon_on_cancel=True)
            self._events.write(Released(round=round, phase=phase))


def round_to(progress: float) -> float:
    """Progress as it stands in events: three decimals."""
    return round(progress, 3)
