"""Golden bytes, an independent scalar codec in Python floats to compare with, and everything decoding refuses."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives.codecs import F32, VALUE_LIMIT, Undecodable, check_denormals, codec
from shoal.protocol.errors import ConfigError, LocalError
from tests.collectives.encodings import (
    NAMES,
    decode,
    encode,
    f32,
    from_bits,
    pattern,
    plain_mean,
    plain_two_bit,
    rounded,
)

LIMIT = float(VALUE_LIMIT)


# --- golden vectors: (codec, values, bytes, decoded) ---

GOLDEN = [
    ("fp32", f32(1.0, -2.5), "0000803f 000020c0", f32(1.0, -2.5)),
    ("fp32", from_bits(0x1, 0x8000_0000), "01000000 00000080", from_bits(0x1, 0x8000_0000)),
    ("fp32", f32(3e38, -3e38), "00007e5f 00007edf", f32(LIMIT, -LIMIT)),
    # one; a tie down to even; a tie up to even; just above a tie; odd, so two bytes of padding
    (
        "bf16",
        from_bits(0x3F80_0000, 0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0xBF81_8000),
        "803f 803f 823f 813f 82bf 0000",
        from_bits(0x3F80_0000, 0x3F80_0000, 0x3F82_0000, 0x3F81_0000, 0xBF82_0000),
    ),
    # subnormals: kept where bf16 has them, else to zero with its sign
    (
        "bf16",
        from_bits(0x0001_8000, 0x0000_8000, 0x8000_0001, 0x007F_FFFF),
        "0200 0000 0080 8000",
        from_bits(0x0002_0000, 0x0, 0x8000_0000, 0x0080_0000),
    ),
    ("bf16", f32(3e38, -3e38), "7e5f 7edf", f32(LIMIT, -LIMIT)),
    # scale 1; ties to even on both sides of zero
    ("int8", f32(127, -63.5, 0.5, 1.5), "0000803f 7fc00002", f32(127, -64, 0, 2)),
    ("int8", f32(-127, 2.5), "0000803f 81020000", f32(-127, 2)),
    # 45.5 ÷ 7 is a tie; times the reciprocal of 7 it would be just above
    ("int8", f32(889, 45.5), "0000e040 7f060000", f32(889, 42)),
    ("int8", f32(0, 0, -0.0), "00000000 00000000", f32(0, 0, 0)),
    # scale 2^-126, the smallest there is; one bit less and the block is zero
    ("int8", f32(127 * 2.0**-126, -(2.0**-126)), "00008000 7fff0000", f32(127 * 2.0**-126, -(2.0**-126))),
    ("int8", np.nextafter(f32(127 * 2.0**-126), f32(0)), "00000000 00000000", f32(0)),
    ("int8", from_bits(0x1, 0x8000_0001), "00000000 00000000", f32(0, 0)),
    ("int8", f32(3e38, -3e38, 2.0**57), "0000005c 7f810100", f32(LIMIT, -LIMIT, 2.0**57)),
    # scale 1; whole numbers stay, whatever the dither; the first in the low nibble; a nibble and a byte of padding
    ("int4", f32(7, -7, 1, -1, 2), "803f 97 f1 02 000000", f32(7, -7, 1, -1, 2)),
    # the halves go up and down as the dither of these places says
    ("int4", f32(-7, *[0.5] * 7), "803f 09 10 01 11 0000", f32(-7, 0, 0, 1, 1, 0, 1, 1)),
    # a scale between two bf16 goes to the upper one, that of 1 ÷ 7 too
    ("int4", f32(7.0001, -1), "813f f7 00", f32(7.0546875, -1.0078125)),
    ("int4", f32(1), "133e 07 00", f32(7 * 0.1435546875)),
    # with u of the first place x ÷ 158 stays just below one, times the reciprocal it would not; with 218 it reaches it
    ("int4", np.append(from_bits(0x42F0_795D), f32(1106)), "1e43 70 00", f32(0, 1106)),
    ("int4", np.append(from_bits(0x4325_E58D), f32(1526)), "5a43 71 00", f32(218, 1526)),
    # with u of the fourth place the sum is 2^-25 below one, and one when rounded to fp32
    ("int4", f32(7, 0, 0, 1 - 44273.5 / 65536 - 2.0**-25), "803f 07 10", f32(7, 0, 0, 1)),
    ("int4", f32(0, -0.0, 0), "0000 00 00", f32(0, 0, 0)),
    # scale 2^-126, the smallest there is; one bit less and the block is zero
    ("int4", f32(7 * 2.0**-126, -(2.0**-126)), "8000 f7 00", f32(7 * 2.0**-126, -(2.0**-126))),
    ("int4", np.nextafter(f32(7 * 2.0**-126), f32(0)), "0000 00 00", f32(0)),
    ("int4", from_bits(0x1, 0x8000_0001), "0000 00 00", f32(0, 0)),
    ("int4", f32(3e38, -3e38), "115e 97 00", f32(126.875 * 2.0**57, -126.875 * 2.0**57)),
    # the mean, 2.5, is the border, and low; low the mean of 1, 2 and 2.5, high of 3 and 4; the first in the lowest bits
    ("2bit", f32(1, -2.5, 2, -4, 3), "abaaea3f 00006040 c8 01 0000", f32(11 / 6, -11 / 6, 11 / 6, -3.5, 3.5)),
    # with a large one the border is midway between the mean, 4, and half of that one: 4.25 is low
    ("2bit", f32(0.25, 4.25, -10, -1.5), "00000040 00002041 b0 000000", f32(2, 2, -10, -2)),
    # of one magnitude all are low, and high is none of its own
    ("2bit", f32(-2, 2), "00000040 00000040 02 000000", f32(-2, 2)),
    ("2bit", f32(0.1), "cdcccc3d cdcccc3d 00 000000", f32(0.1)),
    # their mean is rounded down; the border is the least, else all were high
    ("2bit", from_bits(*[0x3F80_0007] * 5), "0600803f 0600803f 00000000", from_bits(*[0x3F80_0006] * 5)),
    # a zero is low and not negative; where low is nothing it stays zero, as do the small ones
    ("2bit", f32(0, -0.0, -1, 3), "abaaaa3e 00004040 60 000000", f32(1 / 3, 1 / 3, -1 / 3, 3)),
    ("2bit", f32(0, -0.0, 0), "00000000 00000000 00 000000", f32(0, 0, 0)),
    ("2bit", f32(-(2.0**-127), -1, 1), "00000000 0000803f 1c 000000", f32(0, -1, 1)),
    # two magnitudes of 2^-126, the smallest there is; one bit less and there is nothing
    ("2bit", f32(2.0**-126, -(2.0**-126)), "00008000 00008000 08 000000", f32(2.0**-126, -(2.0**-126))),
    ("2bit", from_bits(0x007F_FFFF, 0x8000_0001), "00000000 00000000 00 000000", f32(0, 0)),
    ("2bit", f32(3e38, -3e38), "00007e5f 00007e5f 08 000000", f32(LIMIT, -LIMIT)),
]


@pytest.mark.parametrize(("name", "values", "expected", "decoded"), GOLDEN)
def test_encode_gives_the_golden_bytes(name: str, values: F32, expected: str, decoded: F32) -> None:
    data = encode(name, values).tobytes()
    assert data.hex() == expected.replace(" ", "")
    assert decode(name, data, values.size).tobytes() == decoded.tobytes()


def test_int8_ragged_tail_has_a_scale_of_its_own() -> None:
    values = np.concatenate([np.zeros(4096, np.float32), f32(2.54, -1.0, 0.01)])
    data = codec("int8").encode(values).tobytes()
    assert len(data) == 2 * 4 + 4099 + 1
    assert data[:8].hex() == "00000000" + "0ad7a33c"
    assert data[8 + 4096 :].hex() == "7fce" + "00" + "00"  # 0.01 ÷ 0.02 in fp32 lies just below the tie
    assert decode("int8", data, 4099)[-3:].tolist() == [float(np.float32(0.02) * np.float32(127)), -1.0, 0.0]


# Of the encoded and the decoded bytes; made with the plain Python codecs below.
GOLDEN_HASHES = {
    "fp32": ("94cef1fe1fa28b7b", "94cef1fe1fa28b7b"),
    "bf16": ("550b19b335764394", "eaea6c9a69381b34"),
    "int8": ("396620116b1c1c0b", "679386a7656ec2c8"),
    "int4": ("c9f80509334d4946", "b0f5aa27c1eb12ae"),
    "2bit": ("dbcc62e8ae58d652", "2834bce5536162e6"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_long_pattern_has_the_golden_hash_on_every_machine(name: str) -> None:
    values = np.concatenate([pattern(9001, 2.0**-30), pattern(5000, 2.0**-149), pattern(1, 1.0)])
    data = encode(name, values).tobytes()
    decoded = decode(name, data, values.size).tobytes()
    hashes = tuple(blake3(item).hexdigest()[:16] for item in (data, decoded))
    assert hashes == GOLDEN_HASHES[name]


# --- against plain Python ---


def plain_int8(values: list[float]) -> tuple[bytes, list[float]]:
    scales, quantised, decoded = b"", b"", []
    for start in range(0, len(values), 4096):
        block = values[start : start + 4096]
        scale = rounded(max(abs(v) for v in block) / 127)
        scale = 0.0 if scale < 2.0**-126 else scale
        numbers = [max(-127, min(127, round(rounded(v / scale)))) if scale else 0 for v in block]
        scales += struct.pack("<f", scale)
        quantised += struct.pack(f"<{len(block)}b", *numbers)
        decoded += [rounded(q * scale) for q in numbers]
    return scales + quantised + bytes(-len(quantised) % 4), decoded


def plain_dither(n: int) -> list[float]:
    """u of the first n values of DITHER, from the definition."""
    hasher = blake3(b"shoal/dither\0")
    for part in (bytes(range(32)), b"contribution", b"golden", (3).to_bytes(8, "little")):
        hasher.update(len(part).to_bytes(8, "little") + part)
    stream = blake3(b"", key=hasher.digest()).digest(length=2 * n)
    return [(k + 0.5) / 65536 for k in struct.unpack(f"<{n}H", stream)]


def plain_int4(values: list[float]) -> tuple[bytes, list[float]]:
    scales, nibbles, decoded, uniform = b"", [], [], plain_dither(len(values))
    for start in range(0, len(values), 128):
        block = [max(-126.875 * 2.0**57, min(126.875 * 2.0**57, v)) for v in values[start : start + 128]]
        scale = rounded(max(abs(v) for v in block) / 7)
        bits = struct.unpack("<I", struct.pack("<f", scale))[0] if scale >= 2.0**-126 else 0
        half = -(-bits // 65536)
        scale = struct.unpack("<f", struct.pack("<I", half << 16))[0]
        us = uniform[start : start + 128]
        numbers = [math.floor(rounded(rounded(v / scale) + u)) if scale else 0 for v, u in zip(block, us, strict=True)]
        assert max(map(abs, numbers)) <= 7
        scales += struct.pack("<H", half)
        nibbles += [number & 15 for number in numbers]
        decoded += [rounded(number * scale) for number in numbers]
    nibbles += [0] * (len(nibbles) % 2)
    data = scales + bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return data + bytes(-len(data) % 4), decoded


def plain_2bit(values: list[float]) -> tuple[bytes, list[float]]:
    data, decoded = b"", []
    for start in range(0, len(values), 512):
        block = [max(-LIMIT, min(LIMIT, v)) for v in values[start : start + 512]]
        sizes = [abs(v) for v in block]
        mean = plain_mean(sizes, len(sizes))
        border = max(mean, rounded(mean + max(sizes) / 2) / 2, min(sizes))
        levels, codes, more = plain_two_bit(block, border)
        data += levels + codes
        decoded += more
    return data + bytes(-len(data) % 4), decoded


def plain_bf16(value: float) -> float:
    """Nearest bf16, by choosing among the neighbours."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, high = bits & 0xFFFF_0000, (bits & 0xFFFF_0000) + 0x1_0000
    below, above = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, high))
    distance = abs(value - below) - abs(above - value)
    take_high = distance > 0 or (distance == 0 and low >> 16 & 1)
    return float(above if take_high else below)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-LIMIT, max_value=LIMIT)


