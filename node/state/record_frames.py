"""How records stand in a log: in batches, each with one checksum; and what a log that was cut short or damaged tells.

    batch   head ‖ check of head and body (CHECK_BYTES) ‖ body
    head    MAGIC ‖ u64 number of the batch, from 0 ‖ u32 length of the body ‖ check of these (CHECK_BYTES)
    body    of each record: u32 length ‖ record

All is little-endian, and a check is the beginning of a BLAKE3 hash. Release 0.1.0 wrote, and files of one record still
have: u32 length ‖ first 8 bytes of BLAKE3 of the record ‖ record. A log that begins so goes on in batches.

A write that a crash cut short is the last, and lacks bytes at its end, or has zeros where a block of the disk was never
written: nobody acted upon it. Everything else that does not hold is damage: a bit that flipped in whichever place, be
it a length, a number or the last batch; a batch that is missing between two others. What follows the damage is found
again by MAGIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from blake3 import blake3

RECORD_LIMIT_BYTES = 1 << 20  # of a record of a log
BATCH_LIMIT_BYTES = 16 << 20  # of a batch of a log
MAGIC = b"SHB2"
"""Of a batch. As a length it would be far beyond RECORD_LIMIT_BYTES, so no older record begins so."""
CHECK_BYTES = 16
HEAD_BYTES = len(MAGIC) + 8 + 4 + CHECK_BYTES
OLD_CHECK_BYTES = 8
OLD_HEAD_BYTES = 4 + OLD_CHECK_BYTES
BLOCK_BYTES = 512
"""What a disk writes whole or not at all."""
HOLE_MIN_BYTES = 16
"""Zeros at the beginning or end of a batch that may be a block that was not written."""


class Fault(StrEnum):
    """What is wrong with a log."""

    TORN = "cut short"
    DAMAGED = "damaged"


@dataclass(slots=True)
class Reading:
    """What a log says. `good` bytes hold, and have `records`; the batch after them would be number `number`.

    later: records in batches that hold behind what does not.
    """

    records: list[bytes] = field(default_factory=list)
    good: int = 0
    number: int = 0
    fault: Fault | None = None
    later: list[bytes] = field(default_factory=list)


def frame_batch(number: int, records: Sequence[bytes]) -> bytes:
    """These records as the batch of that number."""
    body = b"".join(len(record).to_bytes(4, "little") + record for record in records)
    head = MAGIC + number.to_bytes(8, "little") + len(body).to_bytes(4, "little")
    head += _check(head)
    return head + _check(head, body) + body


def frame_record(record: bytes) -> bytes:
    """A record as it stands in a file of one, and in logs of release 0.1.0."""
    return len(record).to_bytes(4, "little") + blake3(record).digest(OLD_CHECK_BYTES) + record


def read_frames(data: bytes) -> Reading:
    """What a log says whose bytes these are. Never raises."""
    reading, batched = Reading(), False
    while reading.good < len(data):
        at = reading.good
        batch = _batch(data, at)
        if batch is not None and batch.number == reading.number:
            reading.records += batch.records
            reading.good, reading.number, batched = batch.end, reading.number + 1, True
            continue
        record = None if batched else _old_record(data, at)
        if record is None:
            _judge_rest(data, reading, batched)
            break
        reading.records.append(record)
        reading.good = at + OLD_HEAD_BYTES + len(record)
    return reading


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    records: list[bytes]
    end: int


def _check(*parts: bytes) -> bytes:
    return blake3(b"".join(parts)).digest(CHECK_BYTES)


def _head(data: bytes, at: int) -> tuple[int, int] | None:
    """Number and length of the batch that begins there; None if its head does not hold."""
    head = data[at : at + HEAD_BYTES]
    plain, check = head[:-CHECK_BYTES], head[-CHECK_BYTES:]
    if len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC or _check(plain) != check:
        return None
    return int.from_bytes(plain[4:12], "little"), int.from_bytes(plain[12:16], "little")


def _batch(data: bytes, at: int) -> _Batch | None:
    head = _head(data, at)
    if head is None:
        return None
    number, length = head
    begin = at + HEAD_BYTES + CHECK_BYTES
    body = data[begin : begin + length]
    if len(body) < length or _check(data[at : at + HEAD_BYTES], body) != data[at + HEAD_BYTES : begin]:
        return None
    records, place = [], 0
    while place < length:
        size = int.from_bytes(body[place : place + 4], "little")
        records.append(body[place + 4 : place + 4 + size])
        place += 4 + size
    return _Batch(number, records, begin + length)


def _old_record(data: bytes, at: int) -> bytes | None:
    length = int.from_bytes(data[at : at + 4], "little")
    record = data[at + OLD_HEAD_BYTES : at + OLD_HEAD_BYTES + length]
    whole = at + OLD_HEAD_BYTES + length <= len(data) and length <= RECORD_LIMIT_BYTES
    return record if whole and blake3(record).digest(OLD_CHECK_BYTES) == data[at + 4 : at + OLD_HEAD_BYTES] else None


def _judge_rest(data: bytes, reading: Reading, batched: bool) -> None:
    """What the bytes are that do not hold, and what is found behind them."""
    at = reading.good
    reading.later = _batches_after(data, at) or ([] if batched else _old_after(data, at))
    torn = _is_torn_batch(data, at) if batched or data[at : at + 4] == MAGIC else _is_torn_record(data, at)
    torn |= not data[at:].strip(b"\0") or _is_torn_magic(data[at:])
    reading.fault = Fault.TORN if torn and not reading.later else Fault.DAMAGED


def _is_torn_magic(rest: bytes) -> bool:
    return len(rest) < len(MAGIC) and MAGIC.startswith(rest)


def _is_torn_batch(data: bytes, at: int) -> bool:
    """Whether the last batch lacks bytes that were never written."""
    head, size = _head(data, at), len(data) - at
    if size < HEAD_BYTES:
        return True
    cut = head is not None and head[1] <= BATCH_LIMIT_BYTES and size < HEAD_BYTES + CHECK_BYTES + head[1]
    return cut or _has_hole(data, at)


def _is_torn_record(data: bytes, at: int) -> bool:
    """The same of a record of release 0.1.0, whose length has no check: one that fits to the end was whole."""
    length, rest = int.from_bytes(data[at : at + 4], "little"), data[at + OLD_HEAD_BYTES :]
    if len(data) - at < OLD_HEAD_BYTES:
        return True
    whole = blake3(rest).digest(OLD_CHECK_BYTES) == data[at + 4 : at + OLD_HEAD_BYTES]
    return (length <= RECORD_LIMIT_BYTES and len(rest) < length and not whole) or _has_hole(data, at)


def _has_hole(data: bytes, at: int) -> bool:
    """Whether a block of the disk, or what of one is at either end, is all zeros."""
    edges = [at, *range(at - at % BLOCK_BYTES + BLOCK_BYTES, len(data), BLOCK_BYTES), len(data)]
    pieces = (data[begin:end] for begin, end in pairwise(edges))
    return any(len(piece) >= HOLE_MIN_BYTES and not piece.strip(b"\0") for piece in pieces)


def _batches_after(data: bytes, at: int) -> list[bytes]:
    """The records of all batches that hold after `at`."""
    found: list[bytes] = []
    at = data.find(MAGIC, at)
    while at >= 0:
        batch = _batch(data, at)
        if batch is not None:
            found += batch.records
        at = data.find(MAGIC, at + 1 if batch is None else batch.end)
    return found


def _old_after(data: bytes, at: int) -> list[bytes]:
    """The records of release 0.1.0 from the first on that holds after the one at `at`."""
    for begin in range(at + 1, min(len(data) - OLD_HEAD_BYTES, at + OLD_HEAD_BYTES + RECORD_LIMIT_BYTES) + 1):
        record = _old_record(data, begin)
        if record:
            rest = read_frames(data[begin:])
            return rest.records + rest.later
    return []
