"""The certified states and finals that a node holds: in memory to serve them, on disk to come back to them.

On disk a state is `state/<round>.safetensors` with the vectors `anchor` and `momentum` and the counters as metadata;
finals are `finals/<plan hash>`, the plan and every final payload. Files are written whole, synced and renamed; what is
read back is believed only where its digest is the certificate's.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateHeader, StateKind, chunk_bytes, frozen, header_of
from shoal.node.store import disk_errors, write_atomically
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.messages import Plan, Term
from shoal.protocol.wire import HASH_BYTES, canonical, decode
from shoal.swarm.chunks import ChunkRef, ChunkSpace
from shoal.swarm.frame import SCOPE_BYTES

STATES_KEPT = 2
FINALS_KEPT = 8

logger = logging.getLogger(__name__)


class _FinalsFile(msgspec.Struct, frozen=True):
    plan: bytes
    payloads: tuple[bytes, ...]


class StateShelf:
    """The last states and finals of this node. `lookup` is called in lanes' threads."""

    def __init__(self, folder: Path, chunk_values: int) -> None:
        self._folder = folder
        self._chunk_values = chunk_values
        self._lock = threading.Lock()
        self._states: dict[int, tuple[CertifiedState, StateHeader]] = {}
        self._by_scope: dict[bytes, CertifiedState] = {}
        self._finals: dict[bytes, Finals] = {}
        self._finals_by_scope: dict[bytes, bytes] = {}

    def header(self, state: CertifiedState) -> StateHeader:
        """The header of a state on this swarm's grid, computed (hashing all chunks) once."""
        kept = self._states.get(state.round)
        if kept is not None and kept[0] is state:
            return kept[1]
        return header_of(state, Grid(state.numel, self._chunk_values), threads=2)

    def put(self, state: CertifiedState, header: StateHeader) -> None:
        """Keep a state to serve it, and forget the oldest."""
        with self._lock:
            self._states[state.round] = (state, header)
            for round in sorted(self._states)[:-STATES_KEPT]:
                del self._states[round]
            self._by_scope = {h.digest[:SCOPE_BYTES]: s for s, h in self._states.values()}

    def header_for(self, round: int) -> StateHeader | None:
        """The header of a round that is still held."""
        kept = self._states.get(round)
        return None if kept is None else kept[1]

    def newest_round(self) -> int | None:
        """The newest round whose state is held."""
        return max(self._states, default=None)

    def put_finals(self, finals: Finals) -> None:
        """Keep the finals of a plan to serve them, and forget the oldest."""
        plan_hash = finals.plan.hash
        with self._lock:
            self._finals[plan_hash] = finals
            while len(self._finals) > FINALS_KEPT:
                del self._finals[next(iter(self._finals))]
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
        """Take the finals on disk into memory, so that they can be served. Blocks."""
        named_by_hash = (self._folder / "finals").glob("[0-9a-f]" * 2 * HASH_BYTES)
        for path in sorted(named_by_hash, key=lambda p: p.stat().st_mtime_ns):
            self.finals(bytes.fromhex(path.name))

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

    def save_state(self, state: CertifiedState) -> None:
        """Write a state durably and remove older ones. Raises StorageError."""
        metadata = {
            "rebases": str(state.term.rebases),
            "rollbacks": str(state.term.rollbacks),
            "round": str(state.round),
            "tokens": str(state.tokens),
            "layout": state.layout_hash.hex(),
        }
        data = save({"anchor": state.anchor, "momentum": state.momentum}, metadata)
        folder = self._folder / "state"
        write_atomically(folder / f"{state.round}.safetensors", data)
        with disk_errors(folder):
            for path in sorted(folder.glob("*.safetensors"), key=_round_of)[:-STATES_KEPT]:
                path.unlink(missing_ok=True)

    def load_states(self) -> list[CertifiedState]:
        """The states on disk, newest first; a file that is no state is passed over with a warning."""
        states = []
        for path in sorted((self._folder / "state").glob("*.safetensors"), key=_round_of, reverse=True):
            try:
                states.append(_read_state(path))
            except (SafetensorError, KeyError, ValueError, OSError, LocalError) as error:
                logger.warning("%s is not readable (%s) and is ignored", path, error)
        return states

    def save_finals(self, finals: Finals) -> None:
        """Write finals durably, before this node reports them, and remove older ones. Raises StorageError."""
        file = _FinalsFile(
            plan=canonical(finals.plan), payloads=tuple(chunk.payload.tobytes() for chunk in finals.chunks)
        )
        folder = self._folder / "finals"
        write_atomically(folder / finals.plan.hash.hex(), msgspec.msgpack.encode(file))
        with disk_errors(folder):
            for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:-FINALS_KEPT]:
                path.unlink(missing_ok=True)

    def _load_finals(self, plan_hash: bytes) -> Finals | None:
        path = self._folder / "finals" / plan_hash.hex()
        if not path.exists():
            return None
        try:
            file = msgspec.msgpack.decode(path.read_bytes(), type=_FinalsFile)
            finals = Finals.open(decode(file.plan, Plan), file.payloads)
        except (msgspec.DecodeError, ShoalError, OSError) as error:
            logger.warning("%s is damaged (%s) and is ignored", path, error)
            return None
        return finals if finals.plan.hash == plan_hash else None


def _round_of(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else -1


def _read_state(path: Path) -> CertifiedState:
    data = path.read_bytes()
    vectors = load(data)
    if not vectors["anchor"].size:
        raise ValueError("no values")
    head = int.from_bytes(data[:8], "little")
    metadata = msgspec.json.decode(data[8 : 8 + head])["__metadata__"]
    return CertifiedState(
        term=Term(int(metadata["rebases"]), int(metadata["rollbacks"])),
        round=int(metadata["round"]),
        tokens=int(metadata["tokens"]),
        layout_hash=bytes.fromhex(metadata["layout"]),
        anchor=frozen(np.ascontiguousarray(vectors["anchor"], np.float32)),
        momentum=frozen(np.ascontiguousarray(vectors["momentum"], np.float32)),
    )
