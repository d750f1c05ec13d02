"""Rows that follow from the membership: dealt evenly, hardly moved by who comes and goes, each with a head."""

from __future__ import annotations

import hashlib

import pytest

from shoal.lab.rows.rows import ROWS_LIMIT, deal_rows, joined, row_count, without
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.wire import SwarmId

SWARM = SwarmId(bytes(range(32)))
PEERS = [PeerId(f"peer{number:03}") for number in range(101)]


@pytest.mark.parametrize(("members", "rows"), [(8, 2), (64, 4), (70, 4), (1000, 15), (4096, 32), (10_000, ROWS_LIMIT)])
def test_rows_are_as_many_as_the_members_call_for(members: int, rows: int) -> None:
    assert row_count(members) == rows


def test_rows_are_dealt_from_the_membership_alone() -> None:
    rows = deal_rows(SWARM, PEERS, 8)
    assert rows == deal_rows(SWARM, [*reversed(PEERS), *PEERS[:5]], 8)
    assert {len(row) for row in rows} == {12, 13}
    assert sorted(peer for row in rows for peer in row) == PEERS
    assert rows != deal_rows(SwarmId(bytes(32)), PEERS, 8)


def test_heads_are_a_sample_that_names_do_not_decide() -> None:
    """Over many swarms everybody is head about as often: 8 of 101, within five standard deviations."""
    swarms = [SwarmId(hashlib.blake2b(bytes([n % 256, n // 256]), digest_size=32).digest()) for n in range(300)]
    times = dict.fromkeys(PEERS, 0)
    for swarm in swarms:
        for row in deal_rows(swarm, PEERS, 8):
            times[row[0]] += 1
    expected = 300 * 8 / 101
    assert all(abs(count - expected) < 5 * expected**0.5 for count in times.values())


def test_who_goes_moves_nobody_else_and_newcomers_fill_the_shortest() -> None:
    rows = deal_rows(SWARM, PEERS[:12], 3)
    gone = {rows[1][0], rows[1][2], rows[2][3]}
    left = without(rows, gone)
    assert left == (rows[0], (rows[1][1], rows[1][3]), rows[2][:3])
    new = [PeerId("a"), PeerId("b"), PeerId("c"), PeerId("d")]
    assert joined(left, new) == ((*rows[0], "d"), (*left[1], "a", "b"), (*left[2], "c"))


def test_rows_without_anybody_are_refused() -> None:
    for count in (0, 4):
        with pytest.raises(LocalError):
            deal_rows(SWARM, PEERS[:3], count)
