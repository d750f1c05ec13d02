"""The codecs with one scale per block of values, int8 and int4; what their bytes mean is specified in `codecs`.

The largest magnitudes are found in the bit patterns, where they stand in order and NaN and infinity stand above; that
is as exact and twice as fast. A scale is spread over its block before it divides or multiplies, so that nothing here
depends on where a block ends; but for int8's product, whose blocks are long enough to be rows (a sum of four took 0.82
to 0.88 of the time; once).

Saturating the values is the clip before the cast. With |x| ≤ peak and scale ≥ (peak ÷ largest)(1 − 2^-24), as rounding
one division leaves it, |x ÷ scale| rounded to fp32 is at most one unit in the last place above `largest`: rint takes
it back in int8, and in int4 the dither keeps 2^-17 away from the next whole number.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.dither import ChunkDither
from shoal.collectives.memory import F32, U8
from shoal.collectives.spans import SPAN_VALUES, VALUE_LIMIT, SpanCodec, Undecodable, bits_of, saturated, work
from shoal.protocol.errors import LocalError

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

INT8_BLOCK_VALUES: Final = 4096
INT8_SCALE_LIMIT: Final = np.float32(2.0**57)
INT4_BLOCK_VALUES: Final = 128
INT4_SCALE_LIMIT: Final = np.float32(18.125 * 2.0**57)
"""The largest bf16 of which the sevenfold is not over VALUE_LIMIT."""

SMALLEST_NORMAL: Final = np.float32(2.0**-126)


class Int8(SpanCodec):
    """Eight bits, rounded to nearest."""

    name = "int8"

    def _written_bytes(self, n: int) -> int:
        return 4 * _block_count(n, INT8_BLOCK_VALUES) + n

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        values, peaks = _peaks(values, INT8_BLOCK_VALUES, VALUE_LIMIT)
        scale = _scales(peaks, np.float32(127))
        quotient = _quotients(values, scale, INT8_BLOCK_VALUES)
        np.rint(quotient, out=quotient)
        scales, quantised = self._parts(out, n, start, values.size)
        scales[:] = scale
        np.copyto(quantised, quotient, casting="unsafe")

    def _check(self, source: U8, n: int, start: int, count: int) -> None:
        self._checked(source, n, start, count)

    def _checked(self, source: U8, n: int, start: int, count: int) -> tuple[F32, npt.NDArray[np.int8]]:
        scales, quantised = self._parts(source, n, start, count)
        bits = scales.view("<u4")
        if not are_scales(bits, 0x0080_0000, bits_of(INT8_SCALE_LIMIT)):
            raise Undecodable("an int8 chunk with a scale that is negative, subnormal, not finite or too large")
        if quantised.min() == -128:
            raise Undecodable("an int8 chunk with the value -128")
        return scales, quantised

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        scales, quantised = self._checked(source, n, start, out.size)
        np.copyto(out, quantised)
        whole = out.size // INT8_BLOCK_VALUES
        rows = out[: whole * INT8_BLOCK_VALUES].reshape(whole, INT8_BLOCK_VALUES)
        np.multiply(rows, scales[:whole, None], out=rows)
        rest = out[rows.size :]
        np.multiply(rest, scales[-1], out=rest)

    @staticmethod
    def _parts(chunk: U8, n: int, start: int, count: int) -> tuple[F32, npt.NDArray[np.int8]]:
        """The scales and the values of a span."""
        first, blocks = start // INT8_BLOCK_VALUES, _block_count(count, INT8_BLOCK_VALUES)
        head = 4 * _block_count(n, INT8_BLOCK_VALUES)
        scales = chunk[4 * first : 4 * (first + blocks)].view("<f4")
        return scales, chunk[head + start : head + start + count].view(np.int8)


class Int4(SpanCodec):
    """Four bits, rounded up or down by chance, right in the mean."""

    name = "int4"
    stochastic = True

    def _written_bytes(self, n: int) -> int:
        return 2 * _block_count(n, INT4_BLOCK_VALUES) + (n + 1) // 2

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        if dither is None:
            raise LocalError("int4 rounds by chance and needs a dither")
        values, peaks = _peaks(values, INT4_BLOCK_VALUES, np.float32(7) * INT4_SCALE_LIMIT)
        halves = (_scales(peaks, np.float32(7)).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
        quotient = _quotients(values, _from_bf16(halves), INT4_BLOCK_VALUES)
        uniform = work.more[: values.size]
        np.copyto(uniform, dither.bits(start, start + values.size))
        np.add(uniform, np.float32(0.5), out=uniform)
        np.multiply(uniform, np.float32(2.0**-16), out=uniform)
        np.add(quotient, uniform, out=quotient)
        np.floor(quotient, out=quotient)
        scales, nibbles = self._parts(out, n, start, values.size)
        np.copyto(scales, halves, casting="unsafe")
        _pack(quotient, nibbles)

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        scales, nibbles = self._parts(source, n, start, out.size)
        if not are_scales(scales, 0x0080, bits_of(INT4_SCALE_LIMIT) >> 16):
            raise Undecodable("an int4 chunk with a scale that is negative, subnormal, not finite or too large")
        if n % 2 and start + out.size == n and nibbles[-1] >> 4:
            raise Undecodable("an int4 chunk whose padding is not zero")
        sixteenfold = _unpack(nibbles)[: out.size]
        if sixteenfold.min() == -128:
            raise Undecodable("an int4 chunk with the value -8")
        np.copyto(out, sixteenfold)
        # Exact: a bf16 divided by 16 has its eight bits even where it is subnormal, and the product has eleven.
        sixteenth = np.multiply(_from_bf16(scales.astype(np.uint32)), np.float32(0.0625))
        np.multiply(out, _spread(sixteenth, INT4_BLOCK_VALUES, out.size), out=out)

    @staticmethod
    def _parts(chunk: U8, n: int, start: int, count: int) -> tuple[U16, U8]:
        """The scales and the nibbles of a span."""
        first, blocks = start // INT4_BLOCK_VALUES, _block_count(count, INT4_BLOCK_VALUES)
        head = 2 * _block_count(n, INT4_BLOCK_VALUES)
        scales = chunk[2 * first : 2 * (first + blocks)].view("<u2")
        return scales, chunk[head + start // 2 : head + (start + count + 1) // 2]


# --- blocks ---


def _block_count(n: int, block_values: int) -> int:
    return -(-n // block_values)


_STARTS: Final = {size: np.arange(0, SPAN_VALUES, size) for size in (INT8_BLOCK_VALUES, INT4_BLOCK_VALUES)}


def _peaks(values: F32, block_values: int, limit: np.float32) -> tuple[F32, F32]:
    """The values, saturated at `limit`, and the largest magnitude of each block."""
    magnitudes = work.values[: values.size].view(np.uint32)
    np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFF_FFFF), out=magnitudes)
    peaks = np.maximum.reduceat(magnitudes, _STARTS[block_values][: _block_count(values.size, block_values)])
    if int(peaks.max()) > bits_of(limit):
        values = saturated(values, limit)
        np.minimum(peaks, np.uint32(bits_of(limit)), out=peaks)
    return values, peaks.view(np.float32)


def _scales(peaks: F32, largest: np.float32) -> F32:
    """peak ÷ largest, or +0 where that is below 2^-126."""
    scale: F32 = np.divide(peaks, largest)
    if scale.min() < SMALLEST_NORMAL:
        scale[scale < SMALLEST_NORMAL] = 0
    return scale


def _quotients(values: F32, scale: F32, block_values: int) -> F32:
    """value ÷ scale of its block, in this thread's memory; of a zero block, what rounds to zero."""
    divisor = scale if scale.all() else np.where(scale == 0, np.float32(1), scale)
    quotient = _spread(divisor, block_values, values.size)
    np.divide(values, quotient, out=quotient)
    return quotient


