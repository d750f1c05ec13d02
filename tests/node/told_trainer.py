"""A trainer whose events can be waited for."""

from __future__ import annotations

import math
from typing import Any

import trio

from shoal.node.loops.external_trainer import ExternalTrainer
from shoal.node.training.trainer import Trainer, TrainerEvent


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
