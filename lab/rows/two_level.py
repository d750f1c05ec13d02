"""The two-level sum: each row of a grid of members is summed by its own, then the rows' means by columns.

    row       member j of a row owns some chunks, and sums them over its row, in the row's order
    column    the owners of one chunk, one of each row; one of them sums the rows' means, in the order of the rows
    back      the mean goes to the chunk's owner in each row, and from there to everyone in that row

A row's mean of a chunk weighs as much as all contributions in it, and is encoded like one. Both sums are
`summing.weighted_mean`, which says what is added to what and how each step is rounded; so whoever has the lists and the
contributions gets the same bits, and one digest is everybody's. The result is the weighted mean of all contributions,
rounded and encoded once more than that of a flat sum.

Of D encoded bytes, a member of a row of s that owns its even share, in a grid of r rows, sends

    D·(s − 1)/s      contributions to the owners in its row
    2·D/s·(r − 1)/r  of the chunks that it owns, in its columns: the row's means, and the mean of all
    D·(s − 1)/s      that mean to its row

which is 2·D·(1 − 1/(s·r)), as in a flat sum of s·r members, over s + r − 2 connections instead of s·r − 1.

*Who takes over.* The chunks of an owner that is gone go to those who are left in its row, one to each in turn. They
have the contributions of that row sent to them; what others own stands. A column is a reduction of its owners, and is
repaired like any; a row of which everybody is gone counts for nothing. What was counted in a row is in the row's word
about the chunk, so whoever takes over sums the same ones and finds the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from shoal.collectives.aggregate import Term, weighted_mean
from shoal.collectives.codecs import F32, Codec
from shoal.collectives.partition import deal
from shoal.protocol.errors import LocalError

DEALS_KEPT: Final = 64
"""Of the last plans: one that loses members is dealt again with each attempt. Simulated rows are all in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMean:
    """Result of a row for one chunk: the mean, (n,) float32, all the weight in it, and the places that are."""

    values: F32
    weight: int
    counted: tuple[int, ...]


def row_owners(rates: Sequence[tuple[int, int]], chunks: int, *, gone: Collection[int] = ()) -> tuple[int, ...]:
    """The place in its row of each chunk's owner.

    rates: (upload, download) bytes/s of each of the row, as in `partition.deal`, whose deal it is.
    Raises LocalError where nobody is left.
    """
    living = [place for place in range(len(rates)) if place not in gone]
    if not living:
        raise LocalError("a row of which everybody is gone")
    owners = list(_dealt(tuple(rates), chunks))
    lost = [chunk for chunk, owner in enumerate(owners) if owner in gone]
    for turn, chunk in enumerate(lost):
        owners[chunk] = living[turn % len(living)]
    return tuple(owners)


@lru_cache(maxsize=DEALS_KEPT)
def _dealt(rates: tuple[tuple[int, int], ...], chunks: int) -> tuple[int, ...]:
    """The owners while nobody is gone: every attempt of a plan starts from them."""
    return tuple(owned.owner for owned in deal(rates, chunks) for _ in range(owned.start, owned.stop))


def column(owners: Sequence[Sequence[int]], chunk: int) -> tuple[int, ...]:
    """The place in each row of the owner of `chunk`. owners: of each row, as `row_owners` has them."""
    return tuple(row[chunk] for row in owners)


def row_mean(how: Codec, terms: Sequence[Term], n: int) -> RowMean:
    """The mean of a chunk of `n` values over a row. terms: in the row's order; one that does not decode is left out."""
    values = np.empty(n, np.float32)
    counted, _ = weighted_mean(how, terms, values)
    weight = sum(term.weight for term in terms if term.place in set(counted))
    return RowMean(values=values, weight=weight, counted=tuple(counted))


def column_mean(how: Codec, means: Sequence[RowMean], out: F32) -> list[int]:
    """The mean of all of a chunk into `out`, (n,) float32: over the rows' means, in their order, each encoded first.

    Returns the rows that are in it: those of which somebody counts.
    """
    terms = [Term(row, mean.weight, how.encode(mean.values)) for row, mean in enumerate(means) if mean.counted]
    counted, _ = weighted_mean(how, terms, out)
    return counted


def two_level_mean(how: Codec, rows: Sequence[Sequence[Term]], out: F32) -> list[int]:
    """Both sums of a chunk, as if all were in one place. Returns the rows that are in it."""
    return column_mean(how, [row_mean(how, row, out.size) for row in rows], out)


def bytes_sent(encoded_bytes: float, *, row: int, rows: int, share: float) -> float:
    """Bytes that a member sends in a round. share: of the chunks, that it owns; even is 1 / row."""
    to_row = encoded_bytes * (1 - share) + (row - 1) * share * encoded_bytes
    return to_row + 2 * share * encoded_bytes * (rows - 1) / rows
