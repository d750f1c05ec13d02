"""The inner loops of some nodes side by side on this machine, with nobody to exchange anything with.

Each is the trainer process that a node starts, with the node's settings, device and threads. It makes the steps of as
many rounds as are measured, one stretch after another, and more where these are over in no time; who is through before
the others goes on until they are, so that all are measured beside as many others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import trio

from shoal.node.training.trainer import Restarted, Trainer, TrainerFailed, TrainerSpec
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Initial,
    InnerSettings,
    Progress,
    SyncSettings,
    Train,
    Trained,
    WriteInitial,
)
from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.manifest import Manifest
from shoal.testnet.bench.throughput_spec import WARM_UP_ROUNDS, Alone, Stretch, ThroughputBench

LOG: Final = "trainer{}.txt"
LEAST_S: Final = 1.0
"""Of warming up, and of measuring: a shorter look shows chance."""

Answer = TypeVar("Answer", Initial, Applied, Trained)


@dataclass(slots=True, eq=False)
class _Meeting:
    """All go on once so many are there."""

    missing: int
    all_there: trio.Event = field(default_factory=trio.Event)

    def arrive(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.all_there.set()

    async def attend(self) -> None:
        self.arrive()
        await self.all_there.wait()


async def run_alone(bench: ThroughputBench, manifest: Manifest, folder: Path) -> Alone:
    """Measure the inner loops; their logs go to `folder`.

    Raises WorkloadError, ConfigError (no such device), NetworkError (a trainer died), alone or in groups.
    Cancellation: all trainers are ended and reaped.
    """
    loops = [_Loop(bench, manifest, index, folder) for index in range(bench.nodes)]
    warm, done = _Meeting(bench.nodes), _Meeting(bench.nodes)
    async with trio.open_nursery() as nursery:
        for loop in loops:
            nursery.start_soon(loop.run, warm, done)
        await done.all_there.wait()
        nursery.cancel_scope.cancel()
    return Alone(loops=tuple(loop.stretch for loop in loops), device=loops[0].trainer.started.device)


class _Loop:
    """One trainer and its orders. `stretch` is there after `run`."""

    stretch: Stretch

    def __init__(self, bench: ThroughputBench, manifest: Manifest, index: int, folder: Path) -> None:
        self._bench = bench
        self._index = index
        self._steps = manifest.sync.round_steps
        self._round = 0
        self.trainer = Trainer(
            TrainerSpec(
                workload=manifest.workload.name,
                options=manifest.workload.options,
                seed=manifest.workload.seed,
                inner=InnerSettings.of(manifest),
                sync=SyncSettings.of(manifest),
                device=bench.device(index),
                threads=bench.threads,
                log_path=str(folder / LOG.format(index)),
            )
        )

    async def run(self, warm: _Meeting, done: _Meeting) -> None:
        """Train until cancelled, and arrive at `done` when all that is measured is."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.trainer.run)
            await self._stand_on_initial()
            warmed = (await self._train(WARM_UP_ROUNDS))[-1]
            await warm.attend()
            began = time.monotonic()
            made = await self._train(self._bench.rounds)
            steps = sum(trained.steps for trained in made)
            self.stretch = Stretch(
                tokens=steps * self._bench.tokens_per_step,
                steps=steps,
                wall_s=time.monotonic() - began,
                steps_s=made[-1].seconds - warmed.seconds,  # it counts on from one stretch to the next
            )
            done.arrive()
            while True:
                await self._train_round()

    async def _stand_on_initial(self) -> None:
        trainer = self.trainer
        await trainer.send(WriteInitial())
        await self._answer(Initial)
        np.copyto(trainer.anchor, trainer.contribution)
        await trainer.send(Apply(round=0))
        await self._answer(Applied)

    async def _train(self, rounds: int) -> list[Trained]:
        """Make the steps of so many rounds, and of more until `LEAST_S` have passed."""
        began, made = time.monotonic(), list[Trained]()
        while len(made) < rounds or time.monotonic() - began < LEAST_S:
            made.append(await self._train_round())
        return made

    async def _train_round(self) -> Trained:
        """Make the steps of one more round."""
        self._round += 1
        members = self._bench.nodes
        share = Assignment(seed=self._bench.seed, round=self._round, member=self._index, members=members)
        await self.trainer.send(Train(round=self._round, steps=self._steps, assignment=share, contribute=False))
        return await self._answer(Trained)

    async def _answer(self, kind: type[Answer]) -> Answer:
        """The next event of the trainer, which is to be of this kind, after any number of reports of progress."""
        async for event in self.trainer.events:
            if isinstance(event, kind):
                return event
            if isinstance(event, TrainerFailed):
                raise NetworkError(f"the inner loop failed: {event.summary}")
            if isinstance(event, Restarted):
                raise NetworkError(f"a trainer died: {event.cause}")
            if not isinstance(event, Progress):
                break
        raise LocalError(f"the trainer did not answer with {kind.__name__}")