Plain = Callable[[list[float]], tuple[bytes, list[float]]]
BLOCKWISE = pytest.mark.parametrize(
    ("name", "plain"), [("int8", plain_int8), ("int4", plain_int4), ("2bit", plain_2bit)]
)
near_the_smallest_scale = st.floats(width=32, min_value=-(2.0**-118), max_value=2.0**-118)


@BLOCKWISE
@settings(max_examples=200)
@given(values=st.lists(floats, min_size=1, max_size=40) | st.lists(near_the_smallest_scale, min_size=1, max_size=40))
def test_blocks_agree_with_plain_python(name: str, plain: Plain, values: list[float]) -> None:
    data, decoded = plain(values)
    assert encode(name, f32(*values)).tobytes() == data
    assert decode(name, data, len(values)).tobytes() == f32(*decoded).tobytes()


@BLOCKWISE
def test_many_blocks_agree_with_plain_python(name: str, plain: Plain) -> None:
    values = np.concatenate([pattern(4096, 2.0**-20), pattern(4096, 2.0**-140), pattern(77, 3.1e-9)])
    data, decoded = plain(values.tolist())
    assert encode(name, values).tobytes() == data
    assert decode(name, data, values.size).tolist() == decoded


@pytest.mark.parametrize(("name", "largest", "size"), [("int8", 127, 4096), ("int4", 7, 128)])
def test_no_peak_of_a_block_gets_past_the_largest_number(name: str, largest: int, size: int) -> None:
    # A peak per block, around `largest` times various scales. Past it, a number would be refused or change its sign.
    scales = (np.arange(500, dtype=np.uint32) * np.uint32(33_547) + np.uint32(0x3F80_0000)).view(np.float32)
    peaks = np.multiply(scales, np.float32(largest))
    peaks = np.concatenate([np.nextafter(peaks, f32(np.inf)), peaks, np.nextafter(peaks, f32(0))])
    for sign in (1, -1):
        values = np.repeat(np.multiply(peaks, np.float32(sign)), size)
        ratios = np.divide(decode(name, encode(name, values).tobytes(), values.size), values)
        assert 6 / 7 < ratios.min() <= ratios.max() < 1.008


