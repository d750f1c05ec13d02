"""A trainer in memory whose work can be told apart: every stretch of training is a 1 at a place of its own.

What a swarm has learnt of a stretch is then what stands at its place, and nothing may stand there twice. By its own
accounts it does what `trainer_messages` asks of a trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import trio

from shoal.collectives.codecs import F32
from shoal.node.state.store import write_atomically
from shoal.node.training.trainer import TrainerEvent
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Command,
    Contribution,
    Evaluate,
    Evaluated,
    Initial,
    Layout,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
    Started,
    Train,
    Trained,
    WriteInitial,
)

TRAIN_S = 0.05
STRETCH_TOKENS = 100


class BoxTrainer:
    """One process of a trainer. `next_place` gives out places; `pace` is how many times as long it takes; `bias` is how
    far its machine draws the initial parameters from those of others; `hangs` is whether a step of it never ends."""

    def __init__(self, numel: int, *, tell: Callable[[TrainerEvent], None], next_place: Callable[[], int]) -> None:
        self.layout = Layout(names=("w",), shapes=((numel,),), numel=numel)
        self.started = Started(layout=self.layout, metric="distance", device="cpu")
        self.contribution: F32 = np.zeros(numel, np.float32)
        self.pace = 1.0
        self.bias = np.float32(0)
        self.snapshot_s = 0.0
        self.hangs = False
        self._tell = tell
        self._next_place = next_place
        self._numel = numel
        self._untaken: F32 = np.zeros(numel, np.float32)
        self._contributed: F32 = np.zeros(numel, np.float32)
        self._number = 0
        self._orders, self._received = trio.open_memory_channel[Command](64)
        self._training = trio.CancelScope()

    async def send(self, command: Command) -> None:
        """Take an order."""
        await self._orders.send(command)

    async def apply(self, order: Apply, anchor: F32) -> None:
        """Take an anchor."""
        await self.send(order)

    async def give_back_contribution(self) -> None:
        """Forget the contribution: nobody may read it now."""
        await trio.lowlevel.checkpoint()
        self.contribution.fill(np.nan)

    async def run(self) -> None:
        """Carry out orders, one after the other, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for order in self._received:
                if self.hangs:
                    self._training.cancel()
                    await trio.sleep_forever()
                if isinstance(order, Train):
                    self._training.cancel()
                    self._training = trio.CancelScope()
                    nursery.start_soon(self._train, order, self._training)
                elif isinstance(order, Snapshot):
                    nursery.start_soon(self._snapshot, order)
                else:
                    self._obey(order)

    def _obey(self, order: Command) -> None:
        if isinstance(order, WriteInitial):
            drawn = np.random.default_rng(0).standard_normal(self._numel).astype(np.float32)
            self.contribution[:] = drawn + self.bias
            self._tell(Initial())
        elif isinstance(order, Apply):
            self._training.cancel()
            if order.fresh:
                self._untaken[:] = 0
            elif self._number and order.taken == self._number:
                self._untaken -= self._contributed
            self._contributed[:] = 0
            self._tell(Applied(round=order.round))
        elif isinstance(order, Evaluate):
            self._tell(Evaluated(round=order.round, value=1.0))
        elif isinstance(order, Restore):
            self._tell(Restored(round=order.round, path=order.path, exact=order.exact))

    async def _train(self, order: Train, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(TRAIN_S * self.pace)
            self._untaken[self._next_place()] += 1
            if not order.contribute:
                self._tell(Trained(round=order.round, steps=1, loss=1.0, seconds=1.0, tokens_per_s=100.0))
                return
            self._contributed[:] = self._untaken
            self._number += 1
            self.contribution[:] = self._untaken
            self._tell(
                Contribution(
                    number=self._number,
                    round=order.round,
                    tokens=STRETCH_TOKENS * int(self._untaken.sum()),
                    steps=1,
                    loss=1.0,
                    seconds=1.0,
                    tokens_per_s=100.0,
                    order=order.order,
                )
            )

    async def _snapshot(self, order: Snapshot) -> None:
        await trio.sleep(self.snapshot_s)
        await trio.to_thread.run_sync(write_atomically, Path(order.path), b"moments")
        self._tell(Snapshotted(round=order.round, path=order.path, copy_s=0, write_s=0, size_bytes=0))
