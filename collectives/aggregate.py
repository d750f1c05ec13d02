"""Aggregation of the contributions to one chunk, some of them hostile: clipped to the median norm, then combined.

Everything here follows from the contributed bytes, in plan order, and from the plan: every honest owner comes to the
same bits, and so does whoever audits it. A contribution is in the result or it is not: what does not decode (NaN,
infinity, a magnitude beyond the limit, a wrong length) is left out as if it had not arrived, and the bitmap says so.

Rules. `mean` weighs by tokens. It is added up in plan order, from +0, every operation rounded by itself, then divided
by the sum of the weights that are in it; in spans that stay in the cache. A contribution is multiplied by its weight,
or where it is clipped by

    fp32(weight × clip ÷ 2^16), to nearest, ties to even: exact in a double, and so rounded once

and counts with its whole weight in the divisor. A factor of 1 is not multiplied by, which changes no bit.

The others count every contribution that is present once, whatever it weighs: a weight is what its contributor declared.
x(i) are the decoded and clipped values, m how many there are:

    median    per value the middle one of the x(i), of an even number half the sum of the two
    trimmed   per value the mean of what is left without the t smallest and the t largest, added in ascending order;
              t = ⌈share · m⌉, or ⌊(m − 1) ÷ 2⌋ where that is less

Zeros are positive before they are compared, for which of +0 and −0 is the smaller is left open by IEEE 754. Working
memory is one block of BLOCK_VALUES per contribution, whatever the size of a chunk.

Norms. Where the plan clips norms, a contribution is multiplied by the smaller of two clips in 1/65536: the plan's, of
the whole contribution, which rests on what its contributor said; and that of this chunk, which rests on the bytes,

    N = the sum of squares of the decoded chunk        M = the lower median of those that are not zero
    clip = ⌊65536 · √(M ÷ N)⌋ where N > M, else 65536

so whoever told of a small norm and sent a large one is bounded by the median here, in every chunk by itself. Sums of
squares are those of `adamw.square_sum`, in float64 in a fixed order.

Buffers (codecs that are `plain`) are no updates and have no norm: none of them is clipped. Their weighted mean is added
up in plan order in float64, divided there, and rounded to fp32 once: so of equal values it is that value.

Source: Yin et al., arXiv 1803.01498.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Final, Self

import msgspec
import numpy as np

from shoal.collectives.adamw import F64, NORM_SPAN_VALUES, square_sum
from shoal.collectives.codecs import F32, SPAN_ALIGNMENT, SPAN_VALUES, U8, Codec, Undecodable, check_denormals
from shoal.collectives.memory import own_array
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import CLIP_UNIT, MEMBER_LIMIT, Plan

SUM_VALUES: Final = SPAN_VALUES // 2
"""Of each contribution before the next: with fewer, what is added to stays in the cache next to a core.

