"""Participation of this node: it observes while its user has paused it, while its training loop is away, and when its
user does not want it to train.

Each is enough to make it an observer, and none ends another: a loop that attaches to a node that its user paused waits
until the user says `shoal resume`, and a node that is resumed while no loop is attached, or at a time that its user did
not mean (`--only-when`), goes on observing, so that no round waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shoal.node.loops.external_trainer import Detached
from shoal.node.outcome import Notice, Progress
from shoal.node.training.trainer import Restarted, TrainerEvent
from shoal.protocol.inputs import SetPaused

WAITS_MARK: Final = "(--only-when)"
"""At the end of a reason that no order to go on takes away."""
AWAY: Final = "no training loop is attached"
"""The reason that its user takes away by starting the loop again."""


class Attendance:
    """Attendance of this node, which it reports to the engine. put: gives the engine an input."""

    def __init__(self, *, put: Callable[[SetPaused], None], on_progress: Callable[[Progress], None]) -> None:
        self._put = put
        self._on_progress = on_progress
        self._paused = False  # by the user
        self._away = False  # the loop that was attached
        self._waits = ""

    @property
    def why(self) -> str:
        """Why this node trains nothing now; empty while it does."""
        reasons = (
            "its user paused it" if self._paused else "",
            AWAY if self._away else "",
            f"{self._waits} {WAITS_MARK}" if self._waits else "",
        )
        return "; ".join(filter(None, reasons))

    def pause(self, paused: bool) -> None:
        """Set the user's wish, which holds until the next one."""
        changed, self._paused = paused != self._paused, paused
        if changed:
            goes_on = f"resumed, and training waits: {self.why}" if self.why else "training goes on"
            self._on_progress(Notice(text="training pauses: its user said so" if paused else goes_on))
        self._put(SetPaused(bool(self.why)))

    def wait(self, why: str) -> None:
        """Observe for as long as this is not the time to train; with an empty reason it is."""
        if not (self._paused or self._away) and (bool(why) != bool(self._waits)):
            self._on_progress(Notice(text=f"training waits: {why} {WAITS_MARK}" if why else "training goes on"))
        self._waits = why
        self._put(SetPaused(bool(self.why)))

    def heard(self, event: TrainerEvent) -> None:
        """Take note of a trainer's report: a loop is gone, or another has taken its place."""
        if isinstance(event, Detached):
            self._on_progress(Notice(text=f"{event.cause}; this node takes part as an observer until one attaches"))
            self._away = True
        elif isinstance(event, Restarted) and self._away:
            self._away = False
        else:
            return
        self._put(SetPaused(bool(self.why)))
