"""How valid messages are spoiled: in their bytes, and in their meaning where they are msgpack or JSON.

Everything is drawn from one `random.Random`, so a seed gives the same bytes again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgpack

SIZE_LIMIT_BYTES = 1 << 21
"""A spoiled message may be longer than any decoder takes, but not by much: time is for the many."""
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "a",
    "\x00\x1b[31m",
    "\ud7ff" * 40,
    "9" * 400,
    "12D3KooW" + "1" * 44,
    b"",
    b"\x00",
    b"\xff" * 31,
    b"\xff" * 33,
    b"\x00" * 4096,
    [],
    {},
    [[]],
    {"": None},
)
GIANT_HEADS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 400,
    b"\x81\xa1a" * 200,
    b"[" * 4000,
    b'{"a":' * 1000,
)


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` with one to four faults; `others` are messages to splice with."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = _in_meaning(data, rng) if rng.random() < 0.45 else _in_bytes(data, others, rng)
    return data[:SIZE_LIMIT_BYTES]


def _in_bytes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    spoiled = bytearray(data)
    at = rng.randrange(len(spoiled) + 1)
    kind = rng.randrange(8)
    if kind == 0 and spoiled:
        spoiled[at % len(spoiled)] ^= 1 << rng.randrange(8)
    elif kind == 1 and spoiled:
        spoiled[at % len(spoiled)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 2:
        del spoiled[at:]
    elif kind == 3:
        spoiled[at:at] = rng.randbytes(rng.randrange(1, 17))
    elif kind == 4:
        del spoiled[at : at + rng.randrange(1, 33)]
    elif kind == 5:
        head = rng.choice(GIANT_HEADS)
        spoiled[at : at + len(head) * rng.randrange(2)] = head
    elif kind == 6 and others:
        other = rng.choice(others)
        spoiled[at:] = other[rng.randrange(len(other) + 1) :]
    else:
        spoiled[at:at] = spoiled[at : at + rng.randrange(1, 65)]
    return bytes(spoiled)


def _in_meaning(data: bytes, rng: random.Random) -> bytes:
    """Change one value of a document, or what holds it, and write it again."""
    try:
        if data[:1] in (b"{", b"["):
            document, write = json.loads(data), _write_json
        else:
            document, write = msgpack.unpackb(data, strict_map_key=False), _write_msgpack
        return write(_changed(document, rng))
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.exceptions.UnpackException):
        return data[: rng.randrange(len(data) + 1)]


def _write_msgpack(document: Any) -> bytes:
    packed = msgpack.packb(document, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def _write_json(document: Any) -> bytes:
    return json.dumps(document, default=str).encode("utf-8", "replace")


def _changed(value: Any, rng: random.Random) -> Any:
    """`value` with one change somewhere inside."""
    if not isinstance(value, list | dict) or not value or rng.random() < 0.15:
        return _other(value, rng)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        kind = rng.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value[:at] + [value[at]] * rng.choice((2, 65, 5000)) + value[at + 1 :]
        if kind == 2:
            return value[::-1]
        return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    key = rng.choice(list(value))
    kind = rng.randrange(8)
    if kind == 0:
        return {other: value[other] for other in value if other != key}
    if kind == 1:
        return {**value, "unheard_of": rng.choice(ODD_VALUES)}
    return {**value, key: _changed(value[key], rng)}


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return rng.choice(ODD_VALUES)
    if isinstance(value, int) and rng.random() < 0.6:
        return max(-(2**63), min(2**64 - 1, value + rng.choice((-1, 1, 2**15, -(2**31), 2**32, 2**62))))
    if isinstance(value, bytes | str) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return rng.choice((value[:at], value + value, value[at:], value * 300 if len(value) < 300 else value))
    return rng.choice(ODD_VALUES)
