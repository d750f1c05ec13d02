"""Backoff: how long its pauses are, and how it begins anew."""

from __future__ import annotations

import pytest

from shoal.protocol.backoff import Backoff


@pytest.mark.parametrize(
    ("first_s", "limit_s", "pauses"),
    [(2.0, 20.0, [2, 4, 8, 16, 20, 20]), (1.0, 8.0, [1, 2, 4, 8, 8, 8]), (5.0, 5.0, [5] * 6)],
)
def test_backoff_doubles_each_pause_until_its_limit(first_s: float, limit_s: float, pauses: list[float]) -> None:
    backoff = Backoff(first_s, limit_s)
    assert [backoff.next_s() for _ in pauses] == pauses


def test_backoff_begins_anew_or_with_the_longest_pause() -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.next_s() for _ in range(3)] == [1.0, 2.0, 4.0]
    assert backoff.pause_s == 8.0  # to look at, without taking it
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [1.0, 2.0]
    backoff.exhaust()
    assert [backoff.next_s() for _ in range(2)] == [30.0, 30.0]


def test_backoff_of_ages_stays_at_its_limit() -> None:
    backoff = Backoff(1.0, 3600.0)
    assert max(backoff.next_s() for _ in range(5000)) == backoff.pause_s == 3600.0
