"""A node of which nothing is left but its trainer: the inner loop, one stretch after another, until it is ended.

    python -m shoal.lab.bench.throughput_loop MANIFEST FOLDER NODE DEVICE THREADS

It is started as a daemon is, so that the system gives its trainer as much of the machine, starts the trainer as a
daemon does, with the manifest's settings, and then does nothing but order the steps of one more round. Each stretch is
an event `contributed` in FOLDER, as of a node; before the first, `device` is there, a file that names it.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Final, TypeVar

import trio

from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.events import Contributed
from shoal.node.training.trainer import Restarted, Trainer, TrainerEvent, TrainerFailed, TrainerSpec
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Initial,
    Progress,
    Train,
    Trained,
    WriteInitial,
)
from shoal.protocol.errors import ConfigError, LocalError, NetworkError
from shoal.protocol.manifest import Manifest, load_manifest

DEVICE: Final = "device"
WRONG_USAGE: Final = 2
"""As of the command: its output's last line says what is wrong."""

Answer = TypeVar("Answer", Initial, Applied, Trained)


class Loop:
    """One trainer and its orders. Raises ConfigError, WorkloadError, NetworkError (it died), alone or in groups."""

    def __init__(self, manifest: Manifest, folder: Path, *, node: int, device: str, threads: int) -> None:
        self._manifest = manifest
        self._folder = folder
        self._node = node
        self._trainer = Trainer(TrainerSpec.of(manifest, device=device, threads=threads))
        tell, self._told = trio.open_memory_channel[TrainerEvent](math.inf)
        self._trainer.listen(tell.send_nowait)

    async def run(self) -> None:
        """Train until cancelled; the trainer ends then."""
        log = EventLog(self._folder / LOG_NAME)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._trainer.run)
            (self._folder / DEVICE).write_text(self._trainer.started.device, encoding="utf-8")
            await self._stand_on_initial()
            number, steps_s, began = 0, 0.0, time.monotonic()
            while True:
                number += 1
                trained = await self._train(number)
                began, wall_s = time.monotonic(), time.monotonic() - began
                seconds, steps_s = trained.seconds - steps_s, trained.seconds  # it counts on from one to the next
                log.write(Contributed(round=number, steps=trained.steps, seconds=seconds, wall_s=wall_s))

    async def _stand_on_initial(self) -> None:
        trainer = self._trainer
        await trainer.send(WriteInitial())
        await self._answer(Initial)
        await trainer.apply(Apply(round=0), trainer.contribution.copy())
        await self._answer(Applied)

    async def _train(self, round: int) -> Trained:
        """Make the steps of a round."""
        seed, members = self._manifest.workload.seed, len(self._manifest.swarm.founders)
        share = Assignment(seed=seed, round=round, member=self._node, members=members)
        steps = self._manifest.sync.round_steps
        await self._trainer.send(Train(round=round, steps=steps, assignment=share, contribute=False))
        return await self._answer(Trained)

    async def _answer(self, kind: type[Answer]) -> Answer:
        """The next event of the trainer, which is to be of this kind, after any number of reports of progress."""
        async for event in self._told:
            if isinstance(event, kind):
                return event
            if isinstance(event, TrainerFailed):
                raise NetworkError(f"the inner loop failed: {event.summary}")
            if isinstance(event, Restarted):
                raise NetworkError(f"a trainer died: {event.cause}")
            if not isinstance(event, Progress):
                break
        raise LocalError(f"the trainer did not answer with {kind.__name__}")


def main(arguments: list[str]) -> int:
    """Run one loop; return the exit status."""
    manifest, folder, node, device, threads = arguments
    loop = Loop(load_manifest(Path(manifest)), Path(folder), node=int(node), device=device, threads=int(threads))
    wrong: list[str] = []
    try:
        trio.run(loop.run)
    except* ConfigError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        wrong.append(str(error))
    print(*wrong, file=sys.stderr)
    return WRONG_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
