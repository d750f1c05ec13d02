"""Codecs: they turn a chunk of fp32 values into bytes, and back into the same values on every machine.

Decoding is consensus-critical: every member decodes the same bytes and must get the same bits, on x86 and ARM alike.
So there is nothing here but numpy ufuncs that IEEE 754 defines to the bit (+, ÷, ×, rounding to an integer, comparison)
and integer arithmetic, with `np.float32` constants: a float64 scalar would promote, and a reciprocal or a fused
operation would round differently. Subnormals must not be flushed: `check_denormals`.

All numbers are little-endian. A chunk of n values takes:

    fp32   n × f4
    bf16   n × u2, the upper half of the fp32 pattern, rounded to nearest, ties to even;
           then zero bytes up to a multiple of 4
    int8   one f4 scale per block of 4096 values (the last block may be shorter), then n × i1,
           then zero bytes up to a multiple of 4
           scale = largest magnitude ÷ 127, or +0 where that is below 2^-126 (the block is then all zero);
           value = rint(x ÷ scale), ties to even; decoded as value × scale
    int4   one bf16 scale per block of 128 values (the last block may be shorter), then n nibbles in two's complement,
           two to a byte, the first in the low nibble, then zero bits up to a multiple of 4 bytes
           scale = largest magnitude ÷ 7, or +0 where that is below 2^-126, rounded up to a bf16;
           value = floor(x ÷ scale + u), u from `dither`; decoded as value × scale

    buffers    n × f4, as fp32, of which everything else is plain: they are values in place of updates, of which the
               mean is taken as it is, in place of the value before (`aggregate`, `outer`)

Buffers have chunks of their own behind those of the parameters. A plan's codec says how many: `int8+buffers1` is int8
for all chunks but the last, which is of buffers.

2bit is specified in `two_bit`. The sparse codecs, topk with the numbers of values kept per block, are in `sparse`. They
alone write what is reduced otherwise than what is contributed; so a plan's codec has two sides, `codec` and
`final_codec`.

−128 and −8, negative or subnormal scales, and padding other than zero are refused.

An int4 scale is rounded up, so that nothing lies beyond 7 scales: what was clipped there would come out too small in
the mean. With two bytes of scale for 128 values each takes 4.125 bits. Of the block sizes from 32 to 4096 that one had
the smallest product of squared error and size on pseudo-gradients of the text workload (once; 64 and 256 values were
0.1 to 0.4 dB worse).

Magnitudes end at VALUE_LIMIT: encoding saturates there, decoding refuses more. (int4 saturates at 126.875 × 2^57, seven
times the largest bf16 that stays within the limit.) No update of a model comes near it, and with it no weighted sum can
overflow: 2^64 of value × 2^24 of weight × 64 participants is 2^94.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.dither import ChunkDither
from shoal.collectives.grid import Grid
from shoal.collectives.memory import F32, U8
from shoal.collectives.spans import (
    INT8_SCALE_LIMIT,
    LIMIT_BITS,
    SMALLEST_NORMAL,
    SPAN_ALIGNMENT,
    SPAN_VALUES,
    VALUE_LIMIT,
    Codec,
    Encoded,
    Undecodable,
    are_scales,
    bits_of,
    in_range,
    saturated,
    within_limit,
    work,
)
from shoal.collectives.sparse import sparse_codecs
from shoal.collectives.two_bit import TwoBit
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.planning import split_codec

__all__ = (
    "DENSE",
    "F32",
    "SPAN_ALIGNMENT",
    "SPAN_VALUES",
    "U8",
    "VALUE_LIMIT",
    "Codec",
    "Encoded",
    "Undecodable",
    "check_denormals",
    "chunk_codec",
    "codec",
    "final_chunk_codec",
    "final_codec",
)

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

INT8_BLOCK_VALUES: Final = 4096
INT4_BLOCK_VALUES: Final = 128
INT4_SCALE_LIMIT: Final = np.float32(18.125 * 2.0**57)
"""The largest bf16 of which the sevenfold is not over VALUE_LIMIT."""


def codec(name: str) -> Codec:
    """Return the codec of contributions under a plan's codec. Raises ConfigError, naming the codecs there are."""
    return _both(name)[0]


def final_codec(name: str) -> Codec:
    """Return the codec of reduced chunks under a plan's codec: the same, but for the sparse. Raises ConfigError."""
    return _both(name)[1]


def chunk_codec(name: str, grid: Grid, chunk: int) -> Codec:
    """Return the codec of contributions to one chunk under a plan's codec. Raises ConfigError."""
    parameters, buffers = split_codec(name)
    return BUFFERS if chunk >= grid.chunks - buffers else codec(parameters)


def final_chunk_codec(name: str, grid: Grid, chunk: int) -> Codec:
    """Return the codec of one reduced chunk under a plan's codec. Raises ConfigError."""
    parameters, buffers = split_codec(name)
    return BUFFERS if chunk >= grid.chunks - buffers else final_codec(parameters)


