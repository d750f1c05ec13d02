"""The certified states and finals that a node holds: in memory to serve them, on disk to come back to them.

In memory are the last states and finals. On disk the newest state may be some rounds back, for it is saved beside the
rounds; the finals of every round since then are there until it is, and lead from the one to the other. A state that is
on disk and in memory is one file (`file_memory`).
What is read back is believed only where its digest is the certificate's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import (
    NESTEROV_KINDS,
    CertifiedState,
    HeldState,
    ImageHeader,
    PolicyImage,
    StateHeader,
    StateKind,
    chunk_bytes,
    header_of,
)
from shoal.node.state.file_memory import FilePool
from shoal.node.state.finals_file import FinalsFile, FinalsWriter, read_finals
from shoal.node.state.policy_images import ImageCache
from shoal.node.state.state_files import read_state, write_state
from shoal.node.state.store import disk_errors
from shoal.protocol.errors import LocalError, ShoalError, StorageError
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES

STATES_KEPT = 2
"""So many states are held whether anybody asks for them or not: the newest, and that on disk or the one before."""
PIN_S = 30.0
"""An older state is held this long after something of it was asked for last."""
PINS_LIMIT_STATES = 4
PINS_LIMIT_BYTES = 2 << 30
"""Of older states at once. So a node holds STATES_KEPT states, this much of older ones, and the one in the making."""
FINALS_KEPT = 32
"""Plans whose finals are held, and are on disk although a later state is: what a late joiner replays."""
FINALS_MIN = 2
"""Plans whose finals are held, and are on disk, whatever they take."""
FINALS_MEMORY_BYTES = 256 << 20
"""Finals in memory beyond this are let go."""
FINALS_DISK_BYTES = 64 << 20
"""The same on disk, for those that a later state made superfluous; or half a state's bytes, where those are more: who
lacks finals of more bytes fetches a state, which is at most twice as many (`shoal.protocol.catching_up`)."""
FINALS_OPEN_LIMIT = 8
"""Plans whose finals are served from disk at once."""

STATE_SPACES: Mapping[ChunkSpace, StateKind] = {
    ChunkSpace.ANCHOR: StateKind.ANCHOR,
    ChunkSpace.MOMENTUM: StateKind.MOMENTUM,
    ChunkSpace.SECOND_MOMENT: StateKind.SECOND_MOMENT,
}
"""Which vector of a state a request is about."""

_OfPlan = TypeVar("_OfPlan", Finals, FinalsFile)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """A state in memory, with what is costly to compute of it, and when it was asked for last."""

    state: CertifiedState
    header: StateHeader
    digest: bytes
    asked_at: float = float("-inf")


class StateCache:
    """The last states and finals of this node. `lookup` is called in lanes' threads.

    kinds: the vectors of this swarm's states. vectors: memory of states that are gone, for those that come.
    """

    def __init__(
        self,
        folder: Path,
        chunk_values: int,
        *,
        kinds: Sequence[StateKind] = NESTEROV_KINDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = self._folder = folder
        self._chunk_values = chunk_values
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[int, _Held] = {}  # by round, in the order in which they came
        self._by_scope: dict[bytes, _Held] = {}
        self._saved_round = -1
        """Of the state that was saved last."""
        self._finals: dict[bytes, Finals] = {}
        self._finals_by_scope: dict[bytes, bytes] = {}
        self._files: dict[bytes, FinalsFile] = {}  # by scope, the one asked for last at the end
        self.vectors = FilePool(folder, chunk_values, together=len(kinds))
        self.images = ImageCache(folder, self._imaged)

    def _imaged(self, digest: bytes) -> tuple[HeldState, ImageHeader] | None:
        """The state with a digest, or with one that begins so, and its image's header; held for PIN_S more."""
        with self._lock:
            held = self._by_scope.get(digest[:SCOPE_BYTES])
            if held is None or not held.digest.startswith(digest) or held.header.of_image is None:
                return None
            held.asked_at = self._clock()
            return held.state, held.header.of_image

    def hold_image(self, image: PolicyImage) -> None:
        """Hold an image in place of states: nobody is given these any more but who is fetching one."""
        self.images.put(image)
        with self._lock:
            self._forget_states(list(self._states))
            self._by_scope = {held.digest[:SCOPE_BYTES]: held for held in self._states.values()}

    def header(self, state: CertifiedState) -> StateHeader:
        """The header of a state on this swarm's grid, computed (hashing all chunks) once."""
        kept = self._states.get(state.round)
        if kept is not None and kept.state is state:
            return kept.header
        return header_of(state, Grid(state.numel, self._chunk_values), threads=2)

    def digest(self, state: HeldState) -> bytes:
        """The digest of a state, computed once for one that is held."""
        if isinstance(state, PolicyImage):
            return state.header.digest
        kept = self._states.get(state.round)
        return kept.digest if kept is not None and kept.state is state else self.header(state).digest

    def put(self, state: CertifiedState, header: StateHeader) -> None:
        """Keep a state to serve it; forget those that came before the last ones, unless somebody is fetching them."""
        held = _Held(state, header, header.digest)
        with self._lock:
            before = self._states.pop(state.round, None)
            if before is not None and before.digest == held.digest:
                held.asked_at = before.asked_at
            self._states[state.round] = held
            *older, newest = self._states
            on_disk = self._saved_round in older and newest > max(older)
            second = self._saved_round if on_disk else older[-1] if older else None
            self._forget_states([round for round in older if round != second])
            self._by_scope = {held.digest[:SCOPE_BYTES]: held for held in self._states.values()}

    def _forget_states(self, older: Sequence[int]) -> None:
        now, pins, size = self._clock(), 0, 0
        for round in sorted(older, key=lambda round: self._states[round].asked_at, reverse=True):
            held = self._states[round]
            pins, size = pins + 1, size + held.state.nbytes
            if now - held.asked_at > PIN_S or pins > PINS_LIMIT_STATES or size > PINS_LIMIT_BYTES:
                del self._states[round]

    def begin_serving(self, round: int) -> StateHeader | None:
        """The header of a round that is still held; its state is held for PIN_S more, and so after every `lookup`."""
        with self._lock:
            kept = self._states.get(round)
            if kept is None:
                return None
            kept.asked_at = self._clock()
            return kept.header

    def state(self, round: int) -> CertifiedState | None:
        """The state of a round that is still held."""
        kept = self._states.get(round)
        return None if kept is None else kept.state

    def newest_round(self) -> int | None:
        """The newest round whose state is held."""
        return max(self._states, default=None)

    def held_rounds(self) -> list[int]:
        """The rounds whose states are held, in order."""
        return sorted(self._states)

    def put_finals(self, finals: Finals) -> None:
        """Keep the finals of a plan to serve them, and forget the oldest."""
        with self._lock:
            self._finals[finals.plan.hash] = finals
            oldest_first = sorted(self._finals.items(), key=lambda item: item[1].plan.round)
            size = sum(_size(kept) for _, kept in oldest_first)
            while len(oldest_first) > FINALS_MIN and (len(oldest_first) > FINALS_KEPT or size > FINALS_MEMORY_BYTES):
                key, kept = oldest_first.pop(0)
                size -= _size(kept)
                del self._finals[key]
            self._finals_by_scope = {key[:SCOPE_BYTES]: key for key in self._finals}

    def held_finals(self, plan_hash: bytes) -> Finals | None:
        """The finals of a plan, if they are in memory."""
        return self._finals.get(plan_hash)

    def has_finals(self, plan_hash: bytes) -> bool:
        """True if the finals of a plan are in memory or seem to be on disk. Blocks."""
        return plan_hash in self._finals or any(found == plan_hash for _, found, _ in self._finals_files())

    def served_plan(self, plan_hash: bytes) -> Plan | None:
        """The plan whose finals can be looked up from now on, in memory or on disk; None if there are none. Blocks."""
        finals = self._finals.get(plan_hash)
        if finals is not None:
            return finals.plan
        scope = plan_hash[:SCOPE_BYTES]
        with self._lock:
            file = self._files.pop(scope, None)
        if file is None or file.plan.hash != plan_hash:
            file = self._opened(plan_hash, FinalsFile)
        if file is None:
            return None
        with self._lock:
            self._files[scope] = file
            while len(self._files) > FINALS_OPEN_LIMIT:
                del self._files[next(iter(self._files))]
        return file.plan

    def finals(self, plan_hash: bytes) -> Finals | None:
        """The finals of a plan, from memory or disk. Blocks."""
        finals = self._finals.get(plan_hash)
        if finals is None:
            finals = self._opened(plan_hash, read_finals)
            if finals is not None:
                self.put_finals(finals)
        return finals

    def load_finals(self) -> None:
        """Take the last finals on disk into memory, so that they can be served. Blocks.

        A state that is being saved at the same time may remove the oldest of them.
        """
        size = 0
        for count, (_, plan_hash, path) in enumerate(reversed(self._finals_files())):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
            if count >= FINALS_KEPT or (count >= FINALS_MIN and size > FINALS_MEMORY_BYTES):
                break
            self.finals(plan_hash)

    def lookup(self, ref: ChunkRef) -> memoryview | None:
        """The bytes of a chunk that another node asks for, None if it is not held."""
        if ref.space in (ChunkSpace.IMAGE, ChunkSpace.CHANGES):
            return self.images.lookup(ref)
        with self._lock:
            held = self._by_scope.get(ref.scope)
            if held is not None and ref.space is not ChunkSpace.FINAL:
                held.asked_at = self._clock()
            finals = self._finals.get(self._finals_by_scope.get(ref.scope, b""))
            file = self._files.get(ref.scope)
        if ref.space is ChunkSpace.FINAL:
            if finals is None:
                return None if file is None else file.payload(ref.chunk)
            final = finals.chunks[ref.chunk] if ref.chunk < len(finals.chunks) else None
            return final.payload.data if final is not None and final.intact else None
        grid = None if held is None else Grid(held.state.numel, self._chunk_values)
        kind = STATE_SPACES.get(ref.space)
        if held is None or grid is None or ref.chunk >= grid.chunks or kind not in held.state.kinds:
            return None
        return chunk_bytes(held.state, grid, kind, ref.chunk)

    # -- disk ------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Remove files that a crash left unfinished."""
        with disk_errors(self._folder):
            for name in ("state", "finals"):
                for path in (self._folder / name).glob("*.partial"):
                    path.unlink(missing_ok=True)

    def save_state(self, state: HeldState, *, good: int = 0) -> None:
        """Write a state durably, and remove what it makes superfluous: states and finals of long ago.

        good: the round of a state that was certified and saved; while that is there, all others make room beforehand.
        S(0) stays: it cannot be drawn while the trainer trains, and no finals lead to it. An image makes all states and
        finals superfluous. Raises StorageError.
        """
        if isinstance(state, PolicyImage):
            self.images.save(state)
            with disk_errors(self._folder):
                for path in (*map(self.state_file, self.saved_rounds()), *(path for *_, path in self._finals_files())):
                    path.unlink(missing_ok=True)
            return
        self.images.remove()
        self.make_room(good)
        write_state(self.state_file(state.round), state, self.header(state))
        self._saved_round = state.round
        self._forget_saved(self.saved_rounds()[STATES_KEPT:])
        with disk_errors(self._folder):
            self._forget_finals(state)
        with contextlib.suppress(StorageError):  # it is had when it is needed, or nothing is
            self.vectors.prepare(state.numel)

    def make_room(self, good: int) -> None:
        """Remove the states on disk but that of the round `good`, if it is there: a later one is held, or comes.

        Raises StorageError.
        """
        there = self.saved_rounds()
        self._forget_saved([round for round in there if round != good] if good and good in there else [])

    def _forget_saved(self, rounds: Sequence[int]) -> None:
        with disk_errors(self._folder):
            for round in filter(None, rounds):
                self.state_file(round).unlink(missing_ok=True)

    def _forget_finals(self, state: CertifiedState) -> None:
        """Remove the oldest finals that a state on disk made superfluous; held mapped, they would keep their room."""
        size, limit = 0, max(FINALS_DISK_BYTES, state.nbytes // 2)
        before = [(plan_hash, path) for round, plan_hash, path in self._finals_files() if round <= state.round]
        for count, (plan_hash, path) in enumerate(reversed(before)):
            size += path.stat().st_size
            if count >= FINALS_KEPT or (count >= FINALS_MIN and size > limit):
                self._forget_plan(plan_hash, path)

    def forget_damaged(self, plan_hash: bytes) -> bool:
        """Forget the finals of a plan if the disk has changed them since they were read; True if it has. Blocks."""
        finals = self._finals.get(plan_hash)
        if finals is None or all(chunk.intact for chunk in finals.chunks):
            return False
        for _, found, path in self._finals_files():
            if found == plan_hash:
                with contextlib.suppress(OSError):  # read again, it is found to be damaged
                    self._forget_plan(plan_hash, path)
        return True

    def _forget_plan(self, plan_hash: bytes, path: Path) -> None:
        with self._lock:
            self._finals.pop(plan_hash, None)
            self._finals_by_scope.pop(plan_hash[:SCOPE_BYTES], None)
            self._files.pop(plan_hash[:SCOPE_BYTES], None)
        path.unlink(missing_ok=True)

    def go_back(self, round: int) -> None:
        """Forget the states after `round`, in memory and on disk: they were abandoned. Raises StorageError."""
        with self._lock:
            self._states = {kept: held for kept, held in self._states.items() if kept <= round}
            self._by_scope = {held.digest[:SCOPE_BYTES]: held for held in self._states.values()}
        with disk_errors(self._folder):
            for saved in self.saved_rounds():
                if saved > round:
                    self.state_file(saved).unlink(missing_ok=True)

    def saved_rounds(self) -> list[int]:
        """The rounds whose states are on disk, readable or not, newest first."""
        paths = (self._folder / "state").glob("*.safetensors")
        return sorted((int(path.stem) for path in paths if path.stem.isdecimal()), reverse=True)

    def load_state(self, round: int) -> CertifiedState | None:
        """The state of a round as it is on disk, not yet believed; None, with a warning, if the file holds none."""
        path = self.state_file(round)
        try:
            state = read_state(path, self.vectors)
            if state.round != round:
                raise ValueError(f"it is of round {state.round}")
        except (SafetensorError, KeyError, ValueError, OSError, LocalError) as error:
            logger.warning("%s is not readable (%s) and is ignored", path, error)
            return None
        return state

    def state_file(self, round: int) -> Path:
        """Path at which the state of a round is saved, whether it is there or not."""
        return self._folder / "state" / f"{round}.safetensors"

    def finals_writer(self, finals: Finals) -> FinalsWriter:
        """Writes finals to where `finals` finds them."""
        plan = finals.plan
        return FinalsWriter(self._folder / "finals" / f"{plan.round}-{plan.hash.hex()}", finals)

    def _finals_files(self) -> list[tuple[int, bytes, Path]]:
        """(round, plan hash, path) of the finals on disk, oldest first."""
        files = []
        for path in (self._folder / "finals").iterdir():
            with contextlib.suppress(ValueError):  # something else
                round, plan_hash = path.name.split("-")
                files.append((int(round), bytes.fromhex(plan_hash), path))
        return sorted(files)

    def _opened(self, plan_hash: bytes, open_file: Callable[[Path], _OfPlan]) -> _OfPlan | None:
        """The finals of a plan on disk; None, with a warning, if their file holds none."""
        path = next((path for _, found, path in self._finals_files() if found == plan_hash), None)
        if path is None:
            return None
        try:
            finals = open_file(path)
        except (ValueError, ShoalError, OSError) as error:
            logger.warning("%s is damaged (%s) and is ignored", path, error)
            return None
        return finals if finals.plan.hash == plan_hash else None


def _size(finals: Finals) -> int:
    return sum(chunk.payload.nbytes for chunk in finals.chunks)
