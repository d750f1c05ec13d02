"""Which values of a block are kept, and how their places lie in bytes: what the sparse codecs share.

Values come in blocks of 4096, the last of a chunk perhaps shorter. Of a block of n values min(k, n) are kept, always:
those of largest magnitude, of equal ones the lower index. A block with fewer that are not zero keeps zeros besides. So
the number of bytes depends on nothing but the length, and there is one way of writing a block.

Their indices x(0) < x(1) < … are written by Elias and Fano: with l = ⌊log2(n ÷ count)⌋, the l low bits of each, one
after the other, and zero bits up to a whole byte; then count + ⌊(n − 1) ÷ 2^l⌋ bits, of which those numbered
i + ⌊x(i) ÷ 2^l⌋ are set, and zero bits up to a whole byte. Or, unless that is longer, as a bitmap of the block, bit x
set for each, with zero bits up to a whole byte; which of the two follows from count and n. Bits go from the lowest of a
byte to the highest.

Of 64 indices in 4096 each takes 8 bits so, of 256 six. SparseLoCo (arXiv 2508.15706) writes each in 12, in blocks of
4096 too. The code: S. Vigna, Quasi-succinct indices, arXiv 1206.4300, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.collectives.spans import F32, U8, Undecodable

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
        """Those of a block of `length`, of which at most `k` are kept."""
        return cls(length, min(k, length))

    @property
    def low_bits(self) -> int:
        """How many bits of an index are written as they are."""
        return (self.length // self.count).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """How long the bits are in which the rest of all indices is told."""
        return self.count + ((self.length - 1) >> self.low_bits)

    @property
    def as_bitmap(self) -> bool:
        """Whether the indices are written as a bitmap."""
        return _bytes(self.length) <= self._coded_bytes

    @property
    def index_bytes(self) -> int:
        """How long the indices of one block are."""
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
