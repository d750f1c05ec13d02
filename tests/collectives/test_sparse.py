"""The sparse codecs: golden bytes, a slow one in plain Python to compare with, and everything that decoding refuses."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives import spans
from shoal.collectives.codecs import DENSE, F32, SPAN_VALUES, VALUE_LIMIT, Codec, Undecodable, codec, final_codec
from shoal.collectives.sparse import sparse_codecs
from shoal.protocol.errors import ConfigError, LocalError
from tests.collectives.encodings import f32, from_bits, pattern, plain_mean, plain_two_bit, rounded

LIMIT = float(VALUE_LIMIT)
SIDES = {"contributed": codec, "reduced": final_codec}
NAMES = ("topk64-256", "topk1-1", "topk3-7", "topk5-400", "topk500-4096", "topk4096-4096")


def both(name: str) -> list[Codec]:
    return [side(name) for side in SIDES.values()]


def decode(how: Codec, data: bytes, n: int) -> F32:
    out = np.full(n, np.nan, np.float32)
    how.decode_into(data, out)
    return out


# --- plain Python, from the specification ---


def plain_kept(block: Sequence[float], k: int) -> list[int]:
    by_size = sorted(range(len(block)), key=lambda i: (-abs(block[i]), i))
    return sorted(by_size[:k])


def plain_bits(bits: int, count: int) -> bytes:
    return bits.to_bytes(-(-count // 8), "little")


def plain_indices(kept: Sequence[int], n: int) -> bytes:
    low = math.floor(math.log2(n / len(kept)))
    lower = plain_bits(sum(x % 2**low << low * i for i, x in enumerate(kept)), low * len(kept))
    upper = plain_bits(sum(1 << i + x // 2**low for i, x in enumerate(kept)), len(kept) + (n - 1) // 2**low)
    bitmap = plain_bits(sum(1 << x for x in kept), n)
    return bitmap if len(bitmap) <= len(lower + upper) else lower + upper


def plain_contributed(block: Sequence[float], k: int) -> tuple[bytes, dict[int, float]]:
    kept = plain_kept(block, k)
    values = [block[i] for i in kept]
    sizes = [abs(value) for value in values]
    border = max(plain_mean(sizes, len(sizes)), min(sizes)) if min(sizes) else 0.0
    levels, codes, decoded = plain_two_bit(values, border)
    return levels + plain_indices(kept, len(block)) + codes, dict(zip(kept, decoded, strict=True))


def plain_reduced(block: Sequence[float], k: int) -> tuple[bytes, dict[int, float]]:
    kept = plain_kept(block, k)
    scale = rounded(max(abs(v) for v in block) / 127)
    scale = 0.0 if scale < 2.0**-126 else scale
    numbers = [round(rounded(block[i] / scale)) if scale else 0 for i in kept]
    decoded = {i: rounded(number * scale) for i, number in zip(kept, numbers, strict=True)}
    return struct.pack("<f", scale) + plain_indices(kept, len(block)) + struct.pack(f"<{len(kept)}b", *numbers), decoded


def plainly(side: str, name: str, values: Sequence[float]) -> tuple[bytes, list[float]]:
    k, final_k = map(int, name[4:].split("-"))
    data, decoded = b"", []
    for start in range(0, len(values), 4096):
        block = [max(-LIMIT, min(LIMIT, v)) for v in values[start : start + 4096]]
        more, kept = plain_contributed(block, k) if side == "contributed" else plain_reduced(block, final_k)
        data += more
        decoded += [kept.get(i, 0.0) for i in range(len(block))]
    return data + bytes(-len(data) % 4), decoded


def check_against_plain(side: str, name: str, values: F32) -> None:
    how = SIDES[side](name)
    data, decoded = plainly(side, name, values.tolist())
    assert how.encode(values).tobytes() == data
    assert how.encoded_bytes(values.size) == len(data)
    assert decode(how, data, values.size).tobytes() == f32(*decoded).tobytes()


EVERY = pytest.mark.parametrize("side", SIDES)
BY_NAME = pytest.mark.parametrize("name", NAMES)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -(2.0**-126), 3e38])
lists = st.lists(floats, min_size=1, max_size=40) | st.lists(few, min_size=1, max_size=40)


@EVERY
@settings(max_examples=150)
@given(name=st.sampled_from(["topk1-1", "topk3-7", "topk5-400", "topk64-256"]), values=lists)
def test_short_blocks_agree_with_plain_python(side: str, name: str, values: list[float]) -> None:
    check_against_plain(side, name, f32(*values))


@EVERY
@BY_NAME
def test_whole_blocks_agree_with_plain_python(side: str, name: str) -> None:
    many = np.concatenate([pattern(4096, 2.0**-20), pattern(4096, 2.0**-140), np.zeros(4096, np.float32)])
    sparse = np.zeros(4096, np.float32)
    sparse[::911] = pattern(5, 1.0)
    check_against_plain(side, name, np.concatenate([many, sparse, pattern(333, 3.1e-9)]))


# --- golden vectors: (side, name, values, bytes, decoded) ---

GOLDEN = [
    # low 1, high 4; indices 1 and 3, in three bits each and two of four; the second is high and negative; padding
    (
        "contributed",
        "topk2-2",
        f32(0.5, 1, 0, -4, *[0.5] * 20),
        "0000803f 00008040 19 03 0c 00",
        f32(0, 1, 0, -4, *[0] * 20),
    ),
    # as a bitmap, which is the shorter one, and padding
    ("contributed", "topk3-3", f32(0.5, 1, 0, -4), "0000403f 00008040 0b 30 0000", f32(0.75, 0.75, 0, -4)),
    # of equal magnitudes the lower indices; one of a pair that has no partner
    ("reduced", "topk1-1", f32(-2, 2, 2), "0402813c 01 81 0000", f32(-2, 0, 0)),
    # a block of which less is not zero keeps zeros, and these stay zeros, the negative one too
    ("contributed", "topk3-3", f32(0, -3, -0.0, 0, 5), "00000000 00008040 13 1c 0000", f32(0, -4, 0, 0, 4)),
    # saturated
    ("reduced", "topk1-2", f32(3e38, -1, -3e38), "0000005c 05 7f81 00", f32(LIMIT, 0, -LIMIT)),
    ("contributed", "topk2-2", f32(3e38, -1, -3e38), "00007e5f 00007e5f 05 08 0000", f32(LIMIT, 0, -LIMIT)),
    # below 2^-126 there is nothing, not even a sign
    ("contributed", "topk2-2", from_bits(0x1, 0x8000_0002), "00000000 00000000 03 00 0000", f32(0, 0)),
    ("reduced", "topk2-2", from_bits(0x1, 0x8000_0002), "00000000 03 0000 00", f32(0, 0)),
]


@pytest.mark.parametrize(("side", "name", "values", "expected", "decoded"), GOLDEN)
def test_encode_gives_the_golden_bytes(side: str, name: str, values: F32, expected: str, decoded: F32) -> None:
    how = SIDES[side](name)
    data = how.encode(values).tobytes()
    assert data.hex() == expected.replace(" ", "")
    assert decode(how, data, values.size).tobytes() == decoded.tobytes()


# Of the encoded and the decoded bytes; made with the plain Python codecs above.
GOLDEN_HASHES = {
    ("contributed", "topk64-256"): ("508366be095aa4d4", "6d40a390d289431b"),
    ("reduced", "topk64-256"): ("7bd5d09c79708cef", "db1af6f59a99c8b2"),
    ("contributed", "topk500-4096"): ("9bf0f7cbfc168a1e", "49d1853236bd64d4"),
    ("reduced", "topk500-4096"): ("69f4cf7ed79f897a", "679386a7656ec2c8"),
}


@pytest.mark.parametrize(("side", "name"), GOLDEN_HASHES)
def test_a_long_pattern_has_the_golden_hash_on_every_machine(side: str, name: str) -> None:
    values = np.concatenate([pattern(9001, 2.0**-30), pattern(5000, 2.0**-149), pattern(1, 1.0)])
    how = SIDES[side](name)
    data = how.encode(values).tobytes()
    hashes = tuple(blake3(item).hexdigest()[:16] for item in (data, decode(how, data, values.size).tobytes()))
    assert hashes == GOLDEN_HASHES[side, name]


def test_sizes_are_those_that_are_documented() -> None:
    contributed, reduced = both("topk64-256")
    assert (contributed.encoded_bytes(4096), reduced.encoded_bytes(4096)) == (88, 452)
    assert (contributed.encoded_bytes(1 << 18), reduced.encoded_bytes(1 << 18)) == (64 * 88, 64 * 452)
    assert contributed.encoded_bytes(4096 + 10) == 88 + 8 + 2 + 3 + 3  # ten values: a bitmap, ten times two bits


# --- properties ---


@EVERY
@BY_NAME
@pytest.mark.parametrize("n", [1, 2, 3, 5, 4095, 4096, 4097, 12289])
def test_encoded_bytes_is_what_is_written_and_a_multiple_of_four(side: str, name: str, n: int) -> None:
    how = SIDES[side](name)
    out = np.full(how.encoded_bytes(n), 0xAA, np.uint8)
    assert how.encode(pattern(n, 2.0**-25), out) is out
    assert out.tobytes() == how.encode(pattern(n, 2.0**-25)).tobytes()
    assert out.size % 4 == 0


def test_error_of_two_bits_is_small_beside_what_is_kept() -> None:
    values = np.random.default_rng(5).standard_normal(64 * 4096).astype(np.float32)
    how = codec("topk64-256")
    out = decode(how, how.encode(values).tobytes(), values.size)
    sent = out != 0
    assert np.count_nonzero(sent) == 64 * 64
    assert ((out - values)[sent] ** 2).sum() < 0.01 * (values[sent] ** 2).sum()


@EVERY
def test_spans_of_any_size_give_the_same_bytes_and_values(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = SPAN_VALUES + 4096 + 77
    how, values = SIDES[side]("topk64-256"), pattern(n, 2.0**-25)
    want = how.encode(values).tobytes()
    decoded = decode(how, want, n)
    scratch = np.empty(SPAN_VALUES, np.float32)
    for start in (0, 4096, SPAN_VALUES, SPAN_VALUES + 4096):
        for stop in {min(start + 8192, n), min(start + SPAN_VALUES, n)}:
            assert np.array_equal(how.decode_span(want, n, start, stop, scratch), decoded[start:stop])
    monkeypatch.setattr(spans, "SPAN_VALUES", 3 * 4096)
    assert how.encode(values).tobytes() == want
    assert decode(how, want, n).tobytes() == decoded.tobytes()


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encode_of_a_diverged_update_is_our_error(side: str, bad: float) -> None:
    values = np.zeros(9000, np.float32)
    for place in (0, 4095, 4096, 8999):
        values[place] = bad
        with pytest.raises(LocalError, match="diverged"):
            SIDES[side]("topk64-256").encode(values)
        values[place] = 0


# --- what is refused ---

BAD = [
    ("contributed", 20, "0000803f 00008040 19 03 0c 00 00000000", "bytes"),
    ("contributed", 20, "0000803f 00008040 19 03", "bytes"),
    ("contributed", 20, "0000803f 00008040 0b 03 0c 00", "ascend"),
    ("contributed", 20, "0000803f 00008040 09 03 0c 00", "ascend"),  # one twice
    ("contributed", 20, "0000803f 00008040 29 09 0c 00", "outside"),
    ("contributed", 20, "0000803f 00008040 19 07 0c 00", "values"),
    ("contributed", 20, "0000803f 00008040 19 01 0c 00", "values"),
    ("contributed", 20, "0000803f 00008040 59 03 0c 00", "padding"),
    ("contributed", 20, "0000803f 00008040 19 13 0c 00", "padding"),
    ("contributed", 20, "0000803f 00008040 19 03 1c 00", "padding"),  # a third value
    ("contributed", 20, "0000803f 00008040 19 03 0c 01", "padding"),
    ("contributed", 20, "00008040 0000803f 19 03 0c 00", "order"),
    ("contributed", 20, "000080bf 00008040 19 03 0c 00", "negative"),
    ("contributed", 20, "0000803f 0000c07f 19 03 0c 00", "finite"),
    ("contributed", 20, "0000803f 0000807f 19 03 0c 00", "finite"),
    ("contributed", 20, "0000803f 01007e5f 19 03 0c 00", "finite"),  # beyond the limit
    ("contributed", 20, "00000080 00008040 19 03 0c 00", "negative"),  # minus zero
    ("contributed", 20, "ffff7f00 00008040 19 03 0c 00", "subnormal"),
    ("contributed", 20, "00000000 00008040 19 03 0e 00", "zero"),  # a negative zero
    ("contributed", 20, "00000000 00000000 19 03 04 00", "zero"),  # a high one
    ("contributed", 3, "0000803f 00008040 03 0c 0001", "padding"),
    ("contributed", 3, "0000803f 00008040 07 0c 0000", "values"),  # three in the bitmap
    ("contributed", 3, "0000803f 00008040 09 0c 0000", "padding"),  # beyond the block
    ("reduced", 3, "0000803f 05 7f80 00", "-128"),
    ("reduced", 3, "0000807f 05 7f81 00", "scale"),
    ("reduced", 3, "000080bf 05 7f81 00", "scale"),
    ("reduced", 3, "0100005c 05 7f81 00", "scale"),
    ("reduced", 3, "00000000 05 0001 00", "no scale"),
    ("reduced", 3, "0000803f 04 7f81 00", "values"),
    ("reduced", 3, "0000803f 05 7f81 01", "padding"),
]


@pytest.mark.parametrize(("side", "n", "data", "why"), BAD)
def test_decode_refuses_what_no_encoder_writes(side: str, n: int, data: str, why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        decode(SIDES[side]("topk2-2"), bytes.fromhex(data), n)


def test_decode_refuses_bits_beside_a_last_index() -> None:
    how = final_codec("topk1-1")
    good = bytearray(how.encode(np.eye(1, 4096, 7, dtype=np.float32)[0]).tobytes())
    decode(how, bytes(good), 4096)
    good[5] |= 0x10
    with pytest.raises(Undecodable, match="padding"):
        decode(how, bytes(good), 4096)


@EVERY
@settings(max_examples=300)
@given(name=st.sampled_from(["topk1-1", "topk2-2", "topk3-5"]), n=st.integers(1, 30), data=st.data())
def test_any_bytes_are_refused_or_decode_to_what_is_sparse_and_finite(
    side: str, name: str, n: int, data: st.DataObject
) -> None:
    how = SIDES[side](name)
    size = how.encoded_bytes(n)
    content = data.draw(st.binary(min_size=size, max_size=size))
    try:
        out = decode(how, content, n)
    except Undecodable:
        with pytest.raises(Undecodable):
            how.decode_span(content, n, 0, n, np.empty(n, np.float32))
        return
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= VALUE_LIMIT
    assert np.count_nonzero(out) <= int(name[-1])
    assert how.decode_span(content, n, 0, n, np.empty(n, np.float32)).tobytes() == out.tobytes()


@EVERY
def test_a_flipped_bit_is_refused_or_changes_a_value_within_the_limit(side: str) -> None:
    how = SIDES[side]("topk64-256")
    sound = how.encode(pattern(4096, 2.0**-25)).tobytes()
    before = decode(how, sound, 4096)
    for flip in range(0, 8 * 88, 5):
        data = bytearray(sound)
        data[flip // 8] ^= 1 << flip % 8
        try:
            after = decode(how, bytes(data), 4096)
        except Undecodable:
            continue
        assert np.isfinite(after).all(), flip
        assert after.tobytes() != before.tobytes() or side == "reduced", flip  # a final may have the index of a zero


# --- names ---


@pytest.mark.parametrize(
    "name", ["topk", "topk64", "topk0-1", "topk2-1", "topk1-4097", "topk01-2", "topk1-2 ", "topk١-2", "topk1-99999"]
)
def test_name_of_no_codec_is_refused(name: str) -> None:
    assert sparse_codecs(name) is None
    with pytest.raises(ConfigError, match="there is no codec"):
        codec(name)
    with pytest.raises(ConfigError, match="topk64-256"):
        final_codec(name)


def test_dense_codecs_are_their_own_finals() -> None:
    for name in DENSE:
        assert codec(name) is final_codec(name)
    assert codec("topk64-256") is not final_codec("topk64-256")
    assert codec("topk64-256") is codec("topk64-256")
