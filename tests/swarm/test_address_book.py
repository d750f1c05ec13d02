"""The address book: its order, its bounds, and what a damaged file does."""

from __future__ import annotations

import json

import pytest

from shoal.protocol.identity import Identity, PeerId
from shoal.swarm.address_book import ADDRESSES_LIMIT, BOOK_LIMIT_BYTES, BOOK_LIMIT_PEERS, AddressBook

A, B, C, D = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 5))


def at(peer: PeerId, port: int = 4001) -> str:
    return f"/ip4/192.0.2.7/tcp/{port}/p2p/{peer}"


def order(book: AddressBook) -> list[str]:
    return [known.peer for known in book.best()]


def book_of(*peers: PeerId) -> AddressBook:
    book = AddressBook()
    for peer in peers:
        book.linked(peer, [at(peer)])
    return book


def test_best_is_who_failed_least_then_who_was_linked_last() -> None:
    book = book_of(A, B, C)
    assert order(book) == [C, B, A]
    book.failed(C)
    assert order(book) == [B, A, C]
    book.failed(B)
    book.failed(B)
    assert order(book) == [A, C, B]
    book.linked(B, [at(B)])
    assert order(book) == [B, A, C]


def test_book_survives_its_file_in_the_same_order() -> None:
    book = book_of(A, B, C)
    book.failed(B)
    again = AddressBook.parse(book.to_bytes())
    assert again.best() == book.best()
    again.failed(C)
    again.failed(A)
    assert order(again) == [C, B, A]  # all failed once: recency decides, as before the file


def test_what_worked_comes_first_and_old_addresses_stay_while_there_is_room() -> None:
    book = AddressBook()
    assert book.linked(A, [at(A, 1), at(A, 2)])
    assert book.linked(A, [at(A, 3), at(A, 1)])
    assert book.best()[0].addresses == (at(A, 3), at(A, 1), at(A, 2))
    book.linked(A, [at(A, port) for port in range(10, 30)])
    assert book.best()[0].addresses == tuple(at(A, port) for port in range(10, 10 + ADDRESSES_LIMIT))


def test_only_a_change_is_worth_writing() -> None:
    book = AddressBook()
    assert book.linked(A, [at(A)])
    assert not book.linked(A, [at(A)])
    assert book.linked(B, [at(B)])
    assert book.linked(A, [at(A)])  # now it is A that was linked last
    assert not book.linked(C, [])
    assert not book.linked(C, [at(A), "nonsense"])  # of another peer, and none
    assert order(book) == [A, B]


def test_full_book_drops_the_one_that_failed_most_then_the_oldest() -> None:
    peers = [Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(BOOK_LIMIT_PEERS + 2)]
    book = book_of(*peers[:BOOK_LIMIT_PEERS])
    book.failed(peers[100])
    book.linked(peers[-2], [at(peers[-2])])
    assert len(book) == BOOK_LIMIT_PEERS
    assert peers[100] not in order(book)
    book.linked(peers[-1], [at(peers[-1])])
    assert len(book) == BOOK_LIMIT_PEERS
    assert peers[0] not in order(book)
    assert len(book.to_bytes()) < BOOK_LIMIT_BYTES


def test_forgotten_peer_is_gone() -> None:
    book = book_of(A, B)
    book.forget(A)
    book.forget(D)
    book.failed(A)
    assert order(AddressBook.parse(book.to_bytes())) == [B]


def test_addresses_that_are_none_or_anothers_are_left_out_of_a_file() -> None:
    entry = {"peer": A, "addresses": ["/ip4/999.0.0.1/tcp/1/p2p/" + A, at(B), at(A)], "failures": 0}
    only_bad = {"peer": B, "addresses": [at(A)], "failures": 0}
    book = AddressBook.parse(json.dumps({"version": 1, "peers": [entry, only_bad]}).encode())
    assert [(known.peer, known.addresses) for known in book.best()] == [(A, (at(A),))]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "peers": []}',
        b'{"version": 1}',
        b'{"version": 1, "peers": [], "more": 1}',
        b'{"version": 1, "peers": [{"peer": "short", "addresses": []}]}',
        b" " * (BOOK_LIMIT_BYTES + 1),
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_book_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the text is msgspec's
        AddressBook.parse(data)


def test_strangers_push_out_nobody_that_comes_first() -> None:
    book = book_of(A)
    book.first = lambda: {A}
    for _ in range(5):
        book.failed(A)
    crowd = [Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(100, 100 + BOOK_LIMIT_PEERS + 5)]
    for peer in crowd:
        book.linked(peer, [at(peer)])
    assert len(book) == BOOK_LIMIT_PEERS
    assert A in order(book)
    assert book.in_order()[0].peer == A, "and it is among those that are dialled"
    assert book.best()[-1].peer == A, "though it failed more often than all others"
