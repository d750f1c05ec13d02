"""Checkpoints on schedule: every so many rounds one is put together, beside the rounds, from files that are there.

The state is saved first if it is not yet (state_saver.py), what the trainer knows was written before its round was
certified (resumption.py); a checkpoint links both, and adds chain, manifest and layout.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from shoal.collectives.state import CertifiedState
from shoal.node.outcome import Notice, Progress
from shoal.node.state.checkpoint_folder import LAYOUT, CheckpointContent, tidy, write_checkpoint
from shoal.node.state.resumption import Resumption
from shoal.node.state.states import StateCache
from shoal.node.state.store import write_atomically
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.chain import Chain
from shoal.protocol.errors import StorageError
from shoal.protocol.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointParts:
    """What checkpoints are made of. save: has a state saved, unless a newer one is; the state store's."""

    folder: Path
    manifest: Manifest
    chain: Chain
    save: Callable[[CertifiedState], Awaitable[None]]
    cache: StateCache
    resumption: Resumption
    on_progress: Callable[[Progress], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Due:
    state: CertifiedState
    height: int


class Checkpoints:
    """Makes them, one at a time; `run` is the daemon's. every: rounds from one to the next, 0 for none at all."""

    def __init__(self, parts: CheckpointParts, *, every: int, keep: int) -> None:
        self._p = parts
        self._every = every
        self._keep = keep
        self._folder = parts.folder / "checkpoints"
        self._layout: Layout | None = None
        self._due: _Due | None = None
        self._changed = trio.Event()

    def is_due(self, round: int) -> bool:
        """Whether there is to be a checkpoint of this round."""
        return self._every > 0 and round > 0 and round % self._every == 0

    async def expect(self, layout: Layout) -> None:
        """The model is built: its parameters have these names and shapes. Raises StorageError."""
        self._layout = layout
        await trio.to_thread.run_sync(write_atomically, self._p.folder / LAYOUT, msgspec.json.encode(layout))
        if self._folder.is_dir():
            await trio.to_thread.run_sync(tidy, self._folder)

    def certified(self, state: CertifiedState) -> None:
        """The head of the chain stands on `state`; if one is due, make a checkpoint of it beside what follows."""
        if self.is_due(state.round) and self._layout is not None:
            self._due = _Due(state, self._p.chain.height)
            self._changed.set()

    async def run(self) -> None:
        """Make what is due, until cancelled; if another is due before one is made, the newer one only.

        A disk that does not take it is told to the user; what was there is untouched. Raises StorageError where not
        even states can be saved. Cancellation: a checkpoint is made whole or not at all.
        """
        while True:
            while self._due is None:
                await self._changed.wait()
                self._changed = trio.Event()
            due, self._due = self._due, None
            if self._p.chain.standing.round < due.state.round:
                continue  # the swarm went back to before it
            await self._p.save(due.state)
            try:
                await trio.to_thread.run_sync(self._make, due)
            except StorageError as error:
                logger.warning("no checkpoint of round %d: %s", due.state.round, error)
                self._p.on_progress(Notice(text=f"no checkpoint of round {due.state.round}: {error}"))

    def _make(self, due: _Due) -> None:
        assert self._layout is not None
        term, round = due.state.term, due.state.round
        newest = next((files for files in self._p.resumption.on_disk() if files.position <= (term, round)), None)
        content = CheckpointContent(
            state=due.state,
            header=lambda: self._p.cache.header(due.state),
            saved=self._p.cache.state_file(round),
            entries=self._p.chain.after(0, due.height),
            manifest=self._p.manifest,
            layout=self._layout,
            resume=newest,
        )
        path = write_checkpoint(self._folder, content, keep=self._keep)
        logger.info("checkpoint %s", path)