@lru_cache(maxsize=16)
def _both(name: str) -> tuple[Codec, Codec]:
    if name in _CODECS:
        return _CODECS[name], _CODECS[name]
    both = sparse_codecs(name)
    if both is None:
        known = ", ".join(_CODECS)
        raise ConfigError(f"there is no codec {name!r}; choose one of {known}, or topk64-256 with any two numbers")
    return both


_HALF, _TWO = np.float32(0.5), np.float32(2)
_SMALLEST: Final = np.full(64, 2.0**-126, np.float32)  # long enough for the vector units
_HALVES: Final = np.full(64, 0x0040_0000, np.uint32).tobytes()
_SUBNORMAL: Final = np.full(64, 1, np.uint32).view(np.float32)
_DOUBLED: Final = np.full(64, 2, np.uint32).tobytes()


def check_denormals() -> None:
    """Check that this thread's FPU neither flushes subnormal results to zero nor reads them as zero.

    The mode belongs to the thread, and some libraries set it when they are loaded. Takes microseconds.

    Raises LocalError if it does: whatever this thread computed could differ from what the others compute.
    """
    if (_SMALLEST * _HALF).tobytes() != _HALVES or (_SUBNORMAL * _TWO).tobytes() != _DOUBLED:
        raise LocalError("this thread's floating point flushes subnormals to zero; bits would differ between peers")


# --- the codecs without blocks ---


class _Fp32(Codec):
    name = "fp32"

    def _written_bytes(self, n: int) -> int:
        return 4 * n

    def in_place(self, out: U8) -> F32 | None:
        return out.view("<f4")

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        kept, place = in_range(values), _fp32(out, start, start + values.size)
        if kept.__array_interface__["data"] != place.__array_interface__["data"]:  # else they lie there already
            np.copyto(place, kept)

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        np.copyto(out, _checked_fp32(source, start, start + out.size))

    def _check(self, source: U8, n: int, start: int, count: int) -> None:
        _checked_fp32(source, start, start + count)

    def decode_span(
        self, encoded: Encoded, n: int, start: int, stop: int, scratch: F32, *, checked: bool = False
    ) -> F32:
        source = self._span_source(encoded, n, start, stop)
        values = _fp32(source, start, stop) if checked else _checked_fp32(source, start, stop)
        values.flags.writeable = False
        return values


class _Buffers(_Fp32):
    """The values of buffers."""

    name = "buffers"
    plain = True


BUFFERS: Final = _Buffers()


def _fp32(source: U8, start: int, stop: int) -> F32:
    return source[4 * start : 4 * stop].view("<f4")


def _checked_fp32(source: U8, start: int, stop: int) -> F32:
    values = _fp32(source, start, stop)
    if not within_limit(values.view("<u4"), LIMIT_BITS):
        raise Undecodable("an fp32 chunk with NaN, infinity or a magnitude beyond the limit")
    return values


class _Bf16(Codec):
    name = "bf16"

    def _written_bytes(self, n: int) -> int:
        return 2 * n

    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        bits = in_range(values).view(np.uint32)
        # Round half to even: add just under half of what is cut off, and one more if the kept part is odd.
        rounded = work.values[: values.size].view(np.uint32)
        np.right_shift(bits, np.uint32(16), out=rounded)
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        np.copyto(out[2 * start : 2 * (start + values.size)].view("<u2"), rounded, casting="unsafe")

    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        halves = source[2 * start : 2 * (start + out.size)].view("<u2")
        if not within_limit(halves, LIMIT_BITS >> 16):
            raise Undecodable("a bf16 chunk with NaN, infinity or a magnitude beyond the limit")
        bits = out.view(np.uint32)
        np.copyto(bits, halves)
        np.left_shift(bits, np.uint32(16), out=bits)


# --- the codecs with one scale per block of values ---
#
# The largest magnitudes are found in the bit patterns, where they stand in order and NaN and infinity stand above;
# that is as exact and twice as fast. A scale is spread over its block before it divides or multiplies, so that
# nothing here depends on where a block ends; but for int8's product, whose blocks are long enough to be rows (a sum
# of four took 0.82 to 0.88 of the time; once).
#
# Saturating the values is the clip before the cast. With |x| ≤ peak and scale ≥ (peak ÷ largest)(1 − 2^-24), as
# rounding one division leaves it, |x ÷ scale| rounded to fp32 is at most one unit in the last place above `largest`:
# rint takes it back in int8, and in int4 the dither keeps 2^-17 away from the next whole number.


class _Int8(Codec):
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


class _Int4(Codec):
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
    """Repeat each block's value for all values of that block: (n,) float32 in this thread's memory."""
    rows = work.values[: of_block.size * block_values].reshape(of_block.size, block_values)
    np.copyto(rows, of_block[:, None])
    return work.values[:n]


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


_CODECS: Final[dict[str, Codec]] = {c.name: c for c in (_Fp32(), _Bf16(), _Int8(), _Int4(), TwoBit())}
DENSE: Final = tuple(_CODECS)
"""Names of the codecs that send every value."""