def _spread(of_block: F32, block_values: int, n: int) -> F32:
    """What belongs to each of `n` values, (n,) float32 in this thread's memory."""
    rows = work.values[: of_block.size * block_values].reshape(of_block.size, block_values)
    np.copyto(rows, of_block[:, None])
    return work.values[:n]


def are_scales(bits: npt.NDArray[np.unsignedinteger], smallest: int, largest: int) -> bool:
    """Whether all are +0, or positive normal numbers up to the largest, in patterns of their format."""
    below = bits.dtype.type(smallest)
    above_smallest = np.subtract(bits, below)  # what is below wraps around
    return int(above_smallest.max()) <= largest - smallest or bool(
        ((bits == 0) | (above_smallest <= largest - smallest)).all()
    )


def _from_bf16(halves: U32) -> F32:
    return (halves << np.uint32(16)).view(np.float32)


# --- nibbles ---


def _pack(quantised: F32, nibbles: U8) -> None:
    """Whole numbers from −7 to 7, two to a byte: the first in the low nibble; a lone last one has zero beside it."""
    n, count = quantised.size, nibbles.size
    small = work.small[: 2 * count]
    small[n:] = 0
    np.copyto(small[:n], quantised, casting="unsafe")
    both, high = small.view("<u2"), work.pairs[:count]
    np.right_shift(both, np.uint16(4), out=high)
    np.bitwise_and(high, np.uint16(0x00F0), out=high)
    np.bitwise_and(both, np.uint16(0x000F), out=both)
    np.bitwise_or(both, high, out=both)
    np.copyto(nibbles, both, casting="unsafe")


def _unpack(nibbles: U8) -> npt.NDArray[np.int8]:
    """Two values from every byte, each times 16 (where its sign is int8's), in this thread's memory."""
    small = work.small[: 2 * nibbles.size]
    both, low = small.view("<u2"), work.pairs[: nibbles.size]
    np.copyto(both, nibbles)
    np.left_shift(both, np.uint16(4), out=low)
    np.left_shift(both, np.uint16(8), out=both)
    np.bitwise_or(both, low, out=both)
    np.bitwise_and(both, np.uint16(0xF0F0), out=both)
    return small
