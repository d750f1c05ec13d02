"""Base of all codecs: their interface, the limits of what travels, and the walk over a chunk in spans.

Each thread keeps the memory for the intermediate arrays of one span (`work`), whatever the size of a chunk, since fresh
pages cost more than the arithmetic. Smaller spans would stay in the cache next to a core, and are slower all the same:
a call of numpy takes as long as it takes to pass over 50 KiB, and a span takes ten to twenty calls. (int8 was encoded
at 3.8 GB/s in spans of 32 Ki values, 5.2 of 128 Ki, 6.1 of 256 Ki; once.)
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.collectives.dither import ChunkDither
from shoal.collectives.memory import F32, U8, own_array
from shoal.protocol.errors import LocalError, RemoteError

Encoded: TypeAlias = bytes | bytearray | memoryview | U8

SPAN_ALIGNMENT: Final = 4096
"""Spans begin at multiples of this many values: no block of a codec crosses one."""

SPAN_VALUES: Final = 64 * SPAN_ALIGNMENT

VALUE_LIMIT: Final = np.float32(127 * 2.0**57)
"""The largest magnitude that travels; a bf16 and 127 times an fp32 scale."""

INT8_SCALE_LIMIT: Final = np.float32(2.0**57)
"""Of eight bits a value: 127 of them are VALUE_LIMIT."""

SMALLEST_NORMAL: Final = np.float32(2.0**-126)

_ALIGNMENT_BYTES: Final = 4


class Undecodable(RemoteError):
    """Encoded bytes that no encoder writes: a wrong length, NaN, infinity, an absurd magnitude, a bad scale."""


class Codec(ABC):
    """One way of writing fp32 values, as what it does to one span. Stateless: safe in any number of threads.

    stochastic: whether it rounds by chance, and so needs a dither; the others look at none. leaves_out: whether it
    writes +0 where it has no place for a value. plain: whether it is of values in place of updates. Subclasses say how
    values lie in the bytes.
    """

    name: str
    stochastic = False
    leaves_out = False
    plain = False

    def encoded_bytes(self, n: int) -> int:
        """Bytes that a chunk of `n` values takes; a multiple of 4."""
        return -(-self._written_bytes(n) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def encode(self, values: F32, out: U8 | None = None, *, dither: ChunkDither | None = None) -> U8:
        """`values` (n,) float32 as (encoded_bytes(n),) uint8, into `out` if given.

        Raises LocalError if a value is NaN or infinite: that training has diverged, and nobody shall hear of it; and
        if a dither is needed and there is none. What `out` then holds is unspecified.
        """
        out = self._output(values, out)
        for start in range(0, values.size, SPAN_VALUES):
            self._encode(values[start : start + SPAN_VALUES], start, out, values.size, dither)
        out[self._written_bytes(values.size) :] = 0
        return out

    def in_place(self, out: U8) -> F32 | None:
        """The bytes that a chunk takes when encoded, seen as its values, for who works these out where they will lie.

        `encode` then takes them with this `out`. None for a codec that writes them in another form.
        """
        return None

    def decode_into(self, encoded: Encoded, out: F32) -> None:
        """The values into `out` (n,) float32.

        Raises Undecodable for bytes that no encoder writes; what `out` then holds is unspecified.
        """
        source = self._source(encoded, out.size)
        self._check_padding(source, out.size)
        self._decode_all(source, out.size, 0, out)

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
        source = self._span_source(encoded, n, start, stop)
        if scratch.size < stop - start:
            raise LocalError(f"a span of {stop - start} values, with room for {scratch.size}")
        out = scratch[: stop - start]
        self._decode_all(source, n, start, out)
        return out

    def check(self, encoded: Encoded, n: int) -> None:
        """Check that the bytes of a chunk of `n` values decode. Raises Undecodable for what `decode_into` refuses."""
        source = self._source(encoded, n)
        self._check_padding(source, n)
        for start in range(0, n, SPAN_VALUES):
            self._check(source, n, start, min(SPAN_VALUES, n - start))

    def _decode_all(self, source: U8, n: int, start: int, out: F32) -> None:
        for at in range(0, out.size, SPAN_VALUES):
            self._decode(source, n, start + at, out[at : at + SPAN_VALUES])

    # What a subclass defines. `start` is a multiple of SPAN_ALIGNMENT; there are at most SPAN_VALUES values.

    @abstractmethod
    def _written_bytes(self, n: int) -> int:
        """Bytes that `n` values take before padding."""

    @abstractmethod
    def _encode(self, values: F32, start: int, out: U8, n: int, dither: ChunkDither | None) -> None:
        """`values`, which begin at value `start` of a chunk of `n`, into their places in `out`, the whole chunk."""

    @abstractmethod
    def _decode(self, source: U8, n: int, start: int, out: F32) -> None:
        """The values from `start` on of the chunk `source` of `n` into `out`, which says how many."""

    def _check(self, source: U8, n: int, start: int, count: int) -> None:
        """Raise Undecodable where `_decode` would."""
        self._decode(source, n, start, work.more[:count])

    # Lengths and padding.

    def _output(self, values: F32, out: U8 | None) -> U8:
        if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous:
            raise LocalError("only contiguous (n,) float32 can be encoded")
        size = self.encoded_bytes(values.size)
        if out is None:
            return np.empty(size, np.uint8)
        if out.dtype != np.uint8 or out.shape != (size,):
            raise LocalError(f"{values.size} values take {size} bytes in {self.name}, not {out.shape}")
        return out

    def _source(self, encoded: Encoded, n: int) -> U8:
        source = encoded if isinstance(encoded, np.ndarray) else np.frombuffer(encoded, np.uint8)
        if source.shape != (self.encoded_bytes(n),):
            raise Undecodable(f"{n} values take {self.encoded_bytes(n)} bytes in {self.name}, not {source.size}")
        return source

    def _span_source(self, encoded: Encoded, n: int, start: int, stop: int) -> U8:
        """The chunk's bytes, of the right length; with its last span also the padding is checked."""
        source = self._source(encoded, n)
        if start % SPAN_ALIGNMENT or not 0 <= start < stop <= n:
            raise LocalError(f"values {start} to {stop} are no span of a chunk of {n}")
        if stop == n:
            self._check_padding(source, n)
        return source

    def _check_padding(self, source: U8, n: int) -> None:
        written = self._written_bytes(n)
        if written < source.size and source[written:].any():
            raise Undecodable(f"a chunk in {self.name} whose padding is not zero")


