"""The sparse codecs: of each block of values only the largest, what a node contributes and what a chunk is reduced to.

All numbers are little-endian. A chunk is its blocks one after the other, then zero bytes up to a multiple of 4. What
is not kept is +0. With k values kept of a block that is contributed, and K of one that is reduced (`topk` k `-` K in a
plan's codec),

    contributed   f4 low, f4 high, indices, then 2 bits per kept value, as `two_bit` has them; but for its border, which
                  is 0 if the least of the kept magnitudes is 0, else the larger of their mean and the least
    reduced       f4 scale, indices, then i1 per kept value
                  scale = largest magnitude ÷ 127, or +0 where that is below 2^-126;
                  value = rint(x ÷ scale), ties to even; decoded as value × scale

A node keeps the error of its own contribution, an owner keeps none of its sum: so a reduced block has room for the
values of several contributions, with eight bits each. Of more than K that are not zero, the K largest remain; whoever
sent others finds in the final that they were left out, and keeps them (`residual_of_chunk`).

Which values are kept. Values come in blocks of 4096, the last of a chunk perhaps shorter. Of a block of n values
min(k, n) are kept, always: those of largest magnitude, of equal ones the lower index. A block with fewer that are not
zero keeps zeros besides. So the number of bytes depends on nothing but the length, and there is one way of writing a
block.

Their indices x(0) < x(1) < … are written by Elias and Fano: with l = ⌊log2(n ÷ count)⌋, the l low bits of each, one
after the other, and zero bits up to a whole byte; then count + ⌊(n − 1) ÷ 2^l⌋ bits, of which those numbered
i + ⌊x(i) ÷ 2^l⌋ are set, and zero bits up to a whole byte. Or, unless that is longer, as a bitmap of the block, bit x
set for each, with zero bits up to a whole byte; which of the two follows from count and n. Bits go from the lowest of a
byte to the highest.

Of 64 indices in 4096 each takes 8 bits so, of 256 six. SparseLoCo (arXiv 2508.15706) writes each in 12, in blocks of
4096 too. The code: S. Vigna, Quasi-succinct indices, arXiv 1206.4300, section 3.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.collectives.dither import ChunkDither
from shoal.collectives.memory import F32, U8
from shoal.collectives.spans import (
    INT8_SCALE_LIMIT,
    SMALLEST_NORMAL,
    BlockCodec,
    Undecodable,
    are_scales,
    bits_of,
    in_range,
)
from shoal.collectives.two_bit import mean_magnitude, read_two_bit, two_bit_bytes, write_two_bit

BLOCK_VALUES: Final = 4096

Indices: TypeAlias = npt.NDArray[np.intp]
Magnitudes: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Entries:
    """The kept values of a block of `length` values: `count` of them."""

    length: int
    count: int

    @classmethod
    def of(cls, length: int, k: int) -> Entries:
        """Entries of a block of `length`, of which at most `k` are kept."""
        return cls(length, min(k, length))

    @property
    def low_bits(self) -> int:
        """Number of low bits of an index, which are written as they are."""
        return (self.length // self.count).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Number of bits that tell the high parts of all indices together."""
        return self.count + ((self.length - 1) >> self.low_bits)

    @property
    def as_bitmap(self) -> bool:
        """True if the indices are written as a bitmap."""
        return _bytes(self.length) <= self._coded_bytes

    @property
    def index_bytes(self) -> int:
        """Length in bytes of the indices of one block."""
        return min(_bytes(self.length), self._coded_bytes)

    @property
    def _coded_bytes(self) -> int:
        return _bytes(self.count * self.low_bits) + _bytes(self.high_bits)

    def largest(self, blocks: F32) -> Indices:
        """The indices to keep of `blocks` (rows, length), none of them NaN: (rows, count), ascending."""
        rows = len(blocks)
        if self.count == self.length:
            return np.broadcast_to(np.arange(self.length), (rows, self.length))
        magnitudes = np.bitwise_and(blocks.view(np.uint32), np.uint32(0x7FFF_FFFF))
        least = self._least(magnitudes)
        kept = magnitudes >= least
        surplus = np.count_nonzero(kept, axis=1) - self.count
        tied = np.flatnonzero(surplus)
        if tied.size:
            equal = magnitudes[tied] == least[tied]
            nth = np.cumsum(equal, axis=1, dtype=np.int16)
            kept[tied] &= ~equal | (nth <= nth[:, -1:] - surplus[tied, None])
        return np.flatnonzero(kept).reshape(rows, self.count) % self.length

    def _least(self, magnitudes: Magnitudes) -> Magnitudes:
        """The least magnitude that is kept of each block (rows, length): (rows, 1).

        Each of `count` groups has a value that is not below the least of the groups' largest. What is below that, and
        what is zero, need not be sorted: nearly all of a contribution. (A partition of everything takes longer, and ten
        times as long where most values are the same, as in a sum of what is sparse.)
        """
        rows, groups = len(magnitudes), self.length // self.count
        grouped = magnitudes[:, : groups * self.count].reshape(rows, groups, self.count)
        enough = np.maximum(grouped.max(axis=1).min(axis=1, keepdims=True), np.uint32(1))
        candidates = magnitudes >= enough
        found = np.count_nonzero(candidates, axis=1)[:, None]
        width = max(int(found.max()), self.count)
        in_rows = np.zeros((rows, width), np.uint32)
        in_rows[np.arange(width) < found] = magnitudes.reshape(-1)[np.flatnonzero(candidates)]
        in_rows.sort(axis=1)
        return in_rows[:, width - self.count, None]

    def write(self, indices: Indices, out: U8) -> None:
        """`indices` (rows, count), ascending, into `out` (rows, index_bytes)."""
        if self.as_bitmap:
            out[:] = _set_bits(indices, self.length)
            return
        low = _bytes(self.count * self.low_bits)
        wide = np.unpackbits(indices.astype("<u2").reshape(-1).view(np.uint8), bitorder="little")
        bits = wide.reshape(len(indices), self.count, 16)[:, :, : self.low_bits]
        out[:, :low] = np.packbits(bits.reshape(len(indices), -1), axis=1, bitorder="little")
        out[:, low:] = _set_bits((indices >> self.low_bits) + np.arange(self.count), self.high_bits)

    def read(self, source: U8) -> Indices:
        """The indices in `source` (rows, index_bytes): (rows, count), ascending. Raises Undecodable."""
        if self.as_bitmap:
            return self._bits_set(source, self.length)
        low = _bytes(self.count * self.low_bits)
        wide = np.zeros((len(source), self.count, 16), np.uint8)
        bits = _bits_of(source[:, :low], self.count * self.low_bits)
        wide[:, :, : self.low_bits] = bits.reshape(len(source), self.count, self.low_bits)
        lower = np.packbits(wide.reshape(-1), bitorder="little").view("<u2").reshape(len(source), self.count)
        upper = self._bits_set(source[:, low:], self.high_bits) - np.arange(self.count)
        indices: Indices = np.bitwise_or(upper << self.low_bits, lower)
        if (indices[:, 1:] <= indices[:, :-1]).any() or (indices[:, -1] >= self.length).any():
            raise Undecodable("a sparse block with indices that do not ascend, or lie outside it")
        return indices

    def _bits_set(self, source: U8, n: int) -> Indices:
        """Which of `n` bits are set: `count` of them."""
        bits = _bits_of(source, n)
        if (np.count_nonzero(bits, axis=1) != self.count).any():
            raise Undecodable(f"a sparse block with other than {self.count} values")
        return np.flatnonzero(bits).reshape(len(source), self.count) % n


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _set_bits(places: Indices, n: int) -> U8:
    """Bitmaps (rows, bytes) of `n` bits, of which those in `places` (rows, count) are set."""
    bits = np.zeros((len(places), n), np.bool_)
    np.put_along_axis(bits, places, True, axis=1)
    return np.packbits(bits, axis=1, bitorder="little")


