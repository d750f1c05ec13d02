"""A node's contribution to a round: encoded once, committed to by one root, and never changed.

What travels to the owner of a chunk is

    payload = encoded chunk ‖ Merkle path of its BLAKE3 hash under the contribution's root

The root is in the signed Ready and in the plan. With the path beside the bytes an owner checks each chunk by itself, on
arrival, for 32 bytes per doubling of the number of chunks; so a contributor cannot send one thing to the first owner of
a chunk and another to the owner after a re-plan. (Frames are not signed one by one: this protects the sum, and does not
give third parties a proof against the sender.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from shoal.collectives.aggregate import span_scratch
from shoal.collectives.codecs import F32, SPAN_VALUES, U8, Codec, chunk_codec, final_chunk_codec
from shoal.collectives.commitment import MerkleTree, chunk_hash, path_bytes, path_proves
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.collectives.memory import own_memory
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan

_DOT_VALUES = 8192
"""Few enough for BLAS to stay in this thread, and so for the order of its sum to be the same every time."""


def payload_bytes(grid: Grid, codec: Codec, chunk: int) -> int:
    """Length in bytes of the payload of a contributed chunk: the encoded values and their Merkle path."""
    return codec.encoded_bytes(grid.length(chunk)) + path_bytes(chunk, grid.chunks)


def encoded_part(payload: U8, *, grid: Grid, codec: Codec, chunk: int, root: bytes) -> U8 | None:
    """The encoded chunk in a payload of the right length, or None if it is not what `root` commits to."""
    size = codec.encoded_bytes(grid.length(chunk))
    encoded, path = payload[:size], payload[size:].tobytes()
    proven = path_proves(root, chunk_hash(encoded.data), chunk, grid.chunks, path)
    return encoded if proven else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedContribution:
    """All payloads of one contribution, in one read-only buffer: payload c lies at offsets[c] … offsets[c + 1].

    codec: as a plan names it. top: the hash right under the root. squares: per chunk the sum of squares of the decoded
    values, in float64, of buffers 0. For audit and clipping; it enters no arithmetic whose bits matter.
    """

    grid: Grid
    codec: str
    buffer: U8
    offsets: tuple[int, ...]
    root: bytes
    top: bytes
    squares: tuple[float, ...]

    @classmethod
    def encode(
        cls,
        values: F32,
        grid: Grid,
        name: str,
        *,
        dither: Dither | None = None,
        threads: int = 1,
        allocate: Callable[[int], memoryview] = own_memory,
    ) -> Self:
        """The contribution of `values`, (numel,) float32, in the codec that a plan calls `name`, `dither` for int4.

        allocate: gives the memory of its buffer.

        Raises LocalError if they do not fit the grid, are not all finite, or int4 has no dither; ConfigError for
        an unknown codec.
        """
        if values.shape != (grid.numel,):
            raise LocalError(f"{values.shape} values on a grid of {grid.numel}")
        sizes = (payload_bytes(grid, chunk_codec(name, grid, chunk), chunk) for chunk in range(grid.chunks))
        offsets = tuple(accumulate(sizes, initial=0))
        buffer = np.frombuffer(allocate(offsets[-1]), np.uint8)

        def encode_chunk(chunk: int) -> tuple[bytes, float]:
            how = chunk_codec(name, grid, chunk)
            size = how.encoded_bytes(grid.length(chunk))
            encoded = buffer[offsets[chunk] : offsets[chunk] + size]
            how.encode(values[slice(*grid.span(chunk))], out=encoded, dither=dither.chunk(chunk) if dither else None)
            return chunk_hash(encoded.data), sum_of_squares(how, encoded, grid.length(chunk))

        with ThreadPoolExecutor(threads) as pool:
            hashes, squares = zip(*pool.map(encode_chunk, range(grid.chunks)), strict=True)
        tree = MerkleTree(hashes)
        for chunk in range(grid.chunks):
            path = tree.path(chunk)
            buffer[offsets[chunk + 1] - len(path) : offsets[chunk + 1]] = np.frombuffer(path, np.uint8)
        buffer.flags.writeable = False
        return cls(grid=grid, codec=name, buffer=buffer, offsets=offsets, root=tree.root, top=tree.top, squares=squares)

    def chunk_codec(self, chunk: int) -> Codec:
        """The codec of one chunk."""
        return chunk_codec(self.codec, self.grid, chunk)

    def payload(self, chunk: int) -> memoryview:
        """Bytes that are sent to the owner of `chunk`."""
        return self.buffer[self.offsets[chunk] : self.offsets[chunk + 1]].data

    def encoded(self, chunk: int) -> U8:
        """The encoded chunk alone, read-only."""
        size = self.chunk_codec(chunk).encoded_bytes(self.grid.length(chunk))
        return self.buffer[self.offsets[chunk] : self.offsets[chunk] + size]

    def concatenated(self) -> bytes:
        """All encoded chunks in order, without the paths: what an audit is given."""
        return b"".join(self.encoded(chunk).tobytes() for chunk in range(self.grid.chunks))

    def decoded(self) -> F32:
        """Decode the contribution to the values that everyone else sees: (numel,) float32."""
        values = np.empty(self.grid.numel, np.float32)
        for chunk in range(self.grid.chunks):
            self.chunk_codec(chunk).decode_into(self.encoded(chunk), values[slice(*self.grid.span(chunk))])
        return values


def place_of(plan: Plan, me: PeerId, contribution: EncodedContribution | None) -> int:
    """This node's place in the plan, after checking that the contribution is the one that the plan names.

    Raises LocalError if it is another, or the plan does not name this node.
    """
    place = plan.number(me)
    if place is None:
        raise LocalError("a reduction at a node that takes no part in it")
    participant = plan.participants[place]
    if participant.weight > 0:
        if contribution is None or contribution.root != participant.root:
            raise LocalError("the plan counts on another contribution than this node's")
        if contribution.grid != Grid.of(plan) or contribution.codec != plan.codec:
            raise LocalError("this node's contribution is on another grid, or in another codec, than the plan")
    return place


def sum_of_squares(codec: Codec, encoded: U8, n: int) -> float:
    """Sum up the squares of the `n` decoded values of a chunk, in float64; 0 of buffers, which have no norm.

    Raises Undecodable.
    """
    if codec.plain:
        return 0.0
    total, wide = 0.0, np.empty((4, _DOT_VALUES), np.float64)
    flat = wide.reshape(-1)
    for start in range(0, n, SPAN_VALUES):
        values = codec.decode_span(encoded, n, start, min(start + SPAN_VALUES, n), span_scratch())
        for at in range(0, values.size, flat.size):
            part = values[at : at + flat.size]
            flat[: part.size] = part
            flat[part.size :] = 0
            total += float(np.vecdot(wide, wide).sum())
    return total


def residual_of_chunk(
    values: F32,
    contribution: EncodedContribution,
    chunk: int,
    included: bool,
    out: F32,
    *,
    final: U8 | None = None,
) -> None:
    """Write into `out`, as long as the chunk, the part of it that a certified round did not count, for the next one.

    values: (numel,) float32, what `contribution` was encoded from. included: whether the certified bitmap names this
    node. final: the encoded chunk that it was reduced to, checked; None where it is not here. An excluded chunk leaves
    all of it. An included one leaves its quantisation error, and all of where a final that leaves values out has none.
    One of buffers leaves nothing, whatever became of it: the next contribution has newer values of them.
    Raises LocalError if sizes differ.
    """
    grid = contribution.grid
    if values.shape != (grid.numel,) or out.shape != (grid.length(chunk),):
        raise LocalError("values, contribution and residual of different sizes")
    here = values[slice(*grid.span(chunk))]
    if contribution.chunk_codec(chunk).plain:
        out.fill(0)
        return
    if not included:
        np.copyto(out, here)
        return
    contribution.chunk_codec(chunk).decode_into(contribution.encoded(chunk), out)
    reduced = final_chunk_codec(contribution.codec, grid, chunk)
    if final is not None and reduced.leaves_out:
        applied = np.empty_like(out)
        reduced.decode_into(final, applied)
        out[applied == 0] = 0
    np.subtract(here, out, out=out)