class BlockCodec(Codec):
    """Codec whose blocks of `block_values` lie one after the other. Subclasses write one kind of block.

    block_values: a divisor of SPAN_ALIGNMENT.
    """

    block_values: int

    @abstractmethod
    def _block_bytes(self, length: int) -> int:
        """Length in bytes of an encoded block of `length` values."""

    def _written_bytes(self, n: int) -> int:
        whole, rest = divmod(n, self.block_values)
        return whole * self._block_bytes(self.block_values) + (self._block_bytes(rest) if rest else 0)

    def _blocks(self, chunk: U8, start: int, count: int) -> Iterator[tuple[slice, U8]]:
        """The whole blocks of a span together, then the shorter one: where its values lie in the span, and its bytes.

        The bytes are (rows, bytes per block), a view of `chunk`.
        """
        size = self._block_bytes(self.block_values)
        at, (whole, rest) = start // self.block_values * size, divmod(count, self.block_values)
        if whole:
            yield slice(0, count - rest), chunk[at : at + whole * size].reshape(whole, size)
        if rest:
            at += whole * size
            yield slice(count - rest, count), chunk[at : at + self._block_bytes(rest)].reshape(1, -1)


# --- magnitudes, by their bits ---


def bits_of(value: np.float32) -> int:
    """The fp32 pattern of a number."""
    return int(value.view(np.uint32))


LIMIT_BITS: Final = bits_of(VALUE_LIMIT)


def within_limit(bits: npt.NDArray[np.unsignedinteger], limit: int) -> bool:
    """True if all magnitudes are at most `limit`, in patterns of a float format; NaN and infinity lie above.

    All patterns or-ed together are no less than any of them, so one pass says enough of magnitudes below 2, as those of
    updates are. Else two: seen as signed integers the positive floats are in order, and as unsigned ones the negative
    floats are. All of them only read, and there is no float operation that a signalling NaN could trouble.
    """
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    if int(np.bitwise_or.reduce(bits)) & ~sign <= limit:
        return True
    signed = bits.view(f"<i{bits.dtype.itemsize}")
    return int(signed.max()) <= limit and int(bits.max()) <= sign + limit


def in_range(values: F32) -> F32:
    """`values` themselves, or a copy saturated at VALUE_LIMIT. Raises LocalError if one is not finite."""
    return values if within_limit(values.view(np.uint32), LIMIT_BITS) else saturated(values, VALUE_LIMIT)


def saturated(values: F32, limit: np.float32) -> F32:
    """A copy of which no magnitude is over `limit`. Raises LocalError for NaN and infinity."""
    if not np.isfinite(values).all():
        raise LocalError("NaN or infinity among the values to encode: training has diverged")
    return np.clip(values, -limit, limit)


def are_scales(bits: npt.NDArray[np.unsignedinteger], smallest: int, largest: int) -> bool:
    """True if all are +0, or positive normal numbers up to the largest, in patterns of their format."""
    below = bits.dtype.type(smallest)
    above_smallest = np.subtract(bits, below)  # what is below wraps around
    return int(above_smallest.max()) <= largest - smallest or bool(
        ((bits == 0) | (above_smallest <= largest - smallest)).all()
    )


# --- working memory ---


class _Work(threading.local):
    """A thread's own arrays of SPAN_VALUES, kept between calls: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.values: F32 = own_array(SPAN_VALUES, np.float32)
        self.more: F32 = own_array(SPAN_VALUES, np.float32)
        self.small: npt.NDArray[np.int8] = own_array(SPAN_VALUES, np.int8)
        self.pairs: npt.NDArray[np.uint16] = own_array(SPAN_VALUES // 2, "<u2")


work: Final = _Work()
