"""The certified state, the header that names its chunks, and its assembly from chunks that anyone may bring.

The digest that members vote on is

    H("state", canonical([rebases, rollbacks, round, tokens, numel, chunk_values, layout, A, M]))       outer Nesterov
    H("state", canonical([rebases, rollbacks, round, tokens, numel, chunk_values, layout, A, M, V]))    outer AdamW
    H("imaged state", canonical([rebases, rollbacks, round, tokens, numel, chunk_values, layout, A, M, I]))

with A, M and V the Merkle roots over the BLAKE3 hashes of the anchor's, the momentum's and the second moment's chunks
(little-endian fp32), and I over those of the anchor's image in bf16 (`policy_image`), in swarms that want it. Which
vectors a state has is the outer optimizer's affair; each is as long as the anchor. So whoever trusts a certificate
checks a header against its digest, and then each chunk against the header, in any order and from any donor; no chunk
needs the others. Who wants the image alone is given the roots A and M, and the hashes of the image's chunks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Self

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.collectives.grid import CHUNK_LIMIT_VALUES, Grid
from shoal.collectives.memory import VectorPool
from shoal.collectives.policy_image import U8, VALUE_BYTES, image_of, put_values
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Count, Hash, Message, Term, domain_hash
from shoal.protocol.wire import HASH_BYTES, canonical

HEADER_HASHES_LIMIT = 32_000
"""One hash per vector and chunk: together they have to fit into one message (`wire.MESSAGE_LIMIT_BYTES`)."""
STATE_CHUNK_LIMIT = HEADER_HASHES_LIMIT // 2
"""Chunks of a state of two vectors."""

Hashes = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES * STATE_CHUNK_LIMIT)]
NoHashes = Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES * STATE_CHUNK_LIMIT)]

# The bytes of an array are what is hashed and sent. A big-endian port would have to swap them in `chunk_bytes`.
assert sys.byteorder == "little"


class StateKind(StrEnum):
    """A vector of a state, in the order in which a state has them. Momentum is AdamW's first moment."""

    ANCHOR = "anchor"
    MOMENTUM = "momentum"
    SECOND_MOMENT = "second_moment"


NESTEROV_KINDS = (StateKind.ANCHOR, StateKind.MOMENTUM)
"""Vectors of a state whose outer optimizer is Nesterov's."""
ADAMW_KINDS = (StateKind.ANCHOR, StateKind.MOMENTUM, StateKind.SECOND_MOMENT)
"""Vectors of a state whose outer optimizer is AdamW."""


def frozen(array: F32) -> F32:
    """`array` itself, from now on read-only."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CertifiedState:
    """S(e): what all members hold bit-identically after round e.

    anchor, momentum: (numel,) float32 in canonical parameter order, contiguous and read-only.
    second_moment: the same, None where the outer optimizer has none. layout_hash: of the names and shapes of the
    parameters. tokens: trained on so far by certified contributions. imaged: its digest covers its image in bf16.

    Raises LocalError for arrays of another kind.
    """

    term: Term
    round: int
    tokens: int
    layout_hash: bytes
    anchor: F32
    momentum: F32
    second_moment: F32 | None = None
    imaged: bool = False

    @classmethod
    def initial(
        cls, anchor: F32, layout_hash: bytes, kinds: Sequence[StateKind] = NESTEROV_KINDS, *, imaged: bool = False
    ) -> Self:
        """S(0) over this anchor, which is frozen: every other vector is zero."""
        vectors = [frozen(anchor), *(frozen(np.zeros_like(anchor)) for _ in kinds[1:])]
        return cls.of_vectors(vectors, term=Term(), round=0, tokens=0, layout_hash=layout_hash, imaged=imaged)

    @classmethod
    def of_vectors(
        cls,
        vectors: Sequence[F32],
        *,
        term: Term,
        round: int,
        tokens: int,
        layout_hash: bytes,
        imaged: bool = False,
    ) -> Self:
        """The state of these vectors, in the order of `StateKind`."""
        anchor, momentum, *others = vectors
        return cls(
            term=term,
            round=round,
            tokens=tokens,
            layout_hash=layout_hash,
            anchor=anchor,
            momentum=momentum,
            second_moment=others[0] if others else None,
            imaged=imaged,
        )

    def __post_init__(self) -> None:
        vectors = [self.vector(kind) for kind in self.kinds]
        for array in vectors:
            if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise LocalError("a certified state holds contiguous (numel,) float32 vectors")
            if array.flags.writeable:
                raise LocalError("a certified state is read-only; freeze the vectors first")
        if len({array.shape for array in vectors}) != 1 or len(self.layout_hash) != HASH_BYTES:
            raise LocalError("the vectors and the layout of a certified state do not fit together")

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """Which vectors it has, in order."""
        return NESTEROV_KINDS if self.second_moment is None else ADAMW_KINDS

    def vector(self, kind: StateKind) -> F32:
        """One of them. Raises LocalError if it has none such."""
        if kind is StateKind.ANCHOR:
            return self.anchor
        found = self.momentum if kind is StateKind.MOMENTUM else self.second_moment
        if found is None:
            raise LocalError(f"a state without {kind}")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all its vectors."""
        return self.anchor.nbytes * len(self.kinds)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self.anchor.size


