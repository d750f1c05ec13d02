"""Values and a dither that are the same on every machine, and the codecs in one line each."""

from __future__ import annotations

import numpy as np

from shoal.collectives.codecs import F32, U8, codec
from shoal.collectives.dither import Dither
from shoal.protocol.identity import PeerId

NAMES = ("fp32", "bf16", "int8", "int4")
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
