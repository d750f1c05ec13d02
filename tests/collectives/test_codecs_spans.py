"""Chunks longer than a span: the same bytes and values however they are cut, and nothing bad at any place gets past."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.collectives import spans
from shoal.collectives.codecs import SPAN_VALUES, VALUE_LIMIT, Undecodable, codec
from shoal.collectives.spans import LIMIT_BITS
from shoal.protocol.errors import LocalError
from tests.collectives.encodings import NAMES, decode, encode, f32, pattern

LONG = SPAN_VALUES + 4096 + 77  # two spans; many blocks, of which the last is short
"""Values of a chunk."""

PLACES = [0, 1, 127, 128, 511, 512, 4095, 4096, SPAN_VALUES - 1, SPAN_VALUES, LONG - 2, LONG - 1]
"""Both sides of every border there is in it."""


@pytest.mark.parametrize("name", NAMES)
def test_spans_of_any_size_and_any_number_of_threads_give_the_same_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = pattern(LONG, 2.0**-25)
    want = encode(name, values).tobytes()
    decoded = decode(name, want, LONG).tobytes()
    starts = (0, 1, 0, 4097, 0)
    with ThreadPoolExecutor(3) as pool:
        at_once = list(pool.map(lambda start: encode(name, values[start:]).tobytes(), starts))
    assert at_once == [encode(name, values[start:]).tobytes() for start in starts]
    for size in (4096, 5 * 4096):
        monkeypatch.setattr(spans, "SPAN_VALUES", size)
        assert encode(name, values).tobytes() == want
        assert decode(name, want, LONG).tobytes() == decoded


# --- bad values ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_encode_of_a_diverged_update_is_our_error(name: str, bad: float) -> None:
    for place in PLACES:
        values = np.ones(LONG, np.float32)
        values[place] = bad
        with pytest.raises(LocalError, match="diverged"):
            encode(name, values)
    with pytest.raises(LocalError, match="diverged"):
        encode(name, f32(bad))


VALUES_OF_A_SCALE = {"int8": 4096, "int4": 128, "2bit": 512}


def broken(name: str, data: bytes, place: int) -> bytearray:
    """`data`, a chunk of LONG values, with the value at `place` or its scale such as no encoder writes."""
    out = bytearray(data)
    if name == "fp32":
        out[4 * place : 4 * place + 4] = struct.pack("<f", math.nan)
    elif name == "bf16":
        out[2 * place : 2 * place + 2] = b"\x80\x7f"
    elif name == "int8":
        out[4 * -(-LONG // 4096) + place] = 0x80
    elif name == "2bit":
        at = place // 512 * 136  # a high zero in a block of zeros
        out[at : at + min(136, len(out) - at)] = bytes(min(136, len(out) - at))
        out[at + 8 + place % 512 // 4] = 1 << place % 4 * 2
    else:
        at, shift = 2 * -(-LONG // 128) + place // 2, place % 2 * 4
        out[at] = out[at] & 0xF0 >> shift | 8 << shift
    return out


def broken_scale(name: str, data: bytes, place: int) -> bytearray:
    out = bytearray(data)
    block = place // VALUES_OF_A_SCALE[name]
    size, pattern, apart = {
        "int8": (4, b"\0\0\x80\x7f", 4),
        "int4": (2, b"\x80\x7f", 2),
        "2bit": (4, b"\0\0\x80\x7f", 136),
    }[name]
    out[apart * block : apart * block + size] = pattern
    return out


@pytest.mark.parametrize("name", NAMES)
def test_decode_refuses_a_bad_value_wherever_it_is(name: str) -> None:
    good = encode(name, pattern(LONG, 2.0**-25)).tobytes()
    codec(name).check(good, LONG)
    for place in PLACES:
        for take in (partial(decode, name), codec(name).check):
            with pytest.raises(Undecodable):
                take(bytes(broken(name, good, place)), LONG)
        if name in VALUES_OF_A_SCALE:
            with pytest.raises(Undecodable, match=r"scale|magnitudes"):
                decode(name, bytes(broken_scale(name, good, place)), LONG)
    if name != "fp32":
        with pytest.raises(Undecodable, match="padding"):
            decode(name, good[:-1] + b"\xff", LONG)


# --- spans ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 77, 4096, 4097, 12_289, LONG])
@pytest.mark.parametrize("size", [4096, 3 * 4096, 1 << 20])
def test_spans_decode_to_the_same_values(name: str, n: int, size: int) -> None:
    data = encode(name, pattern(n, 2.0**-25))
    scratch = np.empty(min(n, size), np.float32)
    parts = [codec(name).decode_span(data, n, at, min(at + size, n), scratch).tobytes() for at in range(0, n, size)]
    assert b"".join(parts) == decode(name, data.tobytes(), n).tobytes()


def test_span_of_fp32_is_a_view_that_cannot_be_written() -> None:
    data = encode("fp32", pattern(LONG, 2.0**-25))
    span = codec("fp32").decode_span(data, LONG, 4096, LONG, np.empty(LONG, np.float32))
    assert np.shares_memory(span, data)
    with pytest.raises(ValueError, match="read-only"):
        span[0] = 0


def refusing_spans(name: str, data: bytes | bytearray, n: int) -> list[int]:
    """The starts of the spans of 4096 that are refused."""
    refused, scratch = [], np.empty(4096, np.float32)
    for start in range(0, n, 4096):
        try:
            codec(name).decode_span(data, n, start, min(start + 4096, n), scratch)
        except Undecodable:
            refused.append(start)
    return refused


@pytest.mark.parametrize("name", NAMES)
def test_spans_refuse_what_the_whole_chunk_refuses_and_each_its_own(name: str) -> None:
    good = encode(name, pattern(LONG, 2.0**-25)).tobytes()
    every = list(range(0, LONG, 4096))
    assert refusing_spans(name, good, LONG) == []
    assert refusing_spans(name, good[:-4], LONG) == every
    for place in PLACES:
        assert refusing_spans(name, broken(name, good, place), LONG) == [place // 4096 * 4096]
        if name in VALUES_OF_A_SCALE:
            assert refusing_spans(name, broken_scale(name, good, place), LONG) == [place // 4096 * 4096]
    if name != "fp32":
        assert refusing_spans(name, good[:-1] + b"\xff", LONG) == every[-1:]


EDGES = (0, 1, LIMIT_BITS - 1, LIMIT_BITS, LIMIT_BITS + 1, 0x3FFF_FFFF, 0x4000_0000, 0x7F80_0000, 0x7FC0_0000)
PATTERNS = st.integers(0, 2**32 - 1) | st.sampled_from([edge | sign for edge in EDGES for sign in (0, 1 << 31)])


@settings(max_examples=500)
@given(st.lists(PATTERNS, max_size=40))
@example([LIMIT_BITS | 0x7F_FFFF])  # of the same exponent as the limit
@example([0x4000_0000, 0x3FFF_FFFF])  # in order, each by itself; their patterns together are infinity's and more
def test_magnitudes_are_within_the_limit_exactly_if_each_is(patterns: list[int]) -> None:
    wide = np.array(patterns, np.uint32)
    assert spans.within_limit(wide, LIMIT_BITS) is all(bits & 0x7FFF_FFFF <= LIMIT_BITS for bits in patterns)
    half = (wide >> 16).astype(np.uint16)
    limit = LIMIT_BITS >> 16
    assert spans.within_limit(half, limit) is all(int(bits) & 0x7FFF <= limit for bits in half)


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.data())
def test_any_bytes_give_finite_values_or_are_refused_by_span_exactly_if_they_are_refused_whole(
    name: str, n: int, data: st.DataObject
) -> None:
    size = codec(name).encoded_bytes(n)
    content = data.draw(st.binary(min_size=size, max_size=size))
    try:
        whole = decode(name, content, n)
    except Undecodable:
        assert refusing_spans(name, content, n) == [0]
    else:
        assert np.abs(whole).max() <= VALUE_LIMIT
        span = codec(name).decode_span(content, n, 0, n, np.empty(n, np.float32))
        assert span.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("start", "stop", "room"), [(1, 2, 9), (0, 0, 9), (4096, 5001, 999), (0, 10, 9), (-4096, 1, 9)]
)
def test_span_that_does_not_fit_is_our_error(start: int, stop: int, room: int) -> None:
    data = encode("int8", pattern(5000, 1.0))
    with pytest.raises(LocalError, match="span"):
        codec("int8").decode_span(data, 5000, start, stop, np.empty(room, np.float32))
