"""How a chunk of fp32 values becomes bytes, and comes back the same on every machine.

Decoding is consensus-critical: every member decodes the same bytes and must get the same bits, on x86 and ARM alike.
So there is nothing here but numpy ufuncs that IEEE 754 defines to the bit (÷, ×, rounding to an integer, comparison)
and integer arithmetic, with `np.float32` constants: a float64 scalar would promote, and a reciprocal or a fused
operation would round differently. Subnormals must not be flushed: `check_denormals`.

All numbers are little-endian. A chunk of n values takes:

    fp32   n × f4
    bf16   n × u2, the upper half of the fp32 pattern, rounded to nearest, ties to even;
           then zero bytes up to a multiple of 4
    int8   one f4 scale per block of 4096 values (the last block may be shorter), then n × i1,
           then zero bytes up to a multiple of 4
           scale = largest magnitude ÷ 127, or +0 where that is below 2^-126 (the block is then all zero);
           value = rint(x ÷ scale), clipped to ±127, ties to even; decoded as value × scale

−128, negative or subnormal scales, and padding other than zero are refused.

Magnitudes end at VALUE_LIMIT: encoding saturates there, decoding refuses more. No update of a model comes near it, and
with it no weighted sum can overflow: 2^64 of value × 2^24 of weight × 64 participants is 2^94.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.protocol.errors import ConfigError, LocalError, RemoteError

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
Encoded: TypeAlias = bytes | bytearray | memoryview | U8

BLOCK_VALUES: Final = 4096
SCALE_LIMIT: Final = np.float32(2.0**57)
VALUE_LIMIT: Final = np.float32(127 * 2.0**57)
"""The largest magnitude that travels; a bf16 and 127 times an fp32 scale, so that every codec can say it."""

_LARGEST: Final = np.float32(127)
_SMALLEST_NORMAL: Final = np.float32(2.0**-126)
_ALIGNMENT_BYTES: Final = 4


class Undecodable(RemoteError):
    """Encoded bytes that no encoder writes: a wrong length, NaN, infinity, an absurd magnitude, a bad scale."""


class Codec(Protocol):
    """One way of writing fp32 values. Stateless: safe in any number of threads."""

    name: str

    def encoded_bytes(self, n: int) -> int:
        """Bytes that a chunk of `n` values takes; a multiple of 4."""
        ...

    def encode(self, values: F32, out: U8 | None = None) -> U8:
        """`values` (n,) float32 as (encoded_bytes(n),) uint8, into `out` if given.

        Raises LocalError if a value is NaN or infinite: that training has diverged, and nobody shall hear of it.
        """
        ...

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        """The values into `out` (n,) float32.

        Raises Undecodable for bytes that no encoder writes; what `out` then holds is unspecified.
        """
        ...


def codec(name: str) -> Codec:
    """The codec of that name. Raises ConfigError, naming those there are."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"there is no codec {name!r}; choose one of {', '.join(_CODECS)}") from None


def check_denormals() -> None:
    """Check that this thread's FPU neither flushes subnormal results to zero nor reads them as zero.

    The mode belongs to the thread, and some libraries set it when they are loaded. Takes microseconds.

    Raises LocalError if it does: whatever this thread computed could differ from what the others compute.
    """
    smallest = np.full(64, _SMALLEST_NORMAL, np.float32)  # long enough for the vector units
    halves = np.multiply(smallest, np.float32(0.5))
    doubled = np.multiply(np.full(64, 1, np.uint32).view(np.float32), np.float32(2))
    if (halves.view(np.uint32) != 0x0040_0000).any() or (doubled.view(np.uint32) != 2).any():
        raise LocalError("this thread's floating point flushes subnormals to zero; bits would differ between peers")


# --- the three codecs ---


class _Fp32:
    name = "fp32"

    def encoded_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, values: F32, out: U8 | None = None) -> U8:
        out = _output(self, values, out)
        out.view("<f4")[:] = _in_range(values)
        return out

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        values = _input(self, encoded, out.size).view("<f4")
        if not _within_limit(values.view("<u4"), _LIMIT_BITS):
            raise Undecodable("an fp32 chunk with NaN, infinity or a magnitude beyond the limit")
        out[:] = values


class _Bf16:
    name = "bf16"

    def encoded_bytes(self, n: int) -> int:
        return _padded(2 * n)

    def encode(self, values: F32, out: U8 | None = None) -> U8:
        n = values.size
        out = _output(self, values, out)
        bits = _in_range(values).view(np.uint32)
        # Round half to even: add just under half of what is cut off, and one more if the kept part is odd.
        rounded = _scratch(n).view(np.uint32)
        np.right_shift(bits, np.uint32(16), out=rounded)
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        np.copyto(out[: 2 * n].view("<u2"), rounded, casting="unsafe")
        out[2 * n :] = 0
        return out

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        n = out.size
        source = _input(self, encoded, n)
        halves = source[: 2 * n].view("<u2")
        if not _within_limit(halves, _LIMIT_BITS >> 16):
            raise Undecodable("a bf16 chunk with NaN, infinity or a magnitude beyond the limit")
        if source[2 * n :].any():
            raise Undecodable("a bf16 chunk whose padding is not zero")
        np.left_shift(halves, np.uint32(16), out=out.view(np.uint32))


