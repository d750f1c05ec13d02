"""The certified state, the header that names its chunks, and its assembly from chunks that anyone may bring.

The digest that members vote on is

    H("state", canonical([rebases, rollbacks, round, tokens, numel, chunk_values, layout, A, M]))

with A and M the Merkle roots over the BLAKE3 hashes of the anchor's and the momentum's chunks (little-endian fp32).
So whoever trusts a certificate checks a header against its digest, and then each chunk against the header, in any
order and from any donor; no chunk needs the others.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.collectives.grid import CHUNK_LIMIT_VALUES, Grid
from shoal.collectives.vectors import VectorPool
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Count, Hash, Message, Term, domain_hash
from shoal.protocol.wire import HASH_BYTES, canonical

STATE_CHUNK_LIMIT = 16_000
"""Two hashes per chunk have to fit into one message (`wire.MESSAGE_LIMIT_BYTES`)."""

Hashes = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES * STATE_CHUNK_LIMIT)]

# The bytes of an array are what is hashed and sent. A big-endian port would have to swap them in `chunk_bytes`.
assert sys.byteorder == "little"


class StateKind(StrEnum):
    """The two vectors of a state."""

    ANCHOR = "anchor"
    MOMENTUM = "momentum"


def frozen(array: F32) -> F32:
    """`array` itself, from now on read-only."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CertifiedState:
    """S(e): what all members hold bit-identically after round e.

    anchor, momentum: (numel,) float32 in canonical parameter order, contiguous and read-only.
    tokens: trained on so far by certified contributions. layout_hash: of the names and shapes of the parameters.

    Raises LocalError for arrays of another kind.
    """

    term: Term
    round: int
    tokens: int
    layout_hash: bytes
    anchor: F32
    momentum: F32

    def __post_init__(self) -> None:
        for array in (self.anchor, self.momentum):
            if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise LocalError("a certified state holds contiguous (numel,) float32 vectors")
            if array.flags.writeable:
                raise LocalError("a certified state is read-only; freeze the vectors first")
        if self.anchor.shape != self.momentum.shape or len(self.layout_hash) != HASH_BYTES:
            raise LocalError("anchor, momentum and layout of a certified state do not fit together")

    @property
    def numel(self) -> int:
        """How many parameters there are."""
        return self.anchor.size


class StateHeader(Message, frozen=True, kw_only=True, dict=True):
    """Everything of a state but its values: counters, shape, and the hashes of all chunks, joined in order."""

    term: Term
    round: Count
    tokens: Count
    numel: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_LIMIT_VALUES)]
    layout: Hash
    anchor: Hashes
    momentum: Hashes

    def __post_init__(self) -> None:
        expected = HASH_BYTES * -(-self.numel // self.chunk_values)
        if not len(self.anchor) == len(self.momentum) == expected:
            raise ValueError("a state header without exactly one hash per chunk")

    @property
    def grid(self) -> Grid:
        """The grid of both vectors."""
        return Grid(self.numel, self.chunk_values)

    @cached_property
    def digest(self) -> bytes:
        """What members vote on; the preimage is at the top of this module."""
        term = [self.term.rebases, self.term.rollbacks]
        counters = [self.round, self.tokens, self.numel, self.chunk_values]
        roots = [merkle_root(_split(self.anchor)), merkle_root(_split(self.momentum))]
        return domain_hash("state", canonical([*term, *counters, self.layout, *roots]))

    def chunk_hash(self, kind: StateKind, chunk: int) -> bytes:
        """The BLAKE3 hash that chunk `chunk` of that vector must have."""
        hashes = self.anchor if kind is StateKind.ANCHOR else self.momentum
        return hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def check_grid(state: CertifiedState, grid: Grid) -> None:
    """Raises LocalError if the grid is another state's or too fine."""
    if grid.numel != state.numel or grid.chunks > STATE_CHUNK_LIMIT:
        raise LocalError(f"{grid.chunks} chunks of {grid.numel} values are no grid of a state of {state.numel} values")


def header_of(state: CertifiedState, grid: Grid, *, threads: int = 1) -> StateHeader:
    """The header of `state`, hashing every chunk in `threads` threads.

    Raises LocalError if the grid is another state's or too fine.
    """
    check_grid(state, grid)
    pieces = [(kind, chunk) for kind in StateKind for chunk in range(grid.chunks)]
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(lambda piece: chunk_hash(chunk_bytes(state, grid, *piece)), pieces))
    return StateHeader(
        term=state.term,
        round=state.round,
        tokens=state.tokens,
        numel=state.numel,
        chunk_values=grid.chunk_values,
        layout=state.layout_hash,
        anchor=b"".join(hashes[: grid.chunks]),
        momentum=b"".join(hashes[grid.chunks :]),
    )


def chunk_bytes(state: CertifiedState, grid: Grid, kind: StateKind, chunk: int) -> memoryview:
    """The bytes of one chunk of a vector, a read-only view. Raises LocalError outside the grid."""
    start, stop = grid.span(chunk)
    vector = state.anchor if kind is StateKind.ANCHOR else state.momentum
    return vector[start:stop].data.cast("B")


