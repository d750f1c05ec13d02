"""Kademlia's routing table: who is kept, who is dropped, and who is nearest."""

from __future__ import annotations

import hashlib

from shoal.swarm.rendezvous.contacts import BUCKET_LIMIT, FAILURES_LIMIT, Contact, Contacts


def contact(n: int, where: str = "here") -> Contact:
    id = n.to_bytes(4, "big")
    return Contact(id, f"peer{n}", (where,))


def distance(one: bytes, other: bytes) -> int:
    return int.from_bytes(hashlib.sha256(one).digest(), "big") ^ int.from_bytes(hashlib.sha256(other).digest(), "big")


def test_nearest_are_those_of_least_distance() -> None:
    table = Contacts(b"me")
    for n in range(15):
        table.add(contact(n))
    expected = sorted((n.to_bytes(4, "big") for n in range(15)), key=lambda id: distance(id, b"key"))
    assert [found.id for found in table.nearest(b"key", 5)] == expected[:5]


def test_table_is_bounded_and_keeps_those_who_came_first() -> None:
    table = Contacts(b"me")
    for n in range(5000):
        table.add(contact(n))
    assert BUCKET_LIMIT * 6 < len(table) < BUCKET_LIMIT * 14
    far = [n for n in range(5000) if distance(n.to_bytes(4, "big"), b"me").bit_length() == 256]
    kept = {found.id for found in table.nearest(b"any", 10_000)}
    assert {n.to_bytes(4, "big") for n in far[:BUCKET_LIMIT]} <= kept
    assert not {n.to_bytes(4, "big") for n in far[BUCKET_LIMIT:]} & kept


def test_newcomer_takes_the_place_of_one_that_failed() -> None:
    table = Contacts(b"me")
    far = [n for n in range(200) if distance(n.to_bytes(4, "big"), b"me").bit_length() == 256][: BUCKET_LIMIT + 2]
    for n in far[:-2]:
        table.add(contact(n))
    table.failed(contact(far[3]).id)
    table.failed(contact(far[4]).id)
    table.answered(contact(far[4]).id)
    for n in far[-2:]:
        table.add(contact(n))
    kept = {found.id for found in table.nearest(b"any", 100)}
    assert kept == {contact(n).id for n in far if n not in (far[3], far[-1])}


def test_contact_that_fails_again_and_again_is_dropped_and_one_that_moved_is_found_where_it_is() -> None:
    table = Contacts(b"me")
    table.add(contact(1))
    table.add(contact(2))
    for _ in range(FAILURES_LIMIT):
        table.failed(contact(1).id)
    table.failed(b"nobody")
    table.answered(b"nobody")
    table.add(contact(2, "elsewhere"))
    assert table.nearest(b"any", 10) == [contact(2, "elsewhere")]


def test_node_is_no_contact_of_its_own() -> None:
    table = Contacts(b"me")
    table.add(Contact(b"me", "peer", ("here",)))
    assert len(table) == 0
