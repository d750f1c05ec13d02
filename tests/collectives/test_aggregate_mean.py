"""The weighted mean: plan order, every operation rounded by itself, and what does not decode is left out whole."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shoal.collectives.aggregate import Term, chunk_scratch, span_scratch, weighted_mean
from shoal.collectives.codecs import F32, SPAN_VALUES, U8, Undecodable, codec
from tests.collectives.encodings import NAMES, decode, encode, f32

LENGTHS = (1, 100, SPAN_VALUES - 1, SPAN_VALUES, SPAN_VALUES + 1, 2 * SPAN_VALUES + 77)


def values(n: int, seed: int) -> F32:
    """Of very different magnitudes per seed, so that the order of additions shows."""
    return (np.random.default_rng(seed).standard_normal(n) * 10.0**seed).astype(np.float32)


def terms_of(name: str, n: int, weights: Sequence[int]) -> list[Term]:
    return [Term(2 * i + 1, weight, encode(name, values(n, i))) for i, weight in enumerate(weights)]


def plainly(name: str, n: int, terms: Sequence[Term]) -> F32:
    """The formula over whole arrays, multiplying by weights of 1 as well."""
    total = np.zeros(n, np.float32)
    for term in terms:
        total = total + np.float32(term.weight * (term.clip / 65536)) * decode(name, term.encoded.tobytes(), n)
    return total / np.float32(sum(term.weight for term in terms))


def same_bits(one: F32, other: F32) -> bool:
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("weights", [(1,), (7,), (1, 1, 1), (3, 1, 1000, 2), (1, (1 << 24) - 1)])
def test_mean_is_the_plain_formula_to_the_bit(name: str, n: int, weights: tuple[int, ...]) -> None:
    terms, out = terms_of(name, n, weights), np.full(n, np.nan, np.float32)
    included, undecodable = weighted_mean(codec(name), terms, out)
    assert (included, undecodable) == ([term.place for term in terms], [])
    assert same_bits(out, plainly(name, n, terms))


@pytest.mark.parametrize("name", [*NAMES, "topk64-256"])
@pytest.mark.parametrize("clips", [(65536, 0, 65535), (1, 40_000, 65536), (33_333, 33_333, 33_333)])
@pytest.mark.parametrize("weights", [(1, 1, 1), (3, (1 << 24) - 1, 1000)])
def test_clipped_mean_is_the_plain_formula_to_the_bit(
    name: str, clips: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    n = SPAN_VALUES + 77
    terms = [replace(term, clip=clip) for term, clip in zip(terms_of(name, n, weights), clips, strict=True)]
    out = np.full(n, np.nan, np.float32)
    assert weighted_mean(codec(name), terms, out) == ([term.place for term in terms], [])
    assert same_bits(out, plainly(name, n, terms))


def test_clip_multiplies_the_sum_and_not_the_divisor() -> None:
    out = np.empty(2, np.float32)
    terms = [Term(0, 3, encode("fp32", f32(8, 0)), 1 << 14), Term(1, 1, encode("fp32", f32(2, 4)))]
    weighted_mean(codec("fp32"), terms, out)
    assert out.tolist() == [2.0, 1.0]  # (3 · ¼ · 8 + 2) ÷ 4, and 4 ÷ 4


def test_factor_of_a_term_is_rounded_once() -> None:
    one = encode("fp32", f32(1))
    assert Term(0, (1 << 24) - 1, one, 65_535).factor == 16_776_959  # 16776959.00002
    assert Term(0, (1 << 24) - 3, one, 1 << 15).factor == 8_388_606.5
    assert Term(0, 12_582_913, one, 43_691).factor == 8_388_673  # 8388672.66669, of which fp32 has the halves
    assert Term(0, 7, one).factor == 7


def test_order_of_the_terms_shows_in_the_bits() -> None:
    terms, out, back = terms_of("fp32", 1000, (1, 2, 3, 1)), np.empty(1000, np.float32), np.empty(1000, np.float32)
    weighted_mean(codec("fp32"), terms, out)
    weighted_mean(codec("fp32"), terms[::-1], back)
    assert not same_bits(out, back)
    np.testing.assert_allclose(out, back, rtol=1e-3, atol=1e-3)


def test_weight_of_two_doubles_and_weight_of_one_changes_no_bit() -> None:
    first, second = encode("fp32", f32(3.0, -1.0, 1e-45)), encode("fp32", f32(6.0, 2.0, 0.0))
    out = np.empty(3, np.float32)
    weighted_mean(codec("fp32"), [Term(0, 2, first), Term(1, 1, second)], out)
    assert out.tolist() == f32(4.0, 0.0, 1e-45).tolist()  # 2·1.4e-45 ÷ 3, rounded to the one subnormal
    weighted_mean(codec("fp32"), [Term(0, 1, first)], out)
    assert same_bits(out, f32(3.0, -1.0, 1e-45))


def test_sum_begins_at_positive_zero() -> None:
    out = np.empty(2, np.float32)
    weighted_mean(codec("fp32"), [Term(0, 1, encode("fp32", f32(-0.0, -0.0)))], out)
    assert same_bits(out, f32(0.0, 0.0))


def test_mean_of_nothing_is_zero() -> None:
    out = np.full(SPAN_VALUES + 5, np.nan, np.float32)
    assert weighted_mean(codec("int8"), [], out) == ([], [])
    assert same_bits(out, np.zeros(SPAN_VALUES + 5, np.float32))


def spoilt(name: str, n: int) -> U8:
    """A chunk whose last value does not decode."""
    data = encode(name, values(n, 3)).copy()
    if name == "fp32":
        data[-4:] = np.frombuffer(b"\x00\x00\xc0\x7f", np.uint8)
    else:
        data[-2:] = np.frombuffer(b"\xc0\x7f", np.uint8)
    return data


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_term_that_does_not_decode_is_in_no_part_of_the_sum(name: str, at: int) -> None:
    n = 2 * SPAN_VALUES + 2  # in the last span: the others were added up already
    good, out = terms_of(name, n, (3, 1)), np.empty(n, np.float32)
    terms = [*good[:at], Term(9, 500, spoilt(name, n)), *good[at:]]
    included, undecodable = weighted_mean(codec(name), terms, out)
    assert (included, undecodable) == ([1, 3], [9])
    assert same_bits(out, plainly(name, n, good))


def test_all_terms_that_do_not_decode_are_named() -> None:
    n, out = 10, np.empty(10, np.float32)
    bad = spoilt("fp32", n)
    good = encode("fp32", values(n, 1))
    terms = [Term(0, 1, bad), Term(1, 4, good), Term(2, 1, bad[:-4]), Term(3, 1, bad)]
    assert weighted_mean(codec("fp32"), terms, out) == ([1], [0, 2, 3])
    assert same_bits(out, values(n, 1))
    assert weighted_mean(codec("fp32"), terms[::3], out) == ([], [0, 3])
    assert not out.any()


def test_chunk_is_checked_to_its_end() -> None:
    n = 2 * SPAN_VALUES + 2
    codec("fp32").check(encode("fp32", values(n, 1)), n)
    with pytest.raises(Undecodable):
        codec("fp32").check(spoilt("fp32", n), n)
    with pytest.raises(Undecodable):
        codec("fp32").check(encode("fp32", values(n, 1)), n - 1)


def test_scratch_is_of_the_thread_that_asks_and_used_again() -> None:
    assert span_scratch().shape == (SPAN_VALUES,)
    assert np.shares_memory(span_scratch(), span_scratch())
    assert np.shares_memory(chunk_scratch(100), chunk_scratch(70))
    assert [chunk_scratch(n).shape for n in (70, 300, 100)] == [(70,), (300,), (100,)]
    assert not np.shares_memory(chunk_scratch(100), span_scratch())
    others: list[F32] = []
    thread = threading.Thread(target=lambda: others.extend((span_scratch(), chunk_scratch(100))))
    thread.start()
    thread.join()
    assert not np.shares_memory(others[0], span_scratch())
    assert not np.shares_memory(others[1], chunk_scratch(100))
