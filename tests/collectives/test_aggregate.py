"""Robust aggregates: a few plain lines to the bit, what hostile contributions can do, and rounds with repairs."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.adamw import NORM_SPAN_VALUES
from shoal.collectives.aggregate import BLOCK_VALUES, Aggregate, Term, chunk_clips, combine, comparators
from shoal.collectives.codecs import F32, codec
from shoal.collectives.finals import FinalFormat
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import CLIP_UNIT
from tests.collectives.encodings import decode, encode, f32
from tests.collectives.reduce_lab import CODECS, Mesh, check_exact, make_plan, peer
from tests.collectives.reduce_lab import encode as contribution
from tests.collectives.repair_lab import running

MEDIAN = Aggregate("median")
QUARTER = Aggregate("trimmed", CLIP_UNIT // 4)
RULES = [MEDIAN, QUARTER, Aggregate("trimmed", 1)]
NAN = f32(np.nan).view(np.uint8)


def terms_of(name: str, n: int, count: int, weights: Sequence[int] = ()) -> list[Term]:
    drawn = np.random.default_rng(n + count).standard_normal((count, n)).astype(np.float32)
    drawn *= (10.0 ** (np.arange(count) % 3))[:, None].astype(np.float32)
    weigh = itertools.chain(weights, itertools.repeat(1))
    return [Term(2 * i + 1, next(weigh), encode(name, row)) for i, row in enumerate(drawn)]


def plainly(rule: Aggregate, values: Sequence[F32]) -> F32:
    """The text of the module over whole arrays."""
    count, ascending = len(values), np.sort(np.stack(values) + np.float32(0), axis=0)
    middle_cut = (count - 1) // 2
    cut = min(-(-count * rule.parameter // CLIP_UNIT), middle_cut) if rule.rule == "trimmed" else middle_cut
    kept = ascending[cut : count - cut]
    middle = kept[0]
    for row in kept[1:]:
        middle = middle + row
    return middle / np.float32(len(kept))


def combined(rule: Aggregate, terms: Sequence[Term], n: int, name: str = "fp32") -> F32:
    out = np.full(n, np.nan, np.float32)
    assert combine(codec(name), terms, rule, out) == ([term.place for term in terms], [])
    return out


def of_rows(*rows: Sequence[float]) -> list[Term]:
    return [Term(place, 1, encode("fp32", f32(*row))) for place, row in enumerate(rows)]


# --- the numbers ---


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (100, 2), (BLOCK_VALUES + 77, 5), (5000, 16)])
def test_robust_rules_are_the_plain_lines_to_the_bit(rule: Aggregate, name: str, n: int, count: int) -> None:
    terms = terms_of(name, n, count)
    values = [decode(name, term.encoded.tobytes(), n) for term in terms]
    assert combined(rule, terms, n, name).tobytes() == plainly(rule, values).tobytes()


def test_chunks_longer_than_all_spans_are_combined_alike() -> None:
    n = NORM_SPAN_VALUES + BLOCK_VALUES + 5
    terms = terms_of("fp32", n, 3)
    values = [decode("fp32", term.encoded.tobytes(), n) for term in terms]
    for rule in RULES:
        assert combined(rule, terms, n).tobytes() == plainly(rule, values).tobytes()


def test_every_rule_of_nothing_is_zero() -> None:
    out = np.full(9, np.nan, np.float32)
    for rule in RULES:
        assert combine(codec("fp32"), [], replace(rule, bounded=True), out) == ([], [])
        assert not out.any()


@pytest.mark.parametrize(
    ("rows", "middle"),
    [
        (((1,), (5,), (100,)), 5),
        (((1,), (5,), (7,), (100,)), 6),
        (((-1e30,), (2,), (3,)), 2),
        (((4,),), 4),
    ],
)
def test_median_is_the_middle_one_or_half_the_sum_of_two(rows: Sequence[Sequence[float]], middle: float) -> None:
    assert combined(MEDIAN, of_rows(*rows), 1).tolist() == [middle]


@pytest.mark.parametrize("hostile", [1e30, -1e30])
def test_trimmed_mean_cuts_both_ends_alike(hostile: float) -> None:
    honest = [(float(i),) for i in range(1, 7)]
    both = combined(QUARTER, of_rows(*honest, (hostile,), (hostile,)), 1)  # two of eight at either end
    assert both.tolist() == [4.5 if hostile > 0 else 2.5]
    assert combined(QUARTER, of_rows(*honest, (1e30,), (-1e30,)), 1).tolist() == [3.5]


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 2), (16, 4), (64, 16)])
def test_at_least_the_share_is_trimmed_and_something_is_left(count: int, cut: int) -> None:
    assert QUARTER.trimmed_of(count) == cut
    assert Aggregate("trimmed", 0).trimmed_of(count) == 0
    assert count - 2 * Aggregate("trimmed", CLIP_UNIT // 2 - 1).trimmed_of(count) >= 1


@pytest.mark.parametrize("rule", [MEDIAN, QUARTER], ids=str)
def test_weights_are_no_matter_to_robust_rules(rule: Aggregate) -> None:
    even, uneven = terms_of("int8", 300, 5), terms_of("int8", 300, 5, [1, 1 << 24, 7, 7, 1])
    assert combined(rule, even, 300, "int8").tobytes() == combined(rule, uneven, 300, "int8").tobytes()


@pytest.mark.parametrize("rule", [MEDIAN, QUARTER], ids=str)
def test_which_zero_is_smaller_is_never_asked(rule: Aggregate) -> None:
    rows = [(-0.0, -0.0), (0.0, -1.0), (-0.0, 1.0)]
    for order in itertools.permutations(rows):
        assert combined(rule, of_rows(*order), 2).tobytes() == f32(0, 0).tobytes()


def test_order_of_the_terms_shows_in_no_bit_of_a_sorted_rule() -> None:
    terms = terms_of("fp32", 500, 7)
    shuffled = random.Random(1).sample(terms, len(terms))
    for rule in (MEDIAN, QUARTER):
        assert combined(rule, terms, 500).tobytes() == combined(rule, shuffled, 500).tobytes()


@pytest.mark.parametrize("count", range(1, 13))
def test_network_sorts_all_zeros_and_ones(count: int) -> None:
    cases = (np.arange(1 << count)[:, None] >> np.arange(count) & 1).T.copy()  # (count, 2^count)
    for low, high in comparators(count):
        assert low < high < count
        cases[low], cases[high] = np.minimum(cases[low], cases[high]), np.maximum(cases[low], cases[high])
    assert (np.diff(cases, axis=0) >= 0).all()


@pytest.mark.parametrize("count", [16, 33, 64])
def test_network_sorts_many(count: int) -> None:
    values = np.random.default_rng(count).standard_normal((count, 200))
    wanted = np.sort(values, axis=0)
    for low, high in comparators(count):
        values[low], values[high] = np.minimum(values[low], values[high]), np.maximum(values[low], values[high])
    assert (values == wanted).all()


# --- what is left out, and what is clipped ---


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("rule", [Aggregate(), MEDIAN, QUARTER], ids=str)
def test_nan_is_left_out_as_if_it_had_not_come(rule: Aggregate, bounded: bool) -> None:
    rule, n = replace(rule, bounded=bounded), 2 * BLOCK_VALUES
    good = terms_of("fp32", n, 4)
    poison = good[0].encoded.copy()
    poison[-4:] = NAN
    out, want = np.empty(n, np.float32), np.empty(n, np.float32)
    terms = [good[0], replace(good[0], place=2, encoded=poison), *good[1:], Term(99, 5, poison)]
    assert combine(codec("fp32"), terms, rule, out) == ([1, 3, 5, 7], [2, 99])
    combine(codec("fp32"), good, rule, want)
    assert out.tobytes() == want.tobytes()
    assert np.isfinite(out).all()


def test_who_is_absent_is_no_zero_among_the_values() -> None:
    assert combined(MEDIAN, of_rows((10,), (11,), (12,)), 1).tolist() == [11]
    assert combined(QUARTER, of_rows((10,), (11,), (12,)), 1).tolist() == [11]


def test_chunk_clip_is_root_of_median_over_norm() -> None:
    assert chunk_clips([4.0, 1.0, 16.0]) == [65536, 65536, 32768]
    assert chunk_clips([0.0, 0.0, 9.0]) == [65536] * 3  # whoever has nothing to say does not silence the others
    assert chunk_clips([1.0, 1.0, float("inf")]) == [65536, 65536, 0]
    assert chunk_clips([]) == []


def test_norm_is_that_of_the_bytes_whatever_was_announced() -> None:
    """The last one announced the norm of the others, so that the plan does not clip it."""
    near, bounded = [(3.0, 4.0), (4.0, 3.0), (5.0, 0.0)], Aggregate(bounded=True)
    np.testing.assert_allclose(combined(bounded, of_rows(*near, (300, 400)), 2), f32(3.75, 2.75), rtol=1e-3)
    assert combined(bounded, of_rows(*near, (3e9, 4e9)), 2).tolist() == [3.0, 1.75]  # less than 1/65536 is nothing
    assert combined(Aggregate(), of_rows(*near, (3e9, 4e9)), 2)[0] > 1e8


def test_smaller_of_the_plans_clip_and_the_chunks_counts() -> None:
    clips = (65536, 32768, 65536)
    terms = [replace(term, clip=clip) for term, clip in zip(of_rows((2,), (2,), (8,)), clips, strict=True)]
    assert combined(Aggregate(bounded=True), terms, 1).tolist() == f32((2 + 1 + 2) / 3).tolist()


def test_memory_is_a_block_per_contribution_whatever_the_chunk() -> None:
    n = 1 << 19
    terms, out = terms_of("fp32", n, 6), np.empty(n, np.float32)
    tracemalloc.start()
    combine(codec("fp32"), terms, replace(QUARTER, bounded=True), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 7 * BLOCK_VALUES * 4 + NORM_SPAN_VALUES * 16 + (4 << 20) < 6 * n * 4


# --- in a round ---


def names(plan_aggregate: object) -> Aggregate:
    plan = make_plan([contribution(0, "int8")], [1])
    return Aggregate.of(msgspec.structs.replace(plan, aggregate=plan_aggregate))


def test_plan_says_how_to_combine() -> None:
    assert names(msgspec.UNSET) == names("mean") == Aggregate()
    assert names("median") == MEDIAN
    assert names("trimmed16384") == QUARTER
    plan = make_plan([contribution(0, "int8")], [1])
    assert FinalFormat(msgspec.structs.replace(plan, clips=(65536,))).aggregate.bounded


@pytest.mark.parametrize(
    "name", ["", "Median", "trimmed", "median3", "trimmed-1", "krum", "trimmed01", "centred_clip1"]
)
def test_aggregate_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no aggregate"):
        names(name)


@pytest.mark.parametrize("aggregate", ["median", "trimmed16384", msgspec.UNSET])
@pytest.mark.parametrize("name", CODECS)
def test_finals_are_the_references_under_every_rule(name: str, aggregate: object) -> None:
    contributions = [contribution(n, name) for n in range(5)]
    plan = make_plan(contributions, [3, 1, 1000, 7, 2])
    plan = msgspec.structs.replace(plan, aggregate=aggregate, clips=(65536, 40_000, 65536, 1, 65536))
    mesh = Mesh(plan, contributions)
    mesh.start()
    mesh.run(7)
    check_exact(mesh)


@pytest.mark.parametrize("aggregate", ["median", "trimmed16384"])
def test_repaired_chunks_are_the_same_bits(aggregate: str) -> None:
    swarm = running((1, 2, 3, 4, 5), aggregate=aggregate, clips=(65536, 30_000, 65536, 65536, 65536))
    swarm.deliver(only=lambda parcel: peer(4) not in (parcel.sender, parcel.to))
    swarm.kill(4, loss=1.0)
    swarm.repair()
    swarm.deliver()
    finals = swarm.check()  # against the reference
    assert {final.bitmap for final in finals.chunks} == {b"\x0f"}
