"""What becomes of the contributions to one chunk, with some of them hostile: clipped to the median norm, then combined.

Everything here follows from the contributed bytes, in plan order, and from the plan: every honest owner comes to the
same bits, and so does whoever audits it. A contribution is in the result or it is not: what does not decode (NaN,
infinity, a magnitude beyond the limit, a wrong length) is left out as if it had not arrived, and the bitmap says so.

Norms. Where the plan clips norms, a contribution is multiplied by the smaller of two clips in 1/65536: the plan's, of
the whole contribution, which rests on what its contributor said; and that of this chunk, which rests on the bytes,

    N = the sum of squares of the decoded chunk        M = the lower median of those that are not zero
    clip = ⌊65536 · √(M ÷ N)⌋ where N > M, else 65536

so whoever told of a small norm and sent a large one is bounded by the median here, in every chunk by itself.

Rules. `mean` weighs by tokens (`summing`). The others count every contribution that is present once, whatever it
weighs: a weight is what its contributor declared. x(i) are the decoded and clipped values, m how many there are:

    median    per value the middle one of the x(i), of an even number half the sum of the two
    trimmed   per value the mean of what is left without the t smallest and the t largest, added in ascending order;
              t = ⌈share · m⌉, or ⌊(m − 1) ÷ 2⌋ where that is less

Sums of squares are those of `adamw.square_sum`, in float64 in a fixed order. Zeros are positive before they are
compared, for which of +0 and −0 is the smaller is left open by IEEE 754. Working memory is one block of BLOCK_VALUES
per contribution, whatever the size of a chunk.

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
from shoal.collectives.codecs import F32, SPAN_ALIGNMENT, SPAN_VALUES, Codec, Undecodable, check_denormals
from shoal.collectives.memory import own_array
from shoal.collectives.summing import Term, span_scratch, weighted_mean
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import CLIP_UNIT, MEMBER_LIMIT, Plan

BLOCK_VALUES: Final = 4 * SPAN_ALIGNMENT
"""Values of all contributions that are sorted together: with 64 contributions 4 MiB."""

_ZERO: Final = np.float32(0)
_NAME: Final = re.compile(r"(mean|median)|(trimmed)([1-9][0-9]{0,7}|0)")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """How the contributions to a chunk are combined. parameter: of `trimmed`, the share in 1/65536.

    bounded: whether each is clipped to the median norm of the chunk before.
    """

    rule: str = "mean"
    parameter: int = 0
    bounded: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What a plan has. Raises ConfigError for a rule that there is not."""
        name = "mean" if isinstance(plan.aggregate, msgspec.UnsetType) else plan.aggregate
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"there is no aggregate {name!r}; update shoal, or ask who planned it")
        return cls(match[1] or match[2], int(match[3] or 0), not isinstance(plan.clips, msgspec.UnsetType))

    def trimmed_of(self, count: int) -> int:
        """Of so many values, how many are left out at either end."""
        return max(0, min(-(-count * self.parameter // CLIP_UNIT), (count - 1) // 2))


def combine(how: Codec, terms: Sequence[Term], aggregate: Aggregate, out: F32) -> tuple[list[int], list[int]]:
    """The aggregate of `terms`, which are in plan order, into `out` (n,) float32; zeros if there are none.

    Returns the places that are in it, and those left out because they do not decode.

    Raises LocalError if this thread flushes subnormals.
    """
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
    """What each contribution to a chunk is multiplied by, in 1/65536, so that none is larger than the median one.

    norms: their sums of squares. Division and root are rounded as IEEE 754 says.
    """
    median = _lower_median([norm for norm in norms if norm > 0])
    return [int(CLIP_UNIT * sqrt(median / norm)) if norm > median else CLIP_UNIT for norm in norms]


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


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
        self.squares: F64 = own_array(NORM_SPAN_VALUES, np.float64)
        self._block: F32 = np.empty((0, BLOCK_VALUES), np.float32)

    def rows(self, count: int, length: int) -> list[F32]:
        """`count` + 1 rows of `length` values."""
        if len(self._block) <= count:
            self._block = own_array((count + 1) * BLOCK_VALUES, np.float32).reshape(count + 1, BLOCK_VALUES)
        return [row[:length] for row in self._block[: count + 1]]


_own: Final = _Own()

assert SPAN_VALUES % NORM_SPAN_VALUES == 0 == NORM_SPAN_VALUES % SPAN_ALIGNMENT
