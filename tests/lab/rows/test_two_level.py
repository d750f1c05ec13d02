"""The two-level sum against a few lines of plain arithmetic; who owns what; who takes over from whom."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shoal.collectives.aggregate import Term, weighted_mean
from shoal.collectives.codecs import F32, codec
from shoal.collectives.partition import deal
from shoal.lab.rows.two_level import (
    RowMean,
    bytes_sent,
    column,
    column_mean,
    row_mean,
    row_owners,
    two_level_mean,
)
from shoal.protocol.errors import LocalError

N = 300
EQUAL = [(10, 10)] * 6


def drawn(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def grid_of(name: str, rows: int = 3, row: int = 4) -> list[list[Term]]:
    how = codec(name)
    return [
        [Term(place, 3 + 7 * place + number, how.encode(drawn(10 * number + place))) for place in range(row)]
        for number in range(rows)
    ]


def decoded(name: str, encoded: np.ndarray) -> F32:
    out = np.empty(N, np.float32)
    codec(name).decode_into(encoded, out)
    return out


def plain(name: str, rows: list[list[Term]]) -> F32:
    """Weight times value, added in order in float32, divided once; the rows' means encoded and the same again."""
    total, weight = np.zeros(N, np.float32), 0
    for row in rows:
        part, tokens = np.zeros(N, np.float32), 0
        for term in row:
            part = part + np.float32(term.weight) * decoded(name, term.encoded)
            tokens += term.weight
        mean = decoded(name, codec(name).encode(part / np.float32(tokens)))
        total = total + np.float32(tokens) * mean
        weight += tokens
    return np.asarray(total / np.float32(weight), np.float32)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_both_sums_have_the_bits_of_plain_arithmetic(name: str) -> None:
    rows, out = grid_of(name), np.empty(N, np.float32)
    assert two_level_mean(codec(name), rows, out) == [0, 1, 2]
    assert out.tobytes() == plain(name, rows).tobytes()


def test_two_level_mean_is_the_flat_one_but_for_its_rounding() -> None:
    rows, out, flat = grid_of("fp32"), np.empty(N, np.float32), np.empty(N, np.float32)
    two_level_mean(codec("fp32"), rows, out)
    weighted_mean(codec("fp32"), [term for row in rows for term in row], flat)
    assert not np.array_equal(out, flat)
    assert float(np.abs(out - flat).max()) < 1e-6


def test_order_of_rows_and_within_rows_is_part_of_the_result() -> None:
    rows, out, other = grid_of("fp32"), np.empty(N, np.float32), np.empty(N, np.float32)
    two_level_mean(codec("fp32"), rows, out)
    for exchanged in (rows[::-1], [row[::-1] for row in rows]):
        two_level_mean(codec("fp32"), exchanged, other)
        assert out.tobytes() != other.tobytes()
        assert float(np.abs(out - other).max()) < 1e-6


def test_what_does_not_decode_counts_in_no_weight_and_an_empty_row_not_at_all() -> None:
    rows = grid_of("fp32")
    broken = rows[1][2].encoded.copy()
    broken[:4] = np.array([np.nan], np.float32).view(np.uint8)
    damaged = [rows[0], [*rows[1][:2], Term(2, 99, broken), rows[1][3]], []]
    mean = row_mean(codec("fp32"), damaged[1], N)
    assert mean.counted == (0, 1, 3)
    assert mean.weight == sum(rows[1][place].weight for place in (0, 1, 3))
    out = np.empty(N, np.float32)
    assert two_level_mean(codec("fp32"), damaged, out) == [0, 1]
    assert out.tobytes() == plain("fp32", [rows[0], [*rows[1][:2], rows[1][3]]]).tobytes()
    assert column_mean(codec("fp32"), [RowMean(values=out, weight=0, counted=())], out) == []
    assert not out.any()


def test_chunks_are_dealt_in_a_row_as_in_a_plan() -> None:
    rates = [(10, 10), (100, 100), (100, 40), (3, 90)]
    owners = row_owners(rates, 40)
    assert owners == tuple(o.owner for o in deal(rates, 40) for _ in range(o.start, o.stop))


@pytest.mark.parametrize("gone", [{2}, {0, 5}, {1, 2, 3, 4, 5}])
def test_chunks_of_who_is_gone_go_to_the_others_in_turn_and_no_other_chunk_moves(gone: set[int]) -> None:
    before, after = row_owners(EQUAL, 60), row_owners(EQUAL, 60, gone=gone)
    assert not gone & set(after)
    moved = [chunk for chunk in range(60) if before[chunk] != after[chunk]]
    assert moved == [chunk for chunk in range(60) if before[chunk] in gone]
    taken = Counter(after[chunk] for chunk in moved)
    assert max(taken.values()) - min(taken.values()) <= 1
    assert len(taken) == 6 - len(gone)


def test_heir_of_a_chunk_finds_the_same_bits() -> None:
    """The sum depends on the row's order and on who counts, and not on who sums."""
    rows = grid_of("int8")
    first, second = (row_mean(codec("int8"), rows[0], N) for _ in range(2))
    assert first.values.tobytes() == second.values.tobytes()


def test_column_has_an_owner_of_each_row() -> None:
    owners = [row_owners([(10, 10)] * size, 12) for size in (3, 4, 6)]
    for chunk in range(12):
        assert column(owners, chunk) == (chunk // 4, chunk // 3, chunk // 2)


def test_nobody_left_is_refused() -> None:
    with pytest.raises(LocalError, match="everybody"):
        row_owners(EQUAL, 8, gone=range(6))


@pytest.mark.parametrize(("row", "rows"), [(4, 2), (8, 8), (128, 32)])
def test_a_grid_sends_what_a_flat_sum_sends(row: int, rows: int) -> None:
    assert bytes_sent(1000.0, row=row, rows=rows, share=1 / row) == pytest.approx(2000 * (1 - 1 / (row * rows)))
