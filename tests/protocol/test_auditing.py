"""The lottery of audits: everybody's results go into it, no owner can know what is drawn, and all is drawn in time."""

from __future__ import annotations

from shoal.protocol.auditing import TICKET_DOMAIN, affordable, beacon, drawn, ticket
from shoal.protocol.identity import Identity, verify
from shoal.protocol.messages import domain_hash
from shoal.protocol.suspicion import HALF_LIFE_S, Suspicion
from tests.protocol.lab import paper_identities

AUDITORS = [Identity.from_seed(bytes([n]) * 32) for n in range(8)]
VALUE = domain_hash("value")
STATED = [(domain_hash("result", bytes([chunk])), b"\x07") for chunk in range(64)]


def test_beacon_depends_on_the_value_and_on_every_result_and_bitmap() -> None:
    beacons = {beacon(VALUE, STATED), beacon(domain_hash("another"), STATED), beacon(VALUE, STATED[:-1])}
    for chunk, (result, bitmap) in enumerate(STATED):
        for changed in ((domain_hash("changed"), bitmap), (result, b"\x03")):
            beacons.add(beacon(VALUE, [*STATED[:chunk], changed, *STATED[chunk + 1 :]]))
    assert len(beacons) == 3 + 2 * len(STATED)


def test_what_is_drawn_takes_the_auditors_key() -> None:
    """An owner that knows every result, and could choose its own last, knows the beacon and not what follows."""
    of_round = beacon(VALUE, STATED)
    tickets = [ticket(auditor, of_round) for auditor in AUDITORS]
    assert all(verify(a.peer_id, TICKET_DOMAIN, of_round, t) for a, t in zip(AUDITORS, tickets, strict=True))
    assert tickets == [ticket(auditor, of_round) for auditor in AUDITORS], "an auditor cannot draw again"
    assert len({tuple(drawn(one, 64, 4)) for one in tickets}) == len(AUDITORS)
    assert all(drawn(one, 64, 4) != drawn(of_round, 64, 4) for one in tickets)


def test_draws_are_distinct_in_range_and_even() -> None:
    counts = [0] * 10
    for number in range(300):
        found = drawn(ticket(AUDITORS[0], domain_hash("beacon", number.to_bytes(4, "little"))), 10, 3)
        assert len(set(found)) == 3
        for chunk in found:
            counts[chunk] += 1
    assert sum(counts) == 900
    assert all(50 < count < 135 for count in counts), counts
    assert sorted(drawn(bytes(64), 5, 99)) == [0, 1, 2, 3, 4]


def test_audits_add_their_share_to_the_bytes_of_a_round_however_many_nodes_and_chunks() -> None:
    for chunks, nodes in ((4, 4), (1, 4), (14, 8), (40, 2), (100, 64)):
        per_node = affordable(chunks, nodes, limit=1000, share=0.05)
        fetched, reduced = nodes * per_node * (nodes - 1), nodes * 2 * (nodes - 1) / nodes * chunks
        assert abs(fetched / reduced - 0.05) < 1e-9
    assert affordable(160, 8, limit=2, share=0.05) == 2.0
    assert affordable(100_000, 8, limit=2, share=0.05) == 2.0
    assert affordable(9, 3, limit=0, share=1.0) == 0.0
    assert affordable(9, 2, limit=9, share=1.0) == 9.0
    assert affordable(9, 0, limit=2, share=0.05) == 0.9, "a round that nobody contributed to"


def test_a_fraction_of_a_chunk_is_drawn_as_often_as_it_says() -> None:
    tickets = [ticket(AUDITORS[0], domain_hash("beacon", number.to_bytes(4, "little"))) for number in range(2000)]
    counts = [len(drawn(one, 4, 0.1)) for one in tickets]
    assert set(counts) == {0, 1}
    assert 150 < sum(counts) < 250  # 200 ± 3.7 standard deviations
    counts = [len(drawn(one, 4, 1.5)) for one in tickets]
    assert set(counts) == {1, 2}
    assert 2917 < sum(counts) < 3083
    assert {len(drawn(one, 4, 2.0)) for one in tickets} == {2}
    assert {len(drawn(one, 1, 1.9)) for one in tickets} == {1}
    first = [found[0] for one in tickets if (found := drawn(one, 4, 0.1))]
    assert {first.count(chunk) > 20 for chunk in range(4)} == {True}


def test_suspicion_fades() -> None:
    (one,) = (identity.peer_id for identity in paper_identities(1))
    scores = Suspicion()
    scores.add(one, 4.0, 0.0)
    assert scores.of(one, HALF_LIFE_S) == 2.0
    scores.add(one, 1.0, HALF_LIFE_S)
    assert scores.of(one, 2 * HALF_LIFE_S) == 1.5
    assert scores.of(one, 50 * HALF_LIFE_S) == 0.0