class StateAssembly:
    """A state growing out of verified chunks, from any number of donors and threads.

    `header` must have the `digest` that a certificate names, else RemoteError: nothing about a state is believed,
    and no memory taken, on a donor's word alone. vectors: where the memory comes from.

    A chunk's place in its vector is written by one at a time: by who has it lent, or by `accept` while it is not lent.
    Once the chunk is here, nobody writes there. Where that cannot be promised, because a place was lent and given up in
    the middle of a write, the chunk is kept aside when it comes, and `finish` makes the vector anew.
    """

    def __init__(self, header: StateHeader, *, digest: bytes, vectors: VectorPool | None = None) -> None:
        if header.digest != digest:
            raise RemoteError("a state header that is not the certified one")
        self.header = header
        self.digest = digest
        self._grid = header.grid
        take = (vectors or VectorPool(0)).take
        self._vectors = {kind: take(header.numel) for kind in StateKind}
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._here: set[tuple[StateKind, int]] = set()
        self._lent: set[tuple[StateKind, int]] = set()  # somebody may write there
        self._spoilt: set[tuple[StateKind, int]] = set()  # nobody knows whether somebody does
        self._aside: dict[tuple[StateKind, int], F32] = {}  # what is here, and not in its place

    def accept(self, kind: StateKind, chunk: int, data: bytes | bytearray | memoryview) -> bool:
        """Take a chunk if its bytes are the certified ones; False if it was here already.

        data: of any memory, copied after the check, once; or the place that was lent for the chunk, which nobody writes
        any more: from now on it is not lent. Raises RemoteError for other bytes: the chunk is not here then, and its
        place, if it was that, is still lent.
        """
        if not 0 <= chunk < self._grid.chunks:
            raise RemoteError(f"chunk {chunk} of a state of {self._grid.chunks} chunks")
        size = 4 * self._grid.length(chunk)
        if len(data) != size:
            raise RemoteError(f"chunk {chunk} of the {kind} has {len(data)} bytes, not {size}")
        if chunk_hash(data) != self.header.chunk_hash(kind, chunk):
            raise RemoteError(f"chunk {chunk} of the {kind} is not the certified one")
        memory: object = data.obj if isinstance(data, memoryview) else data
        if memory is self._vectors[kind]:
            return self._arrive(kind, chunk)
        return self._write(kind, chunk, np.frombuffer(data, np.float32))

    def lend(self, kind: StateKind, chunk: int) -> memoryview | None:
        """The place of a missing chunk, to write its bytes there and `accept` them, or to `give_back`.

        None if it is lent already, or cannot be had any more. Any thread.
        """
        piece = kind, chunk
        with self._lock:
            if piece in self._here or piece in self._lent or piece in self._spoilt:
                return None
            self._lent.add(piece)
        start, stop = self._grid.span(chunk)
        return self._vectors[kind].data.cast("B")[4 * start : 4 * stop]

    def give_back(self, kind: StateKind, chunk: int, *, clean: bool) -> None:
        """A place was lent for nothing. clean: nobody writes there any more. Any thread."""
        with self._lock:
            self._lent.discard((kind, chunk))
            if not clean:
                self._spoilt.add((kind, chunk))

    def _write(self, kind: StateKind, chunk: int, values: F32) -> bool:
        piece = kind, chunk
        with self._lock:
            if piece in self._here:
                return False
            if piece in self._lent or piece in self._spoilt:
                self._aside[piece] = values.copy()
                self._here.add(piece)
                return True
            self._lent.add(piece)
        self._vectors[kind][slice(*self._grid.span(chunk))] = values
        return self._arrive(kind, chunk)

    def _arrive(self, kind: StateKind, chunk: int) -> bool:
        """What is in the chunk's place is right, and nobody writes there."""
        with self._lock:
            self._lent.discard((kind, chunk))
            first = (kind, chunk) not in self._here
            self._here.add((kind, chunk))
        return first

    def copy_from(self, state: CertifiedState, header: StateHeader) -> int:
        """Take over the chunks that a state has alike, by its `header`, computed here. Returns how many.

        Nothing of a state on another grid.
        """
        if header.grid != self._grid:
            return 0
        copied = 0
        for kind, chunk in self.missing():
            if header.chunk_hash(kind, chunk) == self.header.chunk_hash(kind, chunk):
                vector = state.anchor if kind is StateKind.ANCHOR else state.momentum
                copied += self._write(kind, chunk, vector[slice(*self._grid.span(chunk))])
        return copied

    def chunk(self, kind: StateKind, chunk: int) -> memoryview | None:
        """The bytes of a chunk that is here, a read-only view; None while it is missing."""
        with self._lock:
            if (kind, chunk) not in self._here:
                return None
            aside = self._aside.get((kind, chunk))
        if aside is not None:
            return aside.data.cast("B").toreadonly()
        start, stop = self._grid.span(chunk)
        return self._vectors[kind][start:stop].data.cast("B").toreadonly()

    def missing(self) -> list[tuple[StateKind, int]]:
        """What has yet to come, anchor first, in order."""
        with self._lock:
            return [
                (kind, chunk)
                for kind in StateKind
                for chunk in range(self._grid.chunks)
                if (kind, chunk) not in self._here
            ]

    def finish(self) -> CertifiedState:
        """The complete state; the assembly's memory becomes the state's. Raises LocalError while chunks are missing."""
        if missing := self.missing():
            raise LocalError(f"{len(missing)} chunks of the state are still missing")
        for kind in StateKind:
            self._put_in_place(kind)
        header = self.header
        return CertifiedState(
            term=header.term,
            round=header.round,
            tokens=header.tokens,
            layout_hash=header.layout,
            anchor=frozen(self._vectors[StateKind.ANCHOR]),
            momentum=frozen(self._vectors[StateKind.MOMENTUM]),
        )

    def _put_in_place(self, kind: StateKind) -> None:
        """What came aside goes into the vector; into one of its own if somebody may write to this one."""
        with self._lock:
            aside = {chunk: values for (of, chunk), values in self._aside.items() if of is kind}
            unsafe = any(of is kind for of, _ in self._lent | self._spoilt)
        if unsafe:
            self._vectors[kind] = self._vectors[kind].copy()
        for chunk, values in aside.items():
            self._vectors[kind][slice(*self._grid.span(chunk))] = values
