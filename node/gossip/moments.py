"""Optimizer state that a node of the strategy `gossip` keeps for a restart: the moments, and the model's buffers.

    resume/0.0-<round>.trainer      as they were when the inner steps of `round` had been made

Its weights are in its state, and its batches follow from the round: with the moments of the round that led to a state,
a restart goes on from there to the bit. The trainer copies them when it has made its vector, and has nothing to do;
they are written beside the exchange. A write that takes long is followed by a rest, as of states.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from shoal.node.state.resumption import CHEAP_S, REST
from shoal.node.state.store import disk_errors
from shoal.node.training.trainer_messages import Snapshotted
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.errors import StorageError
from shoal.protocol.folders import make_folder

FILES_KEPT: Final = 2
"""The state on disk may be older than the newest moments."""
_PREFIX: Final = "0.0-"

logger = logging.getLogger(__name__)


class GossipMoments:
    """Has the trainer write them, and take them up again. Used from the engine's task alone."""

    def __init__(self, folder: Path, training_client: TrainingClient) -> None:
        self._folder = folder / "resume"
        self._training_client = training_client
        self._writing = ""
        self._ordered_at = 0.0
        self._rest_ends = float("-inf")

    async def made(self, round: int) -> None:
        """The inner steps of `round` are made: have what the trainer knows written, unless the disk is busy or rests.

        A disk that does not take it is logged; training goes on.
        """
        now = trio.current_time()
        if self._writing or now < self._rest_ends:
            return
        try:
            await trio.to_thread.run_sync(self._make_folder)
        except StorageError as error:
            logger.warning("a restart would lose the optimizer's moments: %s", error)
            return
        self._writing, self._ordered_at = str(self._file(round)), now
        await self._training_client.snapshot(round, self._writing)

    async def heard(self, event: Snapshotted) -> None:
        """The trainer has written them, or could not."""
        if event.path != self._writing:
            return
        took = trio.current_time() - self._ordered_at
        self._writing, self._rest_ends = "", trio.current_time() + (REST * took if took > CHEAP_S else 0.0)
        if event.failure:
            logger.warning("a restart would lose the optimizer's moments: %s", event.failure)
        else:
            await trio.to_thread.run_sync(self._forget_old)

    def interrupted(self) -> None:
        """The trainer died, and what it was writing with it."""
        self._writing = ""

    async def restore(self, round: int) -> None:
        """Before the first anchor: have the trainer take up the moments nearest to the state of `round`, if any."""
        found = await trio.to_thread.run_sync(self._on_disk)
        if found:
            nearest = min(found, key=lambda kept: (abs(kept - round), kept))
            await self._training_client.restore_moments(nearest, str(self._file(nearest)))

    def _file(self, round: int) -> Path:
        return self._folder / f"{_PREFIX}{round}.trainer"

    def _make_folder(self) -> None:
        with disk_errors(self._folder.parent):
            make_folder(self._folder)
        for path in self._folder.glob(f"{_PREFIX}*.partial"):  # which nobody lived to write
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _on_disk(self) -> list[int]:
        """Rounds of which there are files, ascending."""
        stems = [path.stem.removeprefix(_PREFIX) for path in self._folder.glob(f"{_PREFIX}*.trainer")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _forget_old(self) -> None:
        for round in self._on_disk()[:-FILES_KEPT]:
            with suppress(OSError):
                self._file(round).unlink(missing_ok=True)
