"""How a chunk of fp32 values becomes bytes, and comes back the same on every machine.

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

The sparse codecs, topk with the numbers of values kept per block, are specified in `sparse`. They alone write what is
reduced otherwise than what is contributed; so a plan's codec has two sides, `codec` and `final_codec`.

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

from typing import Final, Protocol

import numpy as np

from shoal.collectives.blockwise import Int4, Int8
from shoal.collectives.dither import ChunkDither
from shoal.collectives.memory import F32, U8
from shoal.collectives.spans import (
    LIMIT_BITS,
    SPAN_ALIGNMENT,
    SPAN_VALUES,
    VALUE_LIMIT,
    Encoded,
    SpanCodec,
    Undecodable,
    in_range,
    within_limit,
    work,
)
from shoal.collectives.sparse import sparse_codecs
from shoal.protocol.errors import ConfigError, LocalError

__all__ = (
    "F32",
    "SPAN_ALIGNMENT",
    "SPAN_VALUES",
    "U8",
    "VALUE_LIMIT",
    "Codec",
    "Encoded",
    "Undecodable",
    "check_denormals",
    "codec",
    "final_codec",
)


class Codec(Protocol):
    """One way of writing fp32 values. Stateless: safe in any number of threads."""

    name: str
    stochastic: bool
    """Whether it rounds by chance, and so needs a dither. The others look at none."""

    def encoded_bytes(self, n: int) -> int:
        """Bytes that a chunk of `n` values takes; a multiple of 4."""
        ...

    def encode(self, values: F32, out: U8 | None = None, *, dither: ChunkDither | None = None) -> U8:
        """`values` (n,) float32 as (encoded_bytes(n),) uint8, into `out` if given.

        Raises LocalError if a value is NaN or infinite: that training has diverged, and nobody shall hear of it; and
        if a dither is needed and there is none. What `out` then holds is unspecified.
        """
        ...

    def in_place(self, out: U8) -> F32 | None:
        """The bytes that a chunk takes when encoded, seen as its values, for who works these out where they will lie.

        `encode` then takes them with this `out`. None for a codec that writes them in another form.
        """
        ...

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        """The values into `out` (n,) float32.

        Raises Undecodable for bytes that no encoder writes; what `out` then holds is unspecified.
        """
        ...

    def check(self, encoded: Encoded, n: int) -> None:
        """Check that the bytes of a chunk of `n` values decode. Raises Undecodable for what `decode_into` refuses."""
        ...

    def decode_span(
        self, encoded: Encoded, n: int, start: int, stop: int, scratch: F32, *, checked: bool = False
    ) -> F32:
        """The values `start` to `stop` (exclusive) of a chunk of `n`: (stop − start,) float32.

        They are in `scratch`, which has at least that many, or a read-only view of `encoded` where they need no
        decoding (fp32). `start` is a multiple of SPAN_ALIGNMENT; fastest are spans of SPAN_VALUES.

        Every call checks the length of the chunk and the bytes that it decodes, the one with stop = n the padding too:
        spans that cover the chunk refuse together exactly what `decode_into` refuses. Raises Undecodable; LocalError
        if the span does not fit.

        checked: the chunk passed `check` before, so values that are read as they lie need not be looked at again.
        """
        ...


def codec(name: str) -> Codec:
    """What contributions are written in under a plan's codec. Raises ConfigError, naming the codecs there are."""
    return _both(name)[0]


def final_codec(name: str) -> Codec:
    """What reduced chunks are written in under a plan's codec: the same, but for the sparse. Raises ConfigError."""
    return _both(name)[1]


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


class _Fp32(SpanCodec):
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


def _fp32(source: U8, start: int, stop: int) -> F32:
    return source[4 * start : 4 * stop].view("<f4")


def _checked_fp32(source: U8, start: int, stop: int) -> F32:
    values = _fp32(source, start, stop)
    if not within_limit(values.view("<u4"), LIMIT_BITS):
        raise Undecodable("an fp32 chunk with NaN, infinity or a magnitude beyond the limit")
    return values


class _Bf16(SpanCodec):
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


_CODECS: Final[dict[str, Codec]] = {c.name: c for c in (_Fp32(), _Bf16(), Int8(), Int4())}
