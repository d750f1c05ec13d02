"""Rounding that is right in the mean: by chance in int4, to the nearest in int8. Chance is the same in every run."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.codecs import F32, codec
from shoal.collectives.dither import Dither
from shoal.protocol.identity import PeerId
from tests.collectives.encodings import decode, f32

DITHER = Dither(bytes(32), "contribution", PeerId("unbiased"))
COUNT = 1 << 21


def decoded(values: F32, chunk: int = 0) -> F32:
    data = codec("int4").encode(values, dither=DITHER.chunk(chunk))
    return decode("int4", data.tobytes(), values.size)


# With eight bits of chance 1/512 and 3/4096 would be out by more than the noise.
@pytest.mark.parametrize("value", [0.5, 1 / 3, 0.1, 0.9, 1 / 512, 3 / 4096, -1 / 3, -0.001, -6.7, 6.25, 6.999])
def test_int4_is_right_in_the_mean_for_any_fraction(value: float) -> None:
    values = np.full(COUNT, value, np.float32)
    values[::128] = 7  # so that all scales are 1
    out = decoded(values).reshape(-1, 128)
    assert (out[:, 0] == 7).all()
    error = out[:, 1:].astype(np.float64) - float(np.float32(value))
    fraction = value % 1
    deviation = np.sqrt(fraction * (1 - fraction) / error.size)
    assert abs(error.mean()) < 4 * deviation
    assert set(np.unique(out[:, 1:])) == {np.floor(value), np.ceil(value)}


def test_int4_is_right_in_the_mean_where_scales_are_rounded() -> None:
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    out = decoded(values)
    peaks = np.abs(values).reshape(-1, 128).max(axis=1)
    steps = np.repeat(peaks.astype(np.float64) / 7, 128)
    error = (out.astype(np.float64) - values) / steps * np.sign(values)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(COUNT)
    # The peaks by themselves: a scale rounded down would cut them off.
    at_peak = error.reshape(-1, 128)[np.abs(values).reshape(-1, 128) == peaks[:, None]]
    assert at_peak.size >= COUNT // 128
    assert abs(at_peak.mean()) < 4 * at_peak.std() / np.sqrt(at_peak.size)


def test_int4_whole_numbers_stay_whatever_the_dither() -> None:
    values = np.tile(np.arange(-7, 8, dtype=np.float32), 4096)
    scaled = np.multiply(values, np.float32(0.375))
    for chunk in range(4):
        assert np.array_equal(decoded(values, chunk), values)
        assert np.array_equal(decoded(scaled, chunk), scaled)


@pytest.mark.parametrize("side", [2.0**-18, -(2.0**-18)])
def test_int4_what_is_all_but_whole_becomes_it_from_either_side(side: float) -> None:
    whole = np.tile(f32(-6, -1, 0, 1, 6), COUNT // 5)
    whole[::128] = 7  # so that all scales are 1
    values = np.where(whole == 7, whole, np.add(whole, np.float32(side)))
    assert np.array_equal(decoded(values), whole)


def test_int4_takes_at_most_four_and_a_quarter_bits() -> None:
    assert codec("int4").encoded_bytes(1 << 18) * 8 / (1 << 18) == 4.125


def test_int8_to_nearest_even_is_right_in_the_mean_on_uniform_values() -> None:
    values = (np.random.default_rng(1).random(COUNT) * 254 - 127).astype(np.float32)
    values[::4096] = 127  # so that all scales are 1
    data = codec("int8").encode(values)
    error = decode("int8", data.tobytes(), COUNT).astype(np.float64) - values
    assert abs(error.mean()) < 4 * np.sqrt(1 / 12 / COUNT)
    ties = np.arange(-126.5, 127, dtype=np.float32)
    data = codec("int8").encode(np.concatenate([f32(127), ties]))
    assert (decode("int8", data.tobytes(), ties.size + 1)[1:] - ties).mean() == 0


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("scale", [1.0, 3e-5, 2.0**-110])
def test_rounding_to_the_nearest_is_right_in_the_mean_at_any_scale(name: str, scale: float) -> None:
    """All values are positive, so that rounding towards zero, or away from it, would show."""
    values = np.multiply(np.random.default_rng(2).random(COUNT).astype(np.float32), np.float32(scale))
    out = decode(name, codec(name).encode(values).tobytes(), COUNT)
    error = (out.astype(np.float64) - values) / scale
    assert 0 < np.abs(error).max() < 0.51 / 127
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(COUNT)