class StateHeader(Message, frozen=True, kw_only=True, dict=True):
    """Header of a state, with all but its values: counters, shape, and the hashes of all chunks, joined in order.

    second_moment: empty where the state has none. image: left out where the state is not imaged.
    """

    term: Term
    round: Count
    tokens: Count
    numel: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_LIMIT_VALUES)]
    layout: Hash
    anchor: Hashes
    momentum: Hashes
    second_moment: NoHashes = b""
    image: Hashes | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        expected = HASH_BYTES * -(-self.numel // self.chunk_values)
        image = [self.image] if self.image else []
        if any(len(hashes) != expected for hashes in (*map(self.hashes, self.kinds), *image)):
            raise ValueError("a state header without exactly one hash per chunk")
        if expected * (len(self.kinds) + len(image)) > HASH_BYTES * HEADER_HASHES_LIMIT:
            raise ValueError("a state header of too many chunks")

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """Which vectors the state has, in order."""
        return ADAMW_KINDS if self.second_moment else NESTEROV_KINDS

    @property
    def grid(self) -> Grid:
        """The grid of every vector."""
        return Grid(self.numel, self.chunk_values)

    @cached_property
    def digest(self) -> bytes:
        """Hash that members vote on; the preimage is at the top of this module."""
        roots = [merkle_root(_split(self.hashes(kind))) for kind in self.kinds]
        return _digest(self, roots, merkle_root(_split(self.image)) if self.image else None)

    @cached_property
    def of_image(self) -> ImageHeader | None:
        """The header of the state's image, with the same digest; None for a state that is not imaged."""
        if not self.image:
            return None
        return ImageHeader(
            term=self.term,
            round=self.round,
            tokens=self.tokens,
            numel=self.numel,
            chunk_values=self.chunk_values,
            layout=self.layout,
            roots=b"".join(merkle_root(_split(self.hashes(kind))) for kind in self.kinds),
            image=self.image,
        )

    def hashes(self, kind: StateKind) -> bytes:
        """The hashes of all chunks of that vector, joined; empty if the state has none such."""
        if kind is StateKind.ANCHOR:
            return self.anchor
        return self.momentum if kind is StateKind.MOMENTUM else self.second_moment

    def chunk_hash(self, kind: StateKind, chunk: int) -> bytes:
        """The BLAKE3 hash that chunk `chunk` of that vector must have; empty if the state has no such vector."""
        hashes = self.hashes(kind)
        return hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


class ImageHeader(Message, frozen=True, kw_only=True, dict=True):
    """Header of a state's image: what the state's header has, with the roots of its vectors in place of their hashes.

    roots: joined, in the order of the vectors. image: the BLAKE3 hashes of the image's chunks, joined.
    """

    term: Term
    round: Count
    tokens: Count
    numel: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_LIMIT_VALUES)]
    layout: Hash
    roots: Annotated[bytes, msgspec.Meta(min_length=2 * HASH_BYTES, max_length=3 * HASH_BYTES)]
    image: Hashes

    def __post_init__(self) -> None:
        if len(self.image) != HASH_BYTES * -(-self.numel // self.chunk_values) or len(self.roots) % HASH_BYTES:
            raise ValueError("an image's header without exactly one hash per chunk")

    @property
    def grid(self) -> Grid:
        """The grid of the image."""
        return Grid(self.numel, self.chunk_values)

    @cached_property
    def digest(self) -> bytes:
        """The digest of the state: the certified one, if the image is that state's."""
        return _digest(self, _split(self.roots), merkle_root(_split(self.image)))

    def chunk_hash(self, chunk: int) -> bytes:
        """The BLAKE3 hash that a chunk of the image must have."""
        return self.image[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


def _digest(header: StateHeader | ImageHeader, roots: Sequence[bytes], image: bytes | None) -> bytes:
    term = [header.term.rebases, header.term.rollbacks]
    counters = [header.round, header.tokens, header.numel, header.chunk_values]
    preimage = [*term, *counters, header.layout, *roots]
    if image is None:
        return domain_hash("state", canonical(preimage))
    return domain_hash("imaged state", canonical([*preimage, image]))


@dataclass(frozen=True, slots=True, eq=False)
class PolicyImage:
    """The image of a certified state: its anchor in bf16, and all that a node has of it which only samples.

    halves: (2 · numel,) uint8, the chunks of the image one after the other; read-only. Each has the hash that `header`
    says, which has the certified digest: see to both before making one.
    """

    header: ImageHeader
    halves: U8

    @property
    def term(self) -> Term:
        """Term of the round that led to the state."""
        return self.header.term

    @property
    def round(self) -> int:
        """The round that led to the state."""
        return self.header.round

    @property
    def layout_hash(self) -> bytes:
        """Of the names and shapes of the parameters."""
        return self.header.layout

    @property
    def tokens(self) -> int:
        """Trained on so far by certified contributions."""
        return self.header.tokens

    def chunk(self, chunk: int) -> U8:
        """The image of one chunk. Raises LocalError outside the grid."""
        start, stop = self.header.grid.span(chunk)
        return self.halves[VALUE_BYTES * start : VALUE_BYTES * stop]

    def anchor(self, vectors: VectorPool) -> F32:
        """The values, (numel,) float32, in memory of `vectors`; read-only."""
        values = vectors.take(self.header.numel)
        put_values(self.halves, values)
        return frozen(values)


HeldState = CertifiedState | PolicyImage
"""State of which a node has all, or the policy's image alone."""


def image_of_chunk(state: HeldState, grid: Grid, chunk: int) -> U8:
    """The image of one chunk of a state. Raises LocalError outside the grid."""
    if isinstance(state, PolicyImage):
        return state.chunk(chunk)
    return image_of(state.anchor[slice(*grid.span(chunk))])


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def check_grid(state: CertifiedState, grid: Grid) -> None:
    """Raises LocalError if the grid is another state's or too fine."""
    if grid.numel != state.numel or grid.chunks * (len(state.kinds) + state.imaged) > HEADER_HASHES_LIMIT:
        raise LocalError(f"{grid.chunks} chunks of {grid.numel} values are no grid of a state of {state.numel} values")


def header_of(state: CertifiedState, grid: Grid, *, threads: int = 1) -> StateHeader:
    """The header of `state`, hashing every chunk in `threads` threads.

    Raises LocalError if the grid is another state's or too fine.
    """
    check_grid(state, grid)
    pieces = [(kind, chunk) for kind in state.kinds for chunk in range(grid.chunks)]
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(lambda piece: chunk_hash(chunk_bytes(state, grid, *piece)), pieces))
        of_chunks = range(grid.chunks if state.imaged else 0)
        image = b"".join(pool.map(lambda chunk: chunk_hash(image_of_chunk(state, grid, chunk).data), of_chunks))
    anchor, momentum, second_moment = (b"".join(hashes[n * grid.chunks : (n + 1) * grid.chunks]) for n in range(3))
    return StateHeader(
        term=state.term,
        round=state.round,
        tokens=state.tokens,
        numel=state.numel,
        chunk_values=grid.chunk_values,
        layout=state.layout_hash,
        anchor=anchor,
        momentum=momentum,
        second_moment=second_moment,
        image=image or msgspec.UNSET,
    )


def chunk_bytes(state: CertifiedState, grid: Grid, kind: StateKind, chunk: int) -> memoryview:
    """The bytes of one chunk of a vector, a read-only view. Raises LocalError outside the grid, or without such."""
    start, stop = grid.span(chunk)
    return state.vector(kind)[start:stop].data.cast("B")


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
        self._vectors = {kind: take(header.numel) for kind in header.kinds}
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._here: set[tuple[StateKind, int]] = set()
        self._lent: set[tuple[StateKind, int]] = set()  # somebody may write there
        self._spoilt: set[tuple[StateKind, int]] = set()  # nobody knows whether somebody does
        self._aside: dict[tuple[StateKind, int], F32] = {}  # what is here, and not in its place

    def accept(
        self, kind: StateKind, chunk: int, data: bytes | bytearray | memoryview, digest: bytes | None = None
    ) -> bool:
        """Take a chunk if its bytes are the certified ones; False if it was here already.

        data: of any memory, copied after the check, once; or the place that was lent for the chunk, which nobody writes
        any more: from now on it is not lent. digest: its `chunk_hash`, of who has made it. Raises RemoteError for other
        bytes: the chunk is not here then, and its place, if it was that, is still lent.
        """
        if kind not in self._vectors or not 0 <= chunk < self._grid.chunks:
            raise RemoteError(f"chunk {chunk} of the {kind} of a state of {self._grid.chunks} chunks")
        size = 4 * self._grid.length(chunk)
        if len(data) != size:
            raise RemoteError(f"chunk {chunk} of the {kind} has {len(data)} bytes, not {size}")
        if (digest or chunk_hash(data)) != self.header.chunk_hash(kind, chunk):
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
        """Note that a chunk's place holds the right bytes, and nobody writes there. Returns True if it is new."""
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
            wanted = self.header.chunk_hash(kind, chunk)
            values = state.vector(kind)[slice(*self._grid.span(chunk))]
            # Its memory may be a file's, and a disk may have changed that since the header was worked out.
            if header.chunk_hash(kind, chunk) == wanted and chunk_hash(values.data.cast("B")) == wanted:
                copied += self._write(kind, chunk, values)
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
        """Chunks that have yet to come, anchor first, in order."""
        with self._lock:
            return [
                (kind, chunk)
                for kind in self.header.kinds
                for chunk in range(self._grid.chunks)
                if (kind, chunk) not in self._here
            ]

    def finish(self) -> CertifiedState:
        """The complete state; the assembly's memory becomes the state's. Raises LocalError while chunks are missing."""
        if missing := self.missing():
            raise LocalError(f"{len(missing)} chunks of the state are still missing")
        header = self.header
        for kind in header.kinds:
            self._put_in_place(kind)
        vectors = [frozen(self._vectors[kind]) for kind in header.kinds]
        return CertifiedState.of_vectors(
            vectors,
            term=header.term,
            round=header.round,
            tokens=header.tokens,
            layout_hash=header.layout,
            imaged=bool(header.image),
        )

    def _put_in_place(self, kind: StateKind) -> None:
        """Copy the chunks that came aside into the vector; into a copy of it if somebody may write to this one."""
        with self._lock:
            aside = {chunk: values for (of, chunk), values in self._aside.items() if of is kind}
            unsafe = any(of is kind for of, _ in self._lent | self._spoilt)
        if unsafe:
            self._vectors[kind] = self._vectors[kind].copy()
        for chunk, values in aside.items():
            self._vectors[kind][slice(*self._grid.span(chunk))] = values
