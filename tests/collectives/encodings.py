"""Values and a dither that are the same on every machine, the codecs in one line each, and two bits in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from shoal.collectives.codecs import DENSE, F32, U8, VALUE_LIMIT, codec
from shoal.collectives.dither import Dither
from shoal.protocol.identity import PeerId

NAMES = DENSE
DITHER = Dither(bytes(range(32)), "contribution", PeerId("golden")).chunk(3)


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def from_bits(*bits: int) -> F32:
    return np.array(bits, np.uint32).view(np.float32)


def encode(name: str, values: F32, out: U8 | None = None) -> U8:
    return codec(name).encode(values, out, dither=DITHER)


def decode(name: str, data: bytes, n: int) -> F32:
    out = np.empty(n, np.float32)
    codec(name).decode_into(data, out)
    return out


def pattern(n: int, scale: float) -> F32:
    """Values of many magnitudes that need no random generator: the same on every machine and numpy."""
    mixed = np.arange(1, n + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    signed = (mixed >> np.uint32(8)).astype(np.float32) - np.float32(1 << 23)
    return signed * np.float32(scale)


# --- plain Python, from the specification ---


def rounded(value: float) -> float:
    """A double rounded to fp32. For one +, ÷ or × of two fp32 numbers the detour through a double changes nothing."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def plain_sum(terms: Sequence[float]) -> float:
    terms = list(terms)
    while len(terms) & (len(terms) - 1):
        terms.append(0.0)
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [rounded(low + high) for low, high in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def plain_mean(terms: Sequence[float], count: int) -> float:
    return rounded(plain_sum(terms) / count)


def plain_two_bit(values: Sequence[float], border: float) -> tuple[bytes, bytes, list[float]]:
    """The two magnitudes of a block, its codes, and what they decode to."""
    sizes = [abs(value) for value in values]
    highs = sum(size > border for size in sizes)
    low = plain_mean([size if size <= border else 0.0 for size in sizes], len(sizes) - highs)
    high = max(low, plain_mean([size if size > border else 0.0 for size in sizes], highs)) if highs else low
    levels = [0.0 if level < 2.0**-126 else min(level, float(VALUE_LIMIT)) for level in (low, high)]
    codes, decoded = [], []
    for value, size in zip(values, sizes, strict=True):
        level = levels[size > border]
        codes.append((size > border) + 2 * (value < 0) if level else 0)
        decoded.append(-level if value < 0 and level else level)
    packed = sum(code << 2 * i for i, code in enumerate(codes)).to_bytes(-(-len(codes) // 4), "little")
    return struct.pack("<ff", *levels), packed, decoded
