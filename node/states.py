"""The certified states and finals that a node holds: in memory to serve them, on disk to come back to them.

In memory are the last states and finals. On disk the newest state may be some rounds back, for it is saved beside the
rounds; the finals of every round since then are there until it is (`durability = "disk"`), and lead from the one to the
other. What is read back is believed only where its digest is the certificate's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateHeader, StateKind, chunk_bytes, header_of
from shoal.collectives.vectors import VectorPool
from shoal.node.state_files import FinalsWriter, read_finals, read_state, write_state
from shoal.node.store import disk_errors
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.messages import Plan
from shoal.swarm.chunks import ChunkRef, ChunkSpace
from shoal.swarm.frame import SCOPE_BYTES

STATES_KEPT = 2
FINALS_KEPT = 8
FINALS_MEMORY_BYTES = 256 << 20
"""Finals in memory beyond this are let go; those of the last two plans are held whatever they take."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A state in memory, with what is costly to compute of it."""

    state: CertifiedState
    header: StateHeader
    digest: bytes


class StateShelf:
    """The last states and finals of this node. `lookup` is called in lanes' threads.

    vectors: memory of states that are gone, for those that come.
    """

    def __init__(self, folder: Path, chunk_values: int) -> None:
        self._folder = folder
        self._chunk_values = chunk_values
        self._lock = threading.Lock()
        self._states: dict[int, _Held] = {}
        self._by_scope: dict[bytes, CertifiedState] = {}
        self._finals: dict[bytes, Finals] = {}
        self._finals_by_scope: dict[bytes, bytes] = {}
        self.vectors = VectorPool(len(StateKind))

    def header(self, state: CertifiedState) -> StateHeader:
        """The header of a state on this swarm's grid, computed (hashing all chunks) once."""
        kept = self._states.get(state.round)
        if kept is not None and kept.state is state:
            return kept.header
        return header_of(state, Grid(state.numel, self._chunk_values), threads=2)

    def digest(self, state: CertifiedState) -> bytes:
        """The digest of a state, computed once for one that is held."""
        kept = self._states.get(state.round)
        return kept.digest if kept is not None and kept.state is state else self.header(state).digest

    def put(self, state: CertifiedState, header: StateHeader) -> None:
        """Keep a state to serve it, and forget the oldest."""
        held = _Held(state, header, header.digest)
        with self._lock:
            self._states[state.round] = held
            for round in sorted(self._states)[:-STATES_KEPT]:
                del self._states[round]
            self._by_scope = {held.digest[:SCOPE_BYTES]: held.state for held in self._states.values()}

    def header_for(self, round: int) -> StateHeader | None:
        """The header of a round that is still held."""
        kept = self._states.get(round)
        return None if kept is None else kept.header

    def newest_round(self) -> int | None:
        """The newest round whose state is held."""
        return max(self._states, default=None)

    def put_finals(self, finals: Finals) -> None:
        """Keep the finals of a plan to serve them, and forget the oldest."""
        with self._lock:
            self._finals[finals.plan.hash] = finals
            oldest_first = sorted(self._finals.items(), key=lambda item: item[1].plan.round)
            size = sum(_size(kept) for _, kept in oldest_first)
            while len(oldest_first) > 2 and (len(oldest_first) > FINALS_KEPT or size > FINALS_MEMORY_BYTES):
                key, kept = oldest_first.pop(0)
                size -= _size(kept)
                del self._finals[key]
            self._finals_by_scope = {key[:SCOPE_BYTES]: key for key in self._finals}

    def held_finals(self, plan_hash: bytes) -> Finals | None:
        """The finals of a plan, if they are in memory."""
        return self._finals.get(plan_hash)

    def finals(self, plan_hash: bytes) -> Finals | None:
        """The finals of a plan, from memory or disk. Blocks."""
        finals = self._finals.get(plan_hash)
        if finals is None:
            finals = self._load_finals(plan_hash)
            if finals is not None:
                self.put_finals(finals)
        return finals

    def load_finals(self) -> None:
        """Take the last finals on disk into memory, so that they can be served. Blocks."""
        for _, plan_hash, _ in self._finals_files()[-FINALS_KEPT:]:
            self.finals(plan_hash)

    def lookup(self, ref: ChunkRef) -> memoryview | None:
        """The bytes of a chunk that another node asks for, None if it is not held."""
        with self._lock:
            state = self._by_scope.get(ref.scope)
            finals = self._finals.get(self._finals_by_scope.get(ref.scope, b""))
        if ref.space is ChunkSpace.FINAL:
            if finals is None or ref.chunk >= len(finals.chunks):
                return None
            return finals.chunks[ref.chunk].payload.data
        grid = None if state is None else Grid(state.numel, self._chunk_values)
        if state is None or grid is None or ref.chunk >= grid.chunks:
            return None
        kind = StateKind.ANCHOR if ref.space is ChunkSpace.ANCHOR else StateKind.MOMENTUM
        return chunk_bytes(state, grid, kind, ref.chunk)

    # -- disk ------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Remove files that a crash left unfinished."""
        with disk_errors(self._folder):
            for name in ("state", "finals"):
                for path in (self._folder / name).glob("*.partial"):
                    path.unlink(missing_ok=True)

    def save_state(self, state: CertifiedState) -> None:
        """Write a state durably, and remove what it makes superfluous: states and finals of long ago.

        Raises StorageError.
        """
        write_state(self._state_path(state.round), state)
        with disk_errors(self._folder):
            for round in self.saved_rounds()[STATES_KEPT:]:
                self._state_path(round).unlink(missing_ok=True)
            before = [path for round, _, path in self._finals_files() if round <= state.round]
            for path in before[:-FINALS_KEPT]:
                path.unlink(missing_ok=True)

    def saved_rounds(self) -> list[int]:
        """The rounds whose states are on disk, readable or not, newest first."""
        paths = (self._folder / "state").glob("*.safetensors")
        return sorted((int(path.stem) for path in paths if path.stem.isdecimal()), reverse=True)

    def load_state(self, round: int) -> CertifiedState | None:
        """The state of a round as it is on disk, not yet believed; None, with a warning, if the file holds none."""
        path = self._state_path(round)
        try:
            state = read_state(path)
            if state.round != round:
                raise ValueError(f"it is of round {state.round}")
        except (SafetensorError, KeyError, ValueError, OSError, LocalError) as error:
            logger.warning("%s is not readable (%s) and is ignored", path, error)
            return None
        return state

    def _state_path(self, round: int) -> Path:
        return self._folder / "state" / f"{round}.safetensors"

    def finals_writer(self, plan: Plan) -> FinalsWriter:
        """Writes the finals of `plan` to where `finals` finds them."""
        return FinalsWriter(self._folder / "finals" / f"{plan.round}-{plan.hash.hex()}", plan)

    def _finals_files(self) -> list[tuple[int, bytes, Path]]:
        """(round, plan hash, path) of the finals on disk, oldest first."""
        files = []
        for path in (self._folder / "finals").iterdir():
            with contextlib.suppress(ValueError):  # something else
                round, plan_hash = path.name.split("-")
                files.append((int(round), bytes.fromhex(plan_hash), path))
        return sorted(files)

    def _load_finals(self, plan_hash: bytes) -> Finals | None:
        path = next((path for _, found, path in self._finals_files() if found == plan_hash), None)
        if path is None:
            return None
        try:
            finals = read_finals(path)
        except (ValueError, ShoalError, OSError) as error:
            logger.warning("%s is damaged (%s) and is ignored", path, error)
            return None
        return finals if finals.plan.hash == plan_hash else None


def _size(finals: Finals) -> int:
    return sum(chunk.payload.nbytes for chunk in finals.chunks)
