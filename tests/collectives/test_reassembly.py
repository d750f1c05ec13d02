"""A payload that grows in place: whatever lanes do with memory that was lent to them, it is what was delivered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.collectives import reassembly as reassembly
from shoal.collectives.codecs import U8
from shoal.collectives.reassembly import ReassemblyBuffer, fresh
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId

SENDER = PeerId("sender")


def lend(pieces: ReassemblyBuffer, offset: int, length: int) -> memoryview:
    region = pieces.region(offset, length)
    assert region is not None
    return region


def bring(pieces: ReassemblyBuffer, offset: int, data: bytes) -> bool:
    """What a lane does with a frame."""
    region = lend(pieces, offset, len(data))
    region[:] = data
    return pieces.add(offset, region)


def share_memory(one: memoryview, other: memoryview | U8) -> bool:
    return np.shares_memory(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def test_payload_is_received_in_place_in_memory_asked_for_once() -> None:
    asked: list[int] = []

    def allocate(size: int) -> U8:
        asked.append(size)
        return fresh(size)

    pieces = ReassemblyBuffer(6, SENDER, allocate)
    assert asked == []
    first, second = lend(pieces, 0, 4), lend(pieces, 4, 2)
    second[:] = b"ef"
    assert not pieces.add(4, second)
    first[:] = b"abcd"
    assert pieces.add(0, first)
    assert pieces.joined().tobytes() == b"abcdef"
    assert share_memory(first, pieces.joined())
    assert share_memory(second, pieces.joined())
    assert asked == [6]


def test_bytes_that_are_there_are_not_wanted_again() -> None:
    pieces = ReassemblyBuffer(10, SENDER)
    bring(pieces, 2, b"cdef")
    assert pieces.region(2, 4) is None
    assert pieces.region(3, 2) is None
    assert pieces.region(1, 4) is not None
    assert pieces.region(5, 2) is not None


def test_first_delivery_of_a_byte_stands() -> None:
    pieces = ReassemblyBuffer(4, SENDER)
    bring(pieces, 1, b"bc")
    assert bring(pieces, 0, b"AXXD")
    assert pieces.joined().tobytes() == b"AbcD"


@pytest.mark.parametrize(("offset", "length"), [(0, 6), (2, 2), (0, 3), (5, 5), (0, 10)])
def test_memory_that_is_lent_is_not_lent_again(offset: int, length: int) -> None:
    pieces = ReassemblyBuffer(10, SENDER)
    first = lend(pieces, 2, 4)
    second = lend(pieces, offset, length)
    assert not share_memory(first, second)
    assert len(second) == length


def test_lane_that_hangs_cannot_touch_what_another_delivered() -> None:
    pieces = ReassemblyBuffer(10, SENDER)
    hanging = lend(pieces, 0, 6)
    bring(pieces, 4, b"efgh")
    hanging[:] = b"??????"
    bring(pieces, 0, b"abcd")
    hanging[:] = b"!!!!!!"
    assert bring(pieces, 8, b"ij")
    hanging[:] = b"......"
    assert pieces.joined().tobytes() == b"abcdefghij"


def test_what_a_slow_lane_brings_counts_where_it_is_still_missing() -> None:
    pieces = ReassemblyBuffer(10, SENDER)
    slow = lend(pieces, 0, 8)
    bring(pieces, 2, b"cd")
    slow[:] = b"abXXefgh"
    assert not pieces.add(0, slow)
    assert bring(pieces, 8, b"ij")
    assert pieces.joined().tobytes() == b"abcdefghij"


def test_piece_that_is_said_to_be_there_twice_counts_once() -> None:
    pieces = ReassemblyBuffer(4, SENDER)
    region = lend(pieces, 0, 2)
    region[:] = b"ab"
    assert not pieces.add(0, region)
    assert not pieces.add(0, region)
    assert bring(pieces, 2, b"cd")
    assert pieces.joined().tobytes() == b"abcd"


@dataclass
class Lane:
    """A lane in the middle of a frame; one that fails writes what does not authenticate, and never says a word."""

    offset: int
    region: memoryview
    fails: bool


@dataclass
class Lanes:
    """Any number of lanes that bring overlapping pieces of one payload, at random speeds; some of them fail."""

    seed: int
    busy: list[Lane] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def run(self) -> None:
        rng = random.Random(self.seed)
        size = rng.randrange(1, 60)
        payload, pieces, complete = bytes(rng.randbytes(size)), ReassemblyBuffer(size, SENDER), False
        while not complete:
            if len(self.busy) < 5 and rng.random() < 0.6:
                self._begin(pieces, size, rng)
            elif self.busy:
                lane = self.busy[rng.randrange(len(self.busy))]
                complete = self._go_on(lane, pieces, payload, rng)
        for lane in self.busy:
            lane.region[:] = bytes(len(lane.region))
        assert self.seen == set(range(size))
        assert pieces.joined().tobytes() == payload

    def _begin(self, pieces: ReassemblyBuffer, size: int, rng: random.Random) -> None:
        start, stop = sorted((rng.randrange(size), rng.randrange(size)))
        region = pieces.region(start, stop + 1 - start)
        assert (region is None) == (set(range(start, stop + 1)) <= self.seen)
        if region is not None:
            self.busy.append(Lane(start, region, rng.random() < 0.3))

    def _go_on(self, lane: Lane, pieces: ReassemblyBuffer, payload: bytes, rng: random.Random) -> bool:
        stop = lane.offset + len(lane.region)
        if lane.fails:
            lane.region[:] = rng.randbytes(len(lane.region))
            if rng.random() < 0.5:
                self.busy.remove(lane)
            return False
        lane.region[:] = payload[lane.offset : stop]
        self.busy.remove(lane)
        self.seen |= set(range(lane.offset, stop))
        return pieces.add(lane.offset, lane.region)


def test_lanes_in_any_order_with_any_overlap_and_failure_give_the_payload() -> None:
    for seed in range(1000):
        Lanes(seed).run()


def test_single_bytes_are_refused_before_they_cost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassembly, "PIECE_LIMIT", 64)
    pieces = ReassemblyBuffer(10**6, SENDER)
    for i in range(1, 64):
        bring(pieces, 2 * i, b"x")
    with pytest.raises(RemoteError, match="more than 64 pieces") as caught:
        pieces.region(2 * 64, 1)
    assert caught.value.peer == SENDER
    assert pieces.region(2, 1) is None  # what is there already costs nothing


def test_regions_that_never_come_back_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassembly, "PIECE_LIMIT", 64)
    pieces = ReassemblyBuffer(10**6, SENDER)
    for i in range(63):
        lend(pieces, i, 1)
    with pytest.raises(RemoteError, match="more than 64 pieces"):
        pieces.region(64, 1)