Four contributions of 2^20 values took a thread, in spans of 256, 128 and 64 Ki values, 1, 0.92 and 0.88 of the time in
fp32, and 1, 0.95 and 0.96 in int8; of 2^18 values 1, 0.88 and 0.84, and 1, 0.93 and 0.99 (medians of 37 and 57 sums of
each, in turn, beside other work; once).
"""


BLOCK_VALUES: Final = 4 * SPAN_ALIGNMENT
"""Values of all contributions that are sorted together: with 64 contributions 4 MiB."""

_ZERO: Final = np.float32(0)
_NAME: Final = re.compile(r"(mean|median)|(trimmed)([1-9][0-9]{0,7}|0)")


@dataclass(frozen=True, slots=True)
class Term:
    """One contribution to a chunk: whose (its place in the plan), how heavy, its encoded bytes, its clip in 1/65536."""

    place: int
    weight: int
    encoded: U8
    clip: int = CLIP_UNIT

    @property
    def factor(self) -> np.float32:
        """Factor of its values in the weighted sum: weight × clip ÷ 2^16, rounded once."""
        return np.float32(self.weight * self.clip / CLIP_UNIT)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Rule by which the contributions to a chunk are combined. parameter: of `trimmed`, the share in 1/65536.

    bounded: whether each is clipped to the median norm of the chunk before.
    """

    rule: str = "mean"
    parameter: int = 0
    bounded: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the rule that a plan names. Raises ConfigError if it is unknown here."""
        name = "mean" if isinstance(plan.aggregate, msgspec.UnsetType) else plan.aggregate
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"there is no aggregate {name!r}; update shoal, or ask who planned it")
        return cls(match[1] or match[2], int(match[3] or 0), not isinstance(plan.clips, msgspec.UnsetType))

    def trimmed_of(self, count: int) -> int:
        """Number of values, out of `count`, that are left out at either end."""
        return max(0, min(-(-count * self.parameter // CLIP_UNIT), (count - 1) // 2))


def combine(how: Codec, terms: Sequence[Term], aggregate: Aggregate, out: F32) -> tuple[list[int], list[int]]:
    """The aggregate of `terms`, which are in plan order, into `out` (n,) float32; zeros if there are none.

    Returns the places that are in it, and those left out because they do not decode.

    Raises LocalError if this thread flushes subnormals.
    """
    if how.plain:
        if aggregate.rule == "mean":
            return _wide_mean(how, terms, out)
        aggregate, terms = replace(aggregate, bounded=False), [replace(term, clip=CLIP_UNIT) for term in terms]
    if aggregate.rule == "mean" and not aggregate.bounded:
        return weighted_mean(how, terms, out)
    check_denormals()
    norms: dict[int, float] = {}
    undecodable: list[int] = []
    for term in terms:
        try:
            norms[term.place] = chunk_square_sum(how, term, out.size)
        except Undecodable:
            undecodable.append(term.place)
    present = [term for term in terms if term.place in norms]
    if aggregate.bounded:
        clips = chunk_clips([norms[term.place] for term in present])
        present = [replace(term, clip=min(term.clip, clip)) for term, clip in zip(present, clips, strict=True)]
    if aggregate.rule == "mean" or not present:
        weighted_mean(how, present, out)
    else:
        _combine_robustly(how, present, aggregate, out)
    return [term.place for term in present], undecodable


def chunk_square_sum(how: Codec, term: Term, n: int) -> float:
    """The sum of squares of a decoded chunk of `n` values, the same to the bit everywhere. Raises Undecodable."""
    total, scratch = 0.0, span_scratch()
    for start in range(0, n, NORM_SPAN_VALUES):
        stop = min(start + NORM_SPAN_VALUES, n)
        total += square_sum(how.decode_span(term.encoded, n, start, stop, scratch), _own.squares)
    return total


def chunk_clips(norms: Sequence[float]) -> list[int]:
    """Factor of each contribution to a chunk, in 1/65536, with which none is larger than the median one.

    norms: their sums of squares. Division and root are rounded as IEEE 754 says.
    """
    median = _lower_median([norm for norm in norms if norm > 0])
    return [int(CLIP_UNIT * sqrt(median / norm)) if norm > median else CLIP_UNIT for norm in norms]


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


# --- the weighted mean ---


def weighted_mean(how: Codec, terms: Sequence[Term], out: F32) -> tuple[list[int], list[int]]:
    """The mean of `terms`, which are in plan order, into `out` (n,) float32; zeros if there are none.

    Returns the places that are in it, and those left out because they do not decode.

    Raises LocalError if this thread flushes subnormals.
    """
    check_denormals()
    undecodable: list[int] = []
    while True:
        counted = [term for term in terms if term.place not in undecodable]
        fault = _sum(how, counted, out)
        if fault is None:
            return [term.place for term in counted], undecodable
        undecodable.append(fault)


def _sum(how: Codec, terms: Sequence[Term], out: F32) -> int | None:
    """None, or the place of a term that does not decode; `out` holds nothing of use then."""
    divisor = np.float32(sum(term.weight for term in terms))
    scratch = span_scratch()
    for start in range(0, out.size, SUM_VALUES):
        stop = min(start + SUM_VALUES, out.size)
        total = out[start:stop]
        total_before: F32 | np.float32 = np.float32(0)
        for term in terms:
            try:
                values = how.decode_span(term.encoded, out.size, start, stop, scratch)
            except Undecodable:
                return term.place
            factor = term.factor
            if factor != 1:
                values = np.multiply(values, factor, out=scratch[: stop - start])
            np.add(total_before, values, out=total)
            total_before = total
        if terms:
            np.divide(total, divisor, out=total)
        else:
            total.fill(0)
    return None


def _wide_mean(how: Codec, terms: Sequence[Term], out: F32) -> tuple[list[int], list[int]]:
    """`weighted_mean` of buffers, whatever the clips."""
    check_denormals()
    undecodable: list[int] = []
    for term in terms:
        try:
            how.check(term.encoded, out.size)
        except Undecodable:
            undecodable.append(term.place)
    counted = [term for term in terms if term.place not in undecodable]
    out.fill(0)
    divisor = np.float64(sum(term.weight for term in counted))
    for start in range(0, out.size if counted else 0, SUM_VALUES):
        stop = min(start + SUM_VALUES, out.size)
        total = np.zeros(stop - start, np.float64)
        for term in counted:
            values = how.decode_span(term.encoded, out.size, start, stop, span_scratch(), checked=True)
            np.add(total, np.multiply(values.astype(np.float64), np.float64(term.weight)), out=total)
        np.copyto(out[start:stop], np.divide(total, divisor), casting="same_kind")
    return [term.place for term in counted], undecodable


# --- by value ---


def _combine_robustly(how: Codec, terms: Sequence[Term], aggregate: Aggregate, out: F32) -> None:
    trimmed = aggregate.trimmed_of(len(terms)) if aggregate.rule == "trimmed" else (len(terms) - 1) // 2
    for start in range(0, out.size, BLOCK_VALUES):
        stop = min(start + BLOCK_VALUES, out.size)
        rows = _own.rows(len(terms), stop - start)
        for row, term in zip(rows, terms, strict=False):
            _read(how, term, out.size, start, stop, row)
        _sort(rows, len(terms))
        _mean_of(rows[trimmed : len(terms) - trimmed], out[start:stop])


def _read(how: Codec, term: Term, n: int, start: int, stop: int, out: F32) -> None:
    """The clipped values `start` to `stop` of a contribution of `n` into `out`, with no negative zero among them."""
    values = how.decode_span(term.encoded, n, start, stop, span_scratch())
    if term.clip != CLIP_UNIT:
        values = np.multiply(values, np.float32(term.clip / CLIP_UNIT), out=out)
    np.add(values, _ZERO, out=out)


def _sort(rows: list[F32], count: int) -> None:
    """Put the values of the first `count` rows in ascending order, place by place; the row after them is scratch."""
    for low, high in comparators(count):
        np.minimum(rows[low], rows[high], out=rows[count])
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], rows[count] = rows[count], rows[low]


def _mean_of(rows: Sequence[F32], out: F32) -> None:
    np.copyto(out, rows[0])
    for row in rows[1:]:
        np.add(out, row, out=out)
    if len(rows) > 1:
        np.divide(out, np.float32(len(rows)), out=out)


@lru_cache(maxsize=MEMBER_LIMIT)
def comparators(count: int) -> tuple[tuple[int, int], ...]:
    """A sorting network of `count` places: exchange each pair that is in the wrong order, one after the other.

    Source: Knuth, The Art of Computer Programming, volume 3, 5.2.2, algorithm M (Batcher's merge exchange).
    """
    return tuple(_comparators(count))


def _comparators(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, count - 1).bit_length() >> 1
    step = top
    while step:
        width, offset, distance = top, 0, step
        while True:
            yield from ((i, i + distance) for i in range(count - distance) if i & step == offset)
            if width == step:
                break
            distance, width, offset = width - step, width >> 1, step
        step >>= 1


# --- working memory ---


class _Own(threading.local):
    """This thread's own memory, kept: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.span: F32 = own_array(SPAN_VALUES, np.float32)
        self.squares: F64 = own_array(NORM_SPAN_VALUES, np.float64)
        self._chunk: F32 = np.empty(0, np.float32)
        self._block: F32 = np.empty((0, BLOCK_VALUES), np.float32)

    def chunk(self, n: int) -> F32:
        """`n` values."""
        if self._chunk.size < n:
            self._chunk = own_array(n, np.float32)
        return self._chunk[:n]

    def rows(self, count: int, length: int) -> list[F32]:
        """`count` + 1 rows of `length` values."""
        if len(self._block) <= count:
            self._block = own_array((count + 1) * BLOCK_VALUES, np.float32).reshape(count + 1, BLOCK_VALUES)
        return [row[:length] for row in self._block[: count + 1]]


_own: Final = _Own()


def span_scratch() -> F32:
    """(SPAN_VALUES,) float32 of this thread's own, good until the next call of anything here."""
    return _own.span


def chunk_scratch(n: int) -> F32:
    """(n,) float32 of this thread's own, good until it is asked for again: fresh pages cost more than the sum."""
    return _own.chunk(n)


assert SPAN_VALUES % NORM_SPAN_VALUES == 0 == NORM_SPAN_VALUES % SPAN_ALIGNMENT
