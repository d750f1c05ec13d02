"""The numbers of the event log, handed on as they are written to whatever else the user watches.

    EventLog ──(listener, any thread)──► bounded queue ──(one thread)──► sinks

A sink may be slow or fail without the node noticing: what the queue has no room for is left out and counted, and a sink
that raises is given up with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import trio

from shoal.node.options import NodeConfig
from shoal.node.reporting import events
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.event_sinks import ScalarSink, TensorBoardSink, WandbSink
from shoal.node.reporting.events import Event
from shoal.protocol.identity import PeerId

QUEUE_LIMIT: Final = 4096
CLOSE_DEADLINE_S: Final = 10.0

NUMBERS: Final[Mapping[type[Event], Mapping[str, str]]] = {
    events.Contributed: {
        "loss": "train/loss",
        "tokens": "train/tokens",
        "steps": "train/steps",
        "wall_s": "train/wall_s",
        "blocked_s": "train/blocked_s",
    },
    events.Evaluated: {"loss": "evaluation/loss"},
    events.Certified: {
        "contributors": "round/contributors",
        "coverage": "round/coverage",
        "tokens": "round/tokens",
        "reduce_s": "round/reduce_s",
        "total_s": "round/total_s",
        "lanes_sent": "bytes/lanes_sent",
        "lanes_received": "bytes/lanes_received",
        "control_sent": "bytes/control_sent",
        "control_received": "bytes/control_received",
    },
    events.Stepped: {
        "tokens": "round/tokens",
        "reduce_s": "round/reduce_s",
        "total_s": "round/total_s",
        "lanes_sent": "bytes/lanes_sent",
        "lanes_received": "bytes/lanes_received",
    },
    events.Rollouts: {
        "reward": "rollouts/reward",
        "external_reward": "rollouts/external_reward",
        "own": "rollouts/own_groups",
        "external": "rollouts/external_groups",
        "tokens": "rollouts/tokens",
        "entropy": "rollouts/entropy",
        "length": "rollouts/length",
        "distinct": "rollouts/distinct",
        "gradient_norm": "rollouts/gradient_norm",
        "clipped": "rollouts/clipped",
    },
    events.HeldOutReward: {"reward": "rollouts/held_out_reward"},
}
"""Which field of which event is written under which name: of those that are `Measured`."""

logger = logging.getLogger(__name__)

Measured = (
    events.Contributed | events.Evaluated | events.Certified | events.Stepped | events.Rollouts | events.HeldOutReward
)
OpenSink = Callable[[], ScalarSink]


def numbers_of(event: Measured) -> Iterator[tuple[str, float]]:
    """(name, value) of every number that is written of an event."""
    for field, name in NUMBERS[type(event)].items():
        value: float | None = getattr(event, field)
        if value is not None:
            yield name, float(value)
    if isinstance(event, events.Certified | events.Stepped):
        yield "round/members", float(len(event.members))


class EventWriters:
    """Hands the events of one log to sinks, which are opened in the thread that uses them."""

    def __init__(self, log: EventLog, sinks: Mapping[str, OpenSink], *, limit: int = QUEUE_LIMIT) -> None:
        self._log = log
        self._sinks = sinks
        self._queue: queue.Queue[Measured | None] = queue.Queue(limit)
        self._over = threading.Event()
        self.left_out = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled.

        Cancellation: what is in the queue is still written, for at most CLOSE_DEADLINE_S.
        """
        thread = threading.Thread(target=self._write, name="event writers", daemon=True)
        thread.start()
        self._log.listen(self._hear)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._over.set()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(partial(self._end, thread))

    def _hear(self, event: Event) -> None:
        """Queue an event, in whatever thread wrote it; never waits."""
        if self._over.is_set() or not isinstance(event, Measured):
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.left_out += 1

    def _end(self, thread: threading.Thread) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_DEADLINE_S)
        except queue.Full:
            logger.warning("what is written besides the event log is stuck and ends unfinished")
            return
        thread.join(CLOSE_DEADLINE_S)
        if self.left_out:
            logger.warning("%d events were not written besides the event log: it took too long", self.left_out)

    def _write(self) -> None:
        """Open the sinks and write the queued events to them: the thread's work."""
        sinks: dict[str, ScalarSink] = {}
        for name, opened in self._sinks.items():
            with _given_up(name, sinks):
                sinks[name] = opened()
        while (event := self._queue.get()) is not None:
            for number, value in numbers_of(event):
                for name, sink in list(sinks.items()):
                    with _given_up(name, sinks):
                        sink.scalar(number, value, round=event.round, at=event.at)
        for name, sink in list(sinks.items()):
            with _given_up(name, sinks):
                sink.close()


@contextlib.contextmanager
def _given_up(name: str, sinks: dict[str, ScalarSink]) -> Iterator[None]:
    """Take a sink whose library raises out of `sinks`, with a line in the log."""
    try:
        yield
    except Exception as error:  # a library of others, which has no business ending the node
        logger.warning("%s is given up: %s: %s", name, type(error).__name__, error)
        sinks.pop(name, None)


def writers_of(config: NodeConfig, peer: PeerId, events: EventLog) -> Sequence[EventWriters]:
    """The writers that the user asked for, or none."""
    sinks = dict[str, OpenSink]()
    if config.tensorboard is not None:
        sinks["tensorboard"] = partial(TensorBoardSink, config.tensorboard)
    if config.wandb is not None:
        sinks["wandb"] = partial(
            WandbSink,
            config.wandb,
            name=f"{config.manifest.swarm.name} {peer}",
            folder=config.data_dir,
        )
    return [EventWriters(events, sinks)] if sinks else []
