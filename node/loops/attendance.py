"""Participation of this node: it observes while its user has paused it, and while its training loop is away.

Either is enough to make it an observer, and neither ends the other: a loop that attaches to a node that its user paused
waits until the user says `shoal resume`, and a node that is resumed while no loop is attached goes on observing, so
that no round waits for one.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.loops.external_trainer import Detached
from shoal.node.outcome import Notice, Progress
from shoal.node.training.trainer import Restarted, TrainerEvent
from shoal.protocol.inputs import SetPaused


class Attendance:
    """Attendance of this node, which it reports to the engine. put: gives the engine an input."""

    def __init__(self, *, put: Callable[[SetPaused], None], on_progress: Callable[[Progress], None]) -> None:
        self._put = put
        self._on_progress = on_progress
        self._paused = False  # by the user
        self._away = False  # the loop that was attached

    def pause(self, paused: bool) -> None:
        """Set the user's wish, which holds until the next one."""
        self._paused = paused
        self._put(SetPaused(paused or self._away))

    def heard(self, event: TrainerEvent) -> None:
        """Take note of a trainer's report: a loop is gone, or another has taken its place."""
        if isinstance(event, Detached):
            self._on_progress(Notice(text=f"{event.cause}; this node takes part as an observer until one attaches"))
            self._away = True
        elif isinstance(event, Restarted) and self._away:
            self._away = False
        else:
            return
        if not self._paused:
            self._put(SetPaused(self._away))
