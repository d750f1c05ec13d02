"""States of earlier rounds that this node has: what a rollback can go back to.

    checkpoints/<term>-<round>/state.safetensors    as often as the user wants them
    state/<round>.safetensors                       the newest saved ones, and what finals on disk lead to from there
    rollback/<round>.safetensors                    the one that this node consented, or voted, to go back to

The last is on disk before the consent or the vote is sent: a swarm that decides to go back, and loses its power at that
moment, has the state that it decided on. It is served from there for as long as it is kept, for others may want it
only many rounds after it was ordered. What is read is believed only where its digest is the certified one. S(0) has
none before the swarm goes back to it: it is shown as it was saved, where its chunks are those that were saved, and a
quorum goes back to it only where all of it hold the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path

import trio
from safetensors import SafetensorError

from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.state.state_files import header_in, read_state, write_state
from shoal.node.state.states import StateCache
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import TensorFile
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ShoalError
from shoal.protocol.folders import make_folder
from shoal.protocol.messages import NO_HASH

FOLDER = "rollback"

logger = logging.getLogger(__name__)


class EarlierStates:
    """Finds and keeps them in the data folder `folder`. Use from trio's thread."""

    def __init__(self, folder: Path, *, chain: Chain, cache: StateCache, outer: OuterSettings) -> None:
        self._folder = folder
        self._chain = chain
        self._cache = cache
        self._outer = outer
        self._holding = trio.Lock()

    def rounds(self) -> list[int]:
        """The certified rounds before the head whose state seems to be here, in order. Blocks."""
        saved = {round for round, _ in self._files()}
        newest = self._chain.standing.round
        found = {round for round in saved if round < newest}
        for round in range(min(found, default=newest) + 1, newest):
            if round - 1 in found and self._cache.has_finals(self._chain.value(round).plan):
                found.add(round)
        return sorted(found)

    async def find(self, round: int, initial: bytes = NO_HASH) -> CertifiedState | None:
        """The state of a certified round on the branch, from disk or as finals lead to it; None if it is not here.

        initial: the digest that S(0) has to have; NO_HASH if any is right.
        """
        state = await trio.to_thread.run_sync(self._find, round)
        if state is None or state.round or initial == NO_HASH:
            return state
        return state if await trio.to_thread.run_sync(self._cache.digest, state) == initial else None

    def _find(self, round: int) -> CertifiedState | None:
        for saved, path in sorted(self._files(), reverse=True):
            if saved <= round and (state := self._read(saved, path)) is not None:
                while state is not None and state.round < round:
                    state = self._next(state)
                if state is not None:
                    return state
        return None

    def _next(self, state: CertifiedState) -> CertifiedState | None:
        if state.round >= self._chain.standing.round:
            return None
        value = self._chain.value(state.round + 1)
        finals = self._cache.finals(value.plan)
        if finals is None:
            return None
        amended = self._chain.amended(value.round)
        after, header = advance(state, finals, self._outer if amended is None else OuterSettings.of(amended))
        return after if header.digest == value.digest else None

    def _files(self) -> Iterator[tuple[int, Path]]:
        patterns = ("state/*.safetensors", f"{FOLDER}/*.safetensors")
        for path in (path for pattern in patterns for path in self._folder.glob(pattern)):
            if path.stem.isdecimal():
                yield int(path.stem), path
        for path in self._folder.glob("checkpoints/*/state.safetensors"):
            term, _, number = path.parent.name.rpartition("-")
            newest = self._chain.standing.round
            if number.isdecimal() and int(number) <= newest and term == str(self._chain.value(int(number)).term):
                yield int(number), path

    def _read(self, round: int, path: Path) -> CertifiedState | None:
        try:
            state = read_state(path, self._cache.vectors)
            if state.round == round and self._cache.header(state).digest == self._expected(round, path):
                return state
        except (SafetensorError, KeyError, ValueError, IndexError, OSError, ShoalError) as error:
            logger.warning("%s is not readable (%s) and is ignored", path, error)
        return None  # or of a term that was abandoned

    def _expected(self, round: int, path: Path) -> bytes:
        """The certified digest of a round; for S(0), where there is none, the one that it was saved with."""
        certified = self._chain.digest(round)
        saved = header_in(TensorFile(path)) if round == 0 and certified == NO_HASH else None
        return certified if saved is None else saved.digest

    async def keep(self, state: CertifiedState) -> bytes:
        """Have `state` on disk and in the cache; its digest. Raises StorageError."""
        header = await trio.to_thread.run_sync(self._keep, state)
        self._cache.put(state, header)
        return header.digest

    def _keep(self, state: CertifiedState) -> StateHeader:
        folder = self._folder / FOLDER
        with disk_errors(folder):
            make_folder(folder)
        path = self._kept_at(state.round)
        header = self._cache.header(state)
        kept = self._read(state.round, path) if path.exists() else None
        if kept is None or self._cache.header(kept).digest != header.digest:
            write_state(path, state, header)
        return header

    def _kept_at(self, round: int) -> Path:
        return self._folder / FOLDER / f"{round}.safetensors"

    async def hold(self, round: int) -> None:
        """Have the state of a round in the cache if it is kept: the cache has let go of it where nobody asked for it.

        Cancellation: it is there or not.
        """
        async with self._holding:
            if self._cache.state(round) is None:
                found = await trio.to_thread.run_sync(self._read_kept, round)
                if found is not None:
                    self._cache.put(*found)

    def _read_kept(self, round: int) -> tuple[CertifiedState, StateHeader] | None:
        path = self._kept_at(round)
        state = self._read(round, path) if path.exists() else None
        return None if state is None else (state, self._cache.header(state))

    async def forget(self, besides: Collection[int]) -> None:
        """Remove what was kept, but those of some rounds. Raises StorageError."""
        await trio.to_thread.run_sync(self._remove, besides)

    def _remove(self, besides: Collection[int]) -> None:
        folder = self._folder / FOLDER
        with disk_errors(folder), contextlib.suppress(FileNotFoundError):
            for path in list(folder.iterdir()):
                if path.stem not in map(str, besides):
                    path.unlink(missing_ok=True)
