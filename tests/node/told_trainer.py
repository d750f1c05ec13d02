"""A trainer whose events can be waited for."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from shoal.node.loops.external_trainer import ExternalTrainer
from shoal.node.training.trainer import Trainer, TrainerEvent, TrainerSpec
from shoal.node.training.trainer_messages import Evaluating, Progress

Event = TypeVar("Event")


class ToldTrainer(Trainer):
    """`events` has what it told, and ends with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._telling, self.events = trio.open_memory_channel[TrainerEvent](math.inf)
        self.listen(self._telling.send_nowait)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._telling:
            await super().run(task_status=task_status)


class ToldLoop(ToldTrainer, ExternalTrainer):
    """The same of a loop of the user's own."""


@asynccontextmanager
async def running(spec: TrainerSpec) -> AsyncIterator[ToldTrainer]:
    trainer = ToldTrainer(spec)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        yield trainer
        nursery.cancel_scope.cancel()


async def expect(trainer: ToldTrainer, kind: type[Event]) -> Event:
    """Return the next event, those that say how far it is apart, which must be of `kind`."""
    async for event in trainer.events:
        if not isinstance(event, Progress | Evaluating):
            assert isinstance(event, kind), event
            return event
    raise AssertionError("the events ended")