class _Int8:
    name = "int8"

    def encoded_bytes(self, n: int) -> int:
        return 4 * _block_count(n) + _padded(n)

    def encode(self, values: F32, out: U8 | None = None) -> U8:
        n, head = values.size, 4 * _block_count(values.size)
        out = _output(self, values, out)
        scales, quantised = out[:head].view("<f4"), out[head : head + n].view(np.int8)
        scratch = _scratch(n)
        for blocks, area in _block_ranges(n):
            columns = (len(range(*blocks.indices(scales.size))), -1)
            rows = values[area].reshape(columns)
            scale = _block_scales(rows)
            scales[blocks] = scale
            quotient = scratch[area].reshape(columns)
            np.divide(rows, np.where(scale == 0, np.float32(1), scale)[:, None], out=quotient)
            np.rint(quotient, out=quotient)
            np.clip(quotient, -_LARGEST, _LARGEST, out=quotient)
            np.copyto(quantised[area].reshape(columns), quotient, casting="unsafe")
        out[head + n :] = 0
        return out

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        n, head = out.size, 4 * _block_count(out.size)
        source = _input(self, encoded, n)
        scales, quantised = source[:head].view("<f4"), source[head : head + n].view(np.int8)
        bits = scales.view("<u4")
        if not ((bits == 0) | ((bits >= 0x0080_0000) & (bits <= _bits_of(SCALE_LIMIT)))).all():
            raise Undecodable("an int8 chunk with a scale that is negative, subnormal, not finite or too large")
        if n and quantised.min() == -128:
            raise Undecodable("an int8 chunk with the value -128")
        if source[head + n :].any():
            raise Undecodable("an int8 chunk whose padding is not zero")
        for blocks, area in _block_ranges(n):
            scale = scales[blocks][:, None]
            rows = out[area].reshape(len(scale), -1)
            np.copyto(rows, quantised[area].reshape(rows.shape))
            np.multiply(rows, scale, out=rows)


_CODECS: Final[dict[str, Codec]] = {c.name: c for c in (_Fp32(), _Bf16(), _Int8())}


# --- what they share ---


def _bits_of(value: np.float32) -> int:
    return int(value.view(np.uint32))


_LIMIT_BITS: Final = _bits_of(VALUE_LIMIT)


def _within_limit(bits: npt.NDArray[np.unsignedinteger], limit: int) -> bool:
    """Whether all magnitudes are at most `limit`, in patterns of a float format; NaN and infinity lie above.

    Seen as signed integers the positive floats are in order, and as unsigned ones the negative floats are: two
    passes that only read, and no float operation that a signalling NaN could trouble.
    """
    if bits.size == 0:
        return True
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    signed = bits.view(f"<i{bits.dtype.itemsize}")
    return int(signed.max()) <= limit and int(bits.max()) <= sign + limit


def _in_range(values: F32) -> F32:
    """`values` themselves, or a copy saturated at VALUE_LIMIT. Raises LocalError if one is not finite."""
    if _within_limit(values.view(np.uint32), _LIMIT_BITS):
        return values
    if not np.isfinite(values).all():
        raise LocalError("NaN or infinity among the values to encode: training has diverged")
    return np.clip(values, -VALUE_LIMIT, VALUE_LIMIT)


def _block_scales(rows: F32) -> F32:
    """One scale per row of an (blocks, values) array, as the format defines it."""
    peak = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    if not np.isfinite(peak).all():
        raise LocalError("NaN or infinity among the values to encode: training has diverged")
    scale = np.minimum(np.divide(peak, _LARGEST), SCALE_LIMIT)
    return np.where(scale < _SMALLEST_NORMAL, np.float32(0), scale)


def _block_count(n: int) -> int:
    return -(-n // BLOCK_VALUES)


def _block_ranges(n: int) -> list[tuple[slice, slice]]:
    """(blocks, values) slices: the full blocks together, then the short last one."""
    full = n // BLOCK_VALUES
    ranges = [(slice(0, full), slice(0, full * BLOCK_VALUES))] if full else []
    if n % BLOCK_VALUES:
        ranges.append((slice(full, full + 1), slice(full * BLOCK_VALUES, n)))
    return ranges


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _output(codec: Codec, values: F32, out: U8 | None) -> U8:
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise LocalError("only contiguous (n,) float32 can be encoded")
    size = codec.encoded_bytes(values.size)
    if out is None:
        return np.empty(size, np.uint8)
    if out.dtype != np.uint8 or out.shape != (size,):
        raise LocalError(f"{values.size} values take {size} bytes in {codec.name}, not {out.shape}")
    return out


def _input(codec: Codec, encoded: Encoded, n: int) -> U8:
    source = encoded if isinstance(encoded, np.ndarray) else np.frombuffer(encoded, np.uint8)
    if source.shape != (codec.encoded_bytes(n),):
        raise Undecodable(f"{n} values take {codec.encoded_bytes(n)} bytes in {codec.name}, not {source.size}")
    return source


_local = threading.local()


def _scratch(n: int) -> F32:
    """(n,) float32 of this thread's own, kept between calls: fresh pages cost more than the arithmetic."""
    buffer: F32 | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < n:
        buffer = np.empty(n, np.float32)
        _local.buffer = buffer
    return buffer[:n]