@settings(max_examples=200)
@given(st.lists(floats, min_size=1, max_size=40))
def test_bf16_agrees_with_plain_python(values: list[float]) -> None:
    data = encode("bf16", f32(*values)).tobytes()
    assert decode("bf16", data, len(values)).tolist() == [plain_bf16(v) for v in values]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(values=st.lists(floats, min_size=1, max_size=40))
def test_decoded_value_is_within_a_step_of_what_was_encoded(name: str, values: list[float]) -> None:
    given_values = f32(*values).astype(np.float64)
    decoded = decode(name, encode(name, f32(*values)).tobytes(), len(values)).astype(np.float64)
    error, peak = np.abs(decoded - given_values), np.abs(given_values).max()
    if name == "fp32":
        assert (error == 0).all()
    elif name == "bf16":
        assert (error <= np.maximum(np.abs(given_values) * 2.0**-8, 2.0**-134)).all()
    elif name == "int8":
        assert (error <= max(peak / 127 * 0.50001, 127 * 2.0**-126 * (peak < 2.0**-118))).all()
    elif name == "2bit":
        # Never more than with one magnitude, the mean, in place of two.
        rounding = len(values) * max(peak * 2.0**-20, 2.0**-126) ** 2 + peak**2 * 2.0**-18
        assert (error <= peak).all()
        assert (error**2).sum() <= (given_values**2).sum() - np.abs(given_values).sum() ** 2 / len(values) + rounding
    else:
        assert (error <= max(peak / 7 * 1.00782, 7 * 2.0**-126 * (peak < 2.0**-122))).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 4095, 4096, 4097, 12289])
