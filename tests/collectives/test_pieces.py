from __future__ import annotations

import random

import pytest

from shoal.collectives.pieces import PIECE_LIMIT, Pieces
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId

SENDER = PeerId("sender")


def test_a_single_piece_is_not_copied() -> None:
    data = bytearray(b"abcd")
    pieces = Pieces(4, SENDER)
    assert pieces.add(0, memoryview(data))
    data[0] = ord("x")
    assert pieces.joined().tobytes() == b"xbcd"


@pytest.mark.parametrize("seed", range(50))
def test_pieces_in_any_order_with_any_overlap_give_the_payload(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 60)
    payload, pieces, seen = bytes(range(size)), Pieces(size, SENDER), set[int]()
    while len(seen) < size:
        start, stop = sorted((rng.randrange(size), rng.randrange(size)))
        stop += 1
        assert pieces.wants(start, stop - start) == bool(set(range(start, stop)) - seen)
        seen |= set(range(start, stop))
        assert pieces.add(start, memoryview(payload[start:stop])) == (len(seen) == size)
    assert pieces.joined().tobytes() == payload


def test_the_first_delivery_of_a_byte_stands() -> None:
    pieces = Pieces(4, SENDER)
    pieces.add(1, memoryview(b"bc"))
    assert pieces.add(0, memoryview(b"AXXD"))
    assert pieces.joined().tobytes() == b"AbcD"


def test_single_bytes_are_refused_before_they_cost_memory() -> None:
    pieces = Pieces(10**6, SENDER)
    for i in range(PIECE_LIMIT):
        pieces.add(2 * i, memoryview(b"x"))
    with pytest.raises(RemoteError, match="pieces") as caught:
        pieces.add(2 * PIECE_LIMIT, memoryview(b"x"))
    assert caught.value.peer == SENDER
    assert pieces.wants(2 * PIECE_LIMIT, 1)
