"""The image of a policy in bf16, chunk by chunk, and what changed in it since another: what a sampler needs.

A sampler draws from a policy in bf16, and small steps leave most of its bf16 values as they are. The image of a chunk
has each value of the anchor as bf16, rounded to nearest even, two bytes a value; the certified digest of a state that
is `imaged` covers the hashes of these chunks (`state`), so who has only the image can prove whose it is. A changed
chunk travels as the shortest of three; all numbers are little-endian, bits go from the lowest of a byte to the highest:

    u1 0                                                              the chunk is as it was
    u1 1, the image of the chunk                                      it is told whole
    u1 2, u4 count, u1 low bits, u4 bytes, gaps; u1 low bits, steps    `count` of its values are others now

A gap is the number of unchanged values before a changed one. A step is by how much that one moved among all bf16 values
in their order (−0 just below +0), as a zigzag number: 1 is the next lower one, 2 the next higher. It wraps around, so
that there is one for each pair. What is written is one less, since there is no step of 0. Gaps and steps are written
by Rice: of each number the low bits, one after the other, and zero bits up to a whole byte; then for each number as
many zero bits as its high part, and a one; zero bits up to a whole byte.

So a small update costs a bit or two for each step and the gap between two changes: at a share p of changed values about
1.6 − log2 p bits. Source of the observation: PULSE, arXiv 2602.03839. The code: R. F. Rice, JPL 79-22.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.memory import F32
from shoal.collectives.spans import Undecodable

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]

VALUE_BYTES: Final = 2
SAME, WHOLE, CHANGES = 0, 1, 2
LOW_BITS_LIMIT: Final = 17
"""Of a number: gaps are shorter than a chunk, whose most values need 18 bits, and a higher part costs a bit or two."""
_SIGN: Final = np.uint16(0x8000)
_HEAD: Final = struct.Struct("<BIBI")


def image_of(values: F32) -> U8:
    """Image (2n,) uint8 of values (n,) float32, whatever they are: what is no number stays none."""
    bits = values.view(np.uint32)
    # Round half to even: add just under half of what is cut off, and one more if the kept part is odd.
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    not_numbers = np.isnan(values)
    if not_numbers.any():  # the sum may wrap around, or come to infinity
        rounded[not_numbers] = bits[not_numbers] >> np.uint32(16) | np.uint32(0x40)
    return rounded.astype("<u2").view(np.uint8)


def put_values(image: U8, out: F32) -> None:
    """Write the values that an image (2n,) uint8 has into `out`, (n,) float32."""
    bits = out.view(np.uint32)
    np.copyto(bits, image.view("<u2"))
    np.left_shift(bits, np.uint32(16), out=bits)


def changes_limit_bytes(n: int) -> int:
    """Bytes that changes of a chunk of `n` values take at most: that it is told whole."""
    return 1 + VALUE_BYTES * n


def encode_changes(before: U8, after: U8, n: int) -> bytes:
    """Write what makes of the image `before` of a chunk of `n` values the image `after`; the shortest form."""
    old, new = _halves(before, n), _halves(after, n)
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return bytes([SAME])
    told = _told(changed, old[changed], new[changed])
    return told if len(told) <= after.size else bytes([WHOLE]) + after.tobytes()


def apply_changes(before: U8, told: bytes, n: int) -> U8:
    """Return the image of a chunk of `n` values that was `before`, after these changes.

    It is whatever they say: the certified digest tells whether it is right. Raises Undecodable for bytes that no
    encoder writes; takes no more memory than some 40 bytes a value, whatever they say.
    """
    old = _halves(before, n)
    form = told[0] if told else -1
    if form == SAME and len(told) == 1:
        return before.copy()
    if form == WHOLE and len(told) == changes_limit_bytes(n):
        return np.frombuffer(told, np.uint8, offset=1).copy()
    if form != CHANGES or len(told) <= _HEAD.size or len(told) >= changes_limit_bytes(n):
        raise Undecodable(f"{len(told)} bytes that are no change of a chunk of {n} values")
    _, count, low_bits, gap_bytes = _HEAD.unpack_from(told)
    steps_at = _HEAD.size + gap_bytes
    if not 0 < count <= n or steps_at >= len(told):
        raise Undecodable("a change of no values, of more than there are, or without its steps")
    gaps = _read_rice(told[_HEAD.size : steps_at], count, low_bits)
    steps = _read_rice(told[steps_at + 1 :], count, told[steps_at]) + 1
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= n or steps.max() >= 1 << 16:
        raise Undecodable("a change beyond the chunk, or a step beyond all bf16 values")
    after = before.copy()
    _halves(after, n)[places] = _patterns(_ordered(old[places]) + _unzigzag(steps))
    return after


def _told(changed: Numbers, old: U16, new: U16) -> bytes:
    gaps = np.diff(changed, prepend=-1) - 1
    steps = _zigzag(_ordered(new) - _ordered(old)) - 1
    gap_bits, step_bits = _best_low_bits(gaps), _best_low_bits(steps)
    written = _write_rice(gaps, gap_bits)
    head = _HEAD.pack(CHANGES, changed.size, gap_bits, len(written))
    return b"".join((head, written, bytes([step_bits]), _write_rice(steps, step_bits)))


def _halves(image: U8, n: int) -> U16:
    return image[: 2 * n].view("<u2")


# --- steps: patterns in their order, and zigzag ---


def _ordered(patterns: U16) -> U16:
    """Rank of each bf16 among all of them, as their values are."""
    return np.where(patterns & _SIGN, ~patterns, patterns | _SIGN)


def _patterns(ordered: U16) -> U16:
    return np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)


def _zigzag(steps: U16) -> Numbers:
    signed = steps.view(np.int16).astype(np.int64)
    return np.where(signed < 0, -2 * signed - 1, 2 * signed)


def _unzigzag(numbers: Numbers) -> U16:
    signed = np.where(numbers & 1, -(numbers + 1) // 2, numbers // 2)
    return signed.astype(np.int16).view(np.uint16)


# --- Rice's code ---


def _best_low_bits(numbers: Numbers) -> int:
    lengths = [numbers.size * low + int((numbers >> low).sum()) for low in range(LOW_BITS_LIMIT + 1)]
    return int(np.argmin(lengths))


def _write_rice(numbers: Numbers, low_bits: int) -> bytes:
    low = (numbers[:, None] >> np.arange(low_bits)) & 1
    ones = np.cumsum((numbers >> low_bits) + 1) - 1
    high = np.zeros(int(ones[-1]) + 1, np.uint8)
    high[ones] = 1
    return b"".join(np.packbits(bits, bitorder="little").tobytes() for bits in (low.astype(np.uint8).ravel(), high))


def _read_rice(data: bytes, count: int, low_bits: int) -> Numbers:
    low_bytes = -(-count * low_bits // 8)
    if low_bits > LOW_BITS_LIMIT or low_bytes >= len(data):
        raise Undecodable("numbers by Rice that are cut off")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    low, high = bits[: count * low_bits].reshape(count, low_bits), bits[8 * low_bytes :]
    ones = np.flatnonzero(high)
    if ones.size != count or bits[count * low_bits : 8 * low_bytes].any() or high.size - ones[-1] > 8:
        raise Undecodable("another number of numbers by Rice than was said, or bits left over")
    return ((np.diff(ones, prepend=-1) - 1) << low_bits) + low @ (1 << np.arange(low_bits, dtype=np.int64))
