"""Golden bytes, an independent scalar codec in Python floats to compare with, and everything decoding refuses."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives.codecs import F32, VALUE_LIMIT, Undecodable, check_denormals, codec
from shoal.protocol.errors import ConfigError, LocalError

NAMES = ("fp32", "bf16", "int8")
LIMIT = float(VALUE_LIMIT)


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def from_bits(*bits: int) -> F32:
    return np.array(bits, np.uint32).view(np.float32)


def decode(name: str, data: bytes, n: int) -> F32:
    out = np.empty(n, np.float32)
    codec(name).decode_into(data, out)
    return out


def pattern(n: int, scale: float) -> F32:
    """Values of many magnitudes that need no random generator: the same on every machine and numpy."""
    mixed = np.arange(1, n + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    signed = (mixed >> np.uint32(8)).astype(np.float32) - np.float32(1 << 23)
    return signed * np.float32(scale)


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
]


@pytest.mark.parametrize(("name", "values", "expected", "decoded"), GOLDEN)
def test_encode_gives_the_golden_bytes(name: str, values: F32, expected: str, decoded: F32) -> None:
    data = codec(name).encode(values).tobytes()
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
}


@pytest.mark.parametrize("name", NAMES)
def test_a_long_pattern_has_the_golden_hash_on_every_machine(name: str) -> None:
    values = np.concatenate([pattern(9001, 2.0**-30), pattern(5000, 2.0**-149), pattern(1, 1.0)])
    data = codec(name).encode(values).tobytes()
    decoded = decode(name, data, values.size).tobytes()
    hashes = tuple(blake3(item).hexdigest()[:16] for item in (data, decoded))
    assert hashes == GOLDEN_HASHES[name]


# --- against plain Python ---


def rounded(value: float) -> float:
    """A double rounded to fp32. For one ÷ or × of two fp32 numbers the detour through a double changes nothing."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


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


def plain_bf16(value: float) -> float:
    """Nearest bf16, by choosing among the neighbours."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, high = bits & 0xFFFF_0000, (bits & 0xFFFF_0000) + 0x1_0000
    below, above = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, high))
    distance = abs(value - below) - abs(above - value)
    take_high = distance > 0 or (distance == 0 and low >> 16 & 1)
    return float(above if take_high else below)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-LIMIT, max_value=LIMIT)


@settings(max_examples=200, deadline=None)
@given(st.lists(floats, min_size=1, max_size=40))
def test_int8_agrees_with_plain_python(values: list[float]) -> None:
    data, decoded = plain_int8(values)
    assert codec("int8").encode(f32(*values)).tobytes() == data
    assert decode("int8", data, len(values)).tolist() == decoded


def test_int8_agrees_with_plain_python_over_many_blocks() -> None:
    values = np.concatenate([pattern(4096, 2.0**-20), pattern(4096, 2.0**-140), pattern(77, 3.1e-9)])
    data, decoded = plain_int8(values.tolist())
    assert codec("int8").encode(values).tobytes() == data
    assert decode("int8", data, values.size).tolist() == decoded


@settings(max_examples=200, deadline=None)
@given(st.lists(floats, min_size=1, max_size=40))
def test_bf16_agrees_with_plain_python(values: list[float]) -> None:
    data = codec("bf16").encode(f32(*values)).tobytes()
    assert decode("bf16", data, len(values)).tolist() == [plain_bf16(v) for v in values]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=40))
def test_encoding_what_was_decoded_changes_nothing_more(name: str, values: list[float]) -> None:
    once = decode(name, codec(name).encode(f32(*values)).tobytes(), len(values))
    again = decode(name, codec(name).encode(once).tobytes(), len(values))
    if name == "int8":  # the scale is derived again and may differ in its last bit
        np.testing.assert_allclose(again, once, rtol=3e-7)
    else:
        assert again.tobytes() == once.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 4095, 4096, 4097, 12289])
def test_encoded_bytes_is_what_is_written_and_a_multiple_of_four(name: str, n: int) -> None:
    how = codec(name)
    out = np.full(how.encoded_bytes(n), 0xAA, np.uint8)
    assert how.encode(pattern(n, 2.0**-25), out=out) is out
    assert out.tobytes() == how.encode(pattern(n, 2.0**-25)).tobytes()
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
]


@pytest.mark.parametrize(("name", "n", "data", "why"), BAD)
def test_decode_refuses_what_no_encoder_writes(name: str, n: int, data: str, why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        decode(name, bytes.fromhex(data), n)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.data())
def test_decode_of_any_bytes_refuses_or_gives_finite_values(name: str, n: int, data: st.DataObject) -> None:
    size = codec(name).encoded_bytes(n)
    try:
        values = decode(name, data.draw(st.binary(min_size=size, max_size=size)), n)
    except Undecodable:
        return
    assert np.abs(values).max() <= VALUE_LIMIT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encode_of_a_diverged_update_is_our_error(name: str, bad: float) -> None:
    values = np.ones(5000, np.float32)
    values[4999] = bad
    with pytest.raises(LocalError, match="diverged"):
        codec(name).encode(values)


def test_codec_unknown_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="fp32, bf16, int8"):
        codec("int7")


def test_encode_takes_only_flat_float32() -> None:
    with pytest.raises(LocalError):
        codec("fp32").encode(np.ones(4, np.float64))  # type: ignore[arg-type]
    with pytest.raises(LocalError):
        codec("fp32").encode(np.ones(4, np.float32), out=np.empty(8, np.uint8))


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