def test_encoded_bytes_is_what_is_written_and_a_multiple_of_four(name: str, n: int) -> None:
    how = codec(name)
    out = np.full(how.encoded_bytes(n), 0xAA, np.uint8)
    assert encode(name, pattern(n, 2.0**-25), out) is out
    assert out.tobytes() == encode(name, pattern(n, 2.0**-25)).tobytes()
    assert out.size % 4 == 0


# --- what is refused ---

BAD = [
    ("fp32", 2, "0000803f", "bytes"),
    ("fp32", 1, "0000c07f", "NaN"),
    ("fp32", 1, "0100807f", "NaN"),  # a signalling one
    ("fp32", 1, "000080ff", "NaN"),
    ("fp32", 2, "0000803f 01007e5f", "limit"),
    ("fp32", 2, "0000803f 01007edf", "limit"),
    ("bf16", 2, "803f c07f", "NaN"),
    ("bf16", 2, "803f 80ff", "NaN"),
    ("bf16", 2, "803f 7fdf", "limit"),
    ("bf16", 1, "803f 0100", "padding"),
    ("bf16", 1, "803f", "bytes"),
    ("int8", 1, "0000803f 01", "bytes"),
    ("int8", 1, "0000c07f 01000000", "scale"),
    ("int8", 1, "0000807f 01000000", "scale"),
    ("int8", 1, "000080bf 01000000", "scale"),
    ("int8", 1, "00000080 01000000", "scale"),  # minus zero
    ("int8", 1, "ffff7f00 01000000", "scale"),  # subnormal
    ("int8", 1, "0100005c 01000000", "scale"),  # above 2^57
    ("int8", 1, "0000803f 80000000", "-128"),
    ("int8", 1, "0000803f 01000001", "padding"),
    ("int4", 1, "803f 01", "bytes"),
    ("int4", 1, "c07f 01 00", "scale"),
    ("int4", 1, "807f 01 00", "scale"),
    ("int4", 1, "80bf 01 00", "scale"),
    ("int4", 1, "0080 01 00", "scale"),  # minus zero
    ("int4", 1, "7f00 01 00", "scale"),  # subnormal
    ("int4", 1, "125e 01 00", "scale"),  # above 18.125 × 2^57
    ("int4", 2, "803f 08 00", "-8"),
    ("int4", 2, "803f 80 00", "-8"),
    ("int4", 1, "803f 11 00", "padding"),  # the nibble beside the last value
    ("int4", 2, "803f 11 01", "padding"),
    ("2bit", 1, "0000803f 00008040 00", "bytes"),
    ("2bit", 2, "00008040 0000803f 06 000000", "order"),
    ("2bit", 2, "000080bf 00008040 06 000000", "negative"),
    ("2bit", 2, "0000803f 000080c0 06 000000", "negative"),
    ("2bit", 2, "00000080 00008040 06 000000", "negative"),  # minus zero
    ("2bit", 2, "0000c07f 0000c07f 06 000000", "finite"),
    ("2bit", 2, "0000803f 0000807f 06 000000", "finite"),
    ("2bit", 2, "0000803f 01007e5f 06 000000", "finite"),  # beyond the limit
    ("2bit", 2, "ffff7f00 00008040 06 000000", "subnormal"),
    ("2bit", 2, "00000000 00008040 06 000000", "zero"),  # a negative zero
    ("2bit", 2, "00000000 00000000 04 000000", "zero"),  # a high one
    ("2bit", 2, "0000803f 00008040 16 000000", "padding"),  # a third value
    ("2bit", 2, "0000803f 00008040 06 010000", "padding"),
]


