"""The dense 2-bit codec: of every value its sign, and which of two magnitudes of its block.

All numbers are little-endian. A chunk is its blocks of 512 values, the last perhaps shorter, one after the other, then
zero bytes up to a multiple of 4. A block is

    f4 low, f4 high, then 2 bits per value, four to a byte, the first in the lowest bits:
    bit 0 high instead of low, bit 1 negative; zero bits up to a whole byte; decoded as ±low or ±high

The two magnitudes are means. With m the magnitudes of a block in order,

    mean(x) = sum(x) ÷ count, where sum adds the upper half of x to the lower one, padded with +0 to a power of two,
              until one is left
    border  = the largest of mean(m), the least of m, and (mean(m) + half of the largest) ÷ 2
    low     = mean of those that are not above the border     high = mean of those above it, at least low; low if none

where the sums have +0 in the places of the others, and both end at VALUE_LIMIT, and are +0 below 2^-126. A value whose
magnitude comes out as +0 is written as 0, not negative and not high.

So a value is decoded as the mean of those that fell into the same bucket, and what encoding loses is uncorrelated with
what is sent. A contributor carries it on to its next contribution; an owner carries nothing of what its mean loses.

With the mean alone as border, what is far above the rest goes out as the mean of a third of all; where that goes the
same way round after round, what is left of it piles up. Where half of what is learnt is the same in every round, the
residual after 100 rounds had 2.5 times the norm of a round's (11 times with heavy tails), and has 0.5 times (0.8) with
the border as it is; nothing is lost by it elsewhere (once; t-distribution of 3 degrees).

Two bits with error feedback lose next to nothing in DiLoCo: MuLoCo, arXiv 2505.23725v1. Means of buckets are how the
authors of SparseLoCo (arXiv 2508.15706) decode; theirs are four of equal width around the mean of all values, here one
bit is the sign.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.dither import ChunkDither
from shoal.collectives.memory import F32, U8
from shoal.collectives.spans import (
    LIMIT_BITS,
    SMALLEST_NORMAL,
    VALUE_LIMIT,
    BlockCodec,
    Undecodable,
    are_scales,
    in_range,
    work,
)

BLOCK_VALUES: Final = 512
_LEVELS_BYTES: Final = 8


class TwoBit(BlockCodec):
    """Two bits, rounded to the mean of the values that are written alike."""

    name = "2bit"
    block_values = BLOCK_VALUES

    def _block_bytes(self, length: int) -> int:
        return _LEVELS_BYTES + two_bit_bytes(length)

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        values = in_range(values)
        magnitudes = np.abs(values, out=work.more[: values.size])
        for span, rows in self._blocks(out, start, values.size):
            shape = len(rows), -1
            sizes = magnitudes[span].reshape(shape)
            write_two_bit(values[span].reshape(shape), sizes, _border(sizes), rows[:, :8], rows[:, 8:])

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        for span, rows in self._blocks(source, start, out.size):
            read_two_bit(rows[:, :8], rows[:, 8:], out[span].reshape(len(rows), -1))


# --- two bits a value ---


def two_bit_bytes(count: int) -> int:
    """Length in bytes of `count` values, without their two magnitudes."""
    return -(-count // 4)


def mean_magnitude(magnitudes: F32) -> F32:
    """(rows, 1): the mean of each block, by the order of additions above."""
    mean: F32 = np.divide(_sum(magnitudes), np.float32(magnitudes.shape[1]))
    return mean


def _border(magnitudes: F32) -> F32:
    """(rows, 1): what is above it is high. There is always one that is not."""
    half = np.float32(0.5)
    mean, largest = mean_magnitude(magnitudes), magnitudes.max(axis=1, keepdims=True)
    between = np.multiply(np.add(mean, np.multiply(largest, half)), half)
    border: F32 = np.maximum(np.maximum(mean, between), magnitudes.min(axis=1, keepdims=True))
    return border


def write_two_bit(values: F32, magnitudes: F32, above: F32, levels_out: U8, codes_out: U8) -> None:
    """Blocks of `values`, (rows, count), whose `magnitudes` are high `above` (rows, 1): levels and codes of each."""
    high = magnitudes > above
    levels = _levels(magnitudes, high)
    rows, count = values.shape
    codes = np.zeros((rows, 4 * two_bit_bytes(count)), np.uint8)
    inner = codes[:, :count]
    np.left_shift((values < 0).view(np.uint8), np.uint8(1), out=inner)
    np.bitwise_or(inner, high.view(np.uint8), out=inner)
    if not levels.all():
        inner[np.where(high, levels[:, 1:], levels[:, :1]) == 0] = 0
    levels_out[:] = levels.astype("<f4").view(np.uint8)
    codes_out[:] = _packed(codes)


def read_two_bit(levels_in: U8, codes_in: U8, out: F32) -> None:
    """Read into `out`, (rows, count), blocks of `write_two_bit`. Raises Undecodable for what that does not write."""
    levels = np.ascontiguousarray(levels_in).view("<f4").astype(np.float32, copy=False)
    low, high = levels[:, :1], levels[:, 1:]
    if not are_scales(levels.view(np.uint32), 0x0080_0000, LIMIT_BITS) or (low > high).any():
        raise Undecodable("a 2-bit block with magnitudes that are negative, subnormal, not finite or not in order")
    codes = np.take(_UNPACKED, codes_in).view(np.uint8)
    if codes[:, out.shape[1] :].any():
        raise Undecodable("a 2-bit block whose padding is not zero")
    codes = codes[:, : out.shape[1]]
    # Chosen by bits: a masked copy takes three times as long where the mask is as good as random.
    bits, of_low, of_high = out.view(np.uint32), low.view(np.uint32), high.view(np.uint32)
    np.multiply(codes & np.uint8(1), of_low ^ of_high, out=bits)
    np.bitwise_xor(bits, of_low, out=bits)
    if not levels.all() and codes[bits == 0].any():
        raise Undecodable("a 2-bit block with a zero that is negative or high")
    np.bitwise_or(bits, np.left_shift(codes & np.uint8(2), np.uint32(30), dtype=np.uint32), out=bits)


def _levels(magnitudes: F32, high: npt.NDArray[np.bool_]) -> F32:
    """(rows, 2): low and high. There is always one that is low."""
    count = np.count_nonzero(high, axis=1, keepdims=True).astype(np.float32)
    terms = np.multiply(magnitudes, high)
    upper = np.divide(_sum(terms), np.maximum(count, np.float32(1)))
    np.subtract(magnitudes, terms, out=terms)  # exact: +0 where they are high
    low = np.divide(_sum(terms), np.float32(magnitudes.shape[1]) - count)
    levels: F32 = np.minimum(np.concatenate([low, np.maximum(upper, low)], axis=1), VALUE_LIMIT)
    levels[levels < SMALLEST_NORMAL] = 0
    return levels


def _sum(terms: F32) -> F32:
    """(rows, 1): halves added up until one is left, so that the order of the additions is the same everywhere."""
    count = terms.shape[1]
    if count == 1:
        return terms
    half = 1 << (count - 1).bit_length() - 1
    halves = terms[:, :half].copy()
    rest = halves[:, : count - half]  # to the others +0 would be added
    np.add(rest, terms[:, half:], out=rest)
    while half > 1:
        half //= 2
        halves = np.add(halves[:, :half], halves[:, half:])
    return halves


def _packed(codes: U8) -> U8:
    """Four codes to a byte: (rows, n) from (rows, 4n)."""
    fours = codes.view("<u4")
    pairs = fours | fours >> np.uint32(6)  # in the lowest byte of four: the first code and the second
    packed: U8 = (pairs | pairs >> np.uint32(12)).astype(np.uint8)
    return packed


_UNPACKED: Final = np.array([[byte >> shift & 3 for shift in (0, 2, 4, 6)] for byte in range(256)], np.uint8).view(
    "<u4"
)[:, 0]
"""The four codes of every byte, as one number."""