def _bits_of(source: U8, n: int) -> U8:
    """The first `n` bits of each row, one to a byte. Raises Undecodable if another is set."""
    bits = np.unpackbits(source, axis=1, bitorder="little")
    if bits[:, n:].any():
        raise Undecodable("a sparse block whose padding is not zero")
    return bits[:, :n]


_NAME = re.compile(r"topk([1-9][0-9]{0,3})-([1-9][0-9]{0,3})")


@lru_cache(maxsize=64)
def sparse_codecs(name: str) -> tuple[TopK, SparseFinal] | None:
    """The codecs of contributions and finals that `topk<k>-<K>` names, None if it names none: 1 ≤ k ≤ K ≤ 4096."""
    match = _NAME.fullmatch(name)
    if match is None or not int(match[1]) <= int(match[2]) <= BLOCK_VALUES:
        return None
    return TopK(name, int(match[1])), SparseFinal(name, int(match[2]))


class _SparseCodec(BlockCodec):
    """Blocks of which at most `k` values are kept. Subclasses write one kind of block."""

    leaves_out = True
    block_values = BLOCK_VALUES

    def __init__(self, name: str, k: int) -> None:
        self.name = name
        self._k = k

    def _block_bytes(self, length: int) -> int:
        return self._entries_bytes(Entries.of(length, self._k))

    @abstractmethod
    def _entries_bytes(self, entries: Entries) -> int:
        """Length in bytes of an encoded block."""

    @abstractmethod
    def _write(self, entries: Entries, indices: Indices, kept: F32, out: U8) -> None:
        """The kept values of blocks, (rows, count), into (rows, bytes)."""

    @abstractmethod
    def _read(self, entries: Entries, source: U8) -> tuple[Indices, F32]:
        """Indices and kept values, (rows, count), of blocks (rows, bytes). Raises Undecodable."""

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        values = in_range(values)
        for span, rows in self._blocks(out, start, values.size):
            blocks = values[span].reshape(len(rows), -1)
            entries = Entries.of(blocks.shape[1], self._k)
            indices = entries.largest(blocks)
            self._write(entries, indices, np.take_along_axis(blocks, indices, axis=1), rows)

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        out.fill(0)
        for span, rows in self._blocks(source, start, out.size):
            entries = Entries.of((span.stop - span.start) // len(rows), self._k)
            indices, kept = self._read(entries, rows)
            firsts = np.arange(span.start, span.stop, entries.length)[:, None]
            out[indices + firsts] = kept


class TopK(_SparseCodec):
    """Sparse codec of contributions: two bits per kept value."""

    def _entries_bytes(self, entries: Entries) -> int:
        return 8 + entries.index_bytes + two_bit_bytes(entries.count)

    def _write(self, entries: Entries, indices: Indices, kept: F32, out: U8) -> None:
        magnitudes = np.abs(kept)
        least = magnitudes.min(axis=1, keepdims=True)
        above = np.where(least == 0, np.float32(0), np.maximum(mean_magnitude(magnitudes), least))
        entries.write(indices, out[:, 8 : 8 + entries.index_bytes])
        write_two_bit(kept, magnitudes, above, out[:, :8], out[:, 8 + entries.index_bytes :])

    def _read(self, entries: Entries, source: U8) -> tuple[Indices, F32]:
        indices = entries.read(source[:, 8 : 8 + entries.index_bytes])
        kept = np.empty(indices.shape, np.float32)
        read_two_bit(source[:, :8], source[:, 8 + entries.index_bytes :], kept)
        return indices, kept


class SparseFinal(_SparseCodec):
    """Sparse codec of reduced chunks: eight bits per kept value."""

    def _entries_bytes(self, entries: Entries) -> int:
        return 4 + entries.index_bytes + entries.count

    def _write(self, entries: Entries, indices: Indices, kept: F32, out: U8) -> None:
        scale = np.divide(np.abs(kept).max(axis=1, keepdims=True), np.float32(127))
        scale[scale < SMALLEST_NORMAL] = 0
        quotient = np.divide(kept, np.where(scale == 0, np.float32(1), scale))
        out[:, :4] = scale.astype("<f4").view(np.uint8)
        entries.write(indices, out[:, 4 : 4 + entries.index_bytes])
        out[:, 4 + entries.index_bytes :] = np.rint(quotient).astype(np.int8).view(np.uint8)

    def _read(self, entries: Entries, source: U8) -> tuple[Indices, F32]:
        scale = np.ascontiguousarray(source[:, :4]).view("<f4").astype(np.float32, copy=False)
        if not are_scales(scale.view(np.uint32), 0x0080_0000, bits_of(INT8_SCALE_LIMIT)):
            raise Undecodable("a sparse final with a scale that is negative, subnormal, not finite or too large")
        indices = entries.read(source[:, 4 : 4 + entries.index_bytes])
        quantised = source[:, 4 + entries.index_bytes :].view(np.int8)
        if quantised.min() == -128 or quantised[(scale == 0)[:, 0]].any():
            raise Undecodable("a sparse final with the value -128, or with a value and no scale")
        return indices, np.multiply(quantised.astype(np.float32), scale)