@pytest.mark.parametrize(("name", "n", "data", "why"), BAD)
def test_decode_refuses_what_no_encoder_writes(name: str, n: int, data: str, why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        decode(name, bytes.fromhex(data), n)
    with pytest.raises(Undecodable, match=why):
        codec(name).check(bytes.fromhex(data), n)


# --- what callers get wrong ---


def test_codec_unknown_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="fp32, bf16, int8, int4, 2bit"):
        codec("int7")


def test_only_int4_needs_a_dither_and_the_others_ignore_it() -> None:
    assert [name for name in NAMES if codec(name).stochastic] == ["int4"]
    with pytest.raises(LocalError, match="dither"):
        codec("int4").encode(f32(1))
    values = pattern(5000, 1.0)
    for name in set(NAMES) - {"int4"}:
        assert codec(name).encode(values).tobytes() == encode(name, values).tobytes()


def test_encode_takes_only_flat_float32() -> None:
    with pytest.raises(LocalError):
        codec("fp32").encode(np.ones(4, np.float64))  # type: ignore[arg-type]
    with pytest.raises(LocalError):
        codec("fp32").encode(np.ones(4, np.float32), out=np.empty(8, np.uint8))


@pytest.mark.parametrize("n", [1, 300_001])
def test_values_that_lie_where_they_will_be_encoded_are_encoded_there(n: int) -> None:
    out = np.zeros(4 * n, np.uint8)
    values = codec("fp32").in_place(out)
    assert values is not None
    values[:] = pattern(n, 2.0**-20)
    values[-1] = 3e38
    apart = codec("fp32").encode(values.copy())
    assert codec("fp32").encode(values, out) is out
    assert out.tobytes() == apart.tobytes()
    assert values[-1] == LIMIT
    values[0] = np.nan
    with pytest.raises(LocalError, match="NaN"):
        codec("fp32").encode(values, out)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp32"])
def test_bytes_of_other_codecs_are_not_their_values(name: str) -> None:
    assert codec(name).in_place(np.zeros(codec(name).encoded_bytes(64), np.uint8)) is None


def test_check_denormals_catches_a_thread_that_flushes_them() -> None:
    check_denormals()
    caught: list[LocalError] = []

    def flushing() -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormals")
        try:
            check_denormals()
        except LocalError as error:
            caught.append(error)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert len(caught) == 1
    check_denormals()  # this thread is as it was
