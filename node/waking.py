"""A machine that slept, as a laptop does with its lid closed, or a process that was stopped: noticed when it goes on.

The clock of a system that goes on while it sleeps is compared with the one that does not. A process that was stopped,
or had no processor for long, sees that both went on while it did not.

What was measured before holds no more: the speed is measured anew. After a sleep of CONNECTIONS_S the others' kernels
have given up what this one takes for connections, so that all are made anew. What the trainer learnt before is judged
by rounds (`Participation.stand_on_head`), and not here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from shoal.node.outcome import Notice
from shoal.node.parts import Parts
from shoal.node.reporting import events
from shoal.node.text import duration
from shoal.protocol.timeouts import next_beat

LOOK_S: Final = 2.0
LEAST_S: Final = 10.0
"""So long at least a machine slept, or a process stood still: less is a machine that has much to do."""
CONNECTIONS_S: Final = 20.0
"""After so long without an answer kernels end the connections of `shoal.swarm.muxer`, whatever was on its way."""

Clock = Callable[[], float]


@dataclass(slots=True)
class SleepWatch:
    """Seconds for which this process did not run. Called every LOOK_S.

    awake, all_time: clocks in seconds, of which the former stands still while the system sleeps.
    """

    awake: Clock
    all_time: Clock
    _awake_at: float = 0.0
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._awake_at, self._at = self.awake(), self.all_time()

    def look(self) -> tuple[float, float]:
        """Since the last look: how long the system slept, and how much later than LOOK_S this comes beside that."""
        awake_s, all_s = self.awake() - self._awake_at, self.all_time() - self._at
        self._awake_at, self._at = self._awake_at + awake_s, self._at + all_s
        return max(0.0, all_s - awake_s), max(0.0, awake_s - LOOK_S)


def system_watch() -> SleepWatch:
    """By the clocks of this system; where only one can be read no sleep is seen, but that of the process."""
    if sys.platform == "linux":
        return SleepWatch(
            awake=lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
            all_time=lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        )
    if sys.platform == "darwin":
        return SleepWatch(
            awake=lambda: time.clock_gettime(time.CLOCK_UPTIME_RAW),
            all_time=lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
        )
    return SleepWatch(awake=time.monotonic, all_time=time.monotonic)


class Waking:
    """Notices that this node did not run for long. A service of it. anew: makes all connections anew."""

    def __init__(
        self, parts: Parts, anew: Callable[[], None], *, watch: Callable[[], SleepWatch] = system_watch
    ) -> None:
        self._parts, self._anew, self._watch = parts, anew, watch

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look every LOOK_S until cancelled."""
        watch = self._watch()
        task_status.started()
        while True:
            await trio.sleep_until(next_beat(trio.current_time(), LOOK_S))
            slept_s, stood_s = watch.look()
            if slept_s + stood_s >= LEAST_S:
                self._woke(slept_s, slept_s + stood_s)

    def _woke(self, slept_s: float, away_s: float) -> None:
        parts = self._parts
        parts.events.write(events.Woke(seconds=round(away_s, 3)))
        parts.on_progress(Notice(text=woke_text(away_s)))
        parts.training_client.measure_anew()
        if slept_s >= CONNECTIONS_S:
            self._anew()
        parts.members.announce()


def woke_text(seconds: float) -> str:
    """Text for the user of a node that did not run for so long."""
    return f"this node did not run for {duration(seconds)}: it catches up, and its speed is measured anew"
