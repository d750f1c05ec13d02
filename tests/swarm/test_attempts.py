"""Nobody is taken for what it is not: every kind of attempt at a real node, beside the honest twin that is accepted."""

from __future__ import annotations

import pytest
import trio

from tests.swarm.attempts import KINDS, Row, table

DEFAULT_COUNT, LONG_COUNT = 20, 1000
"""Among twenty of a kind is every way that it has."""


def check(rows: list[Row], count: int) -> None:
    assert [(row.kind, row.attempts, row.accepted, row.control) for row in rows] == [
        (kind, count, 0, True) for kind in KINDS
    ]


def test_twenty_attempts_of_each_kind_are_refused_and_their_honest_twins_accepted() -> None:
    check(trio.run(table, DEFAULT_COUNT), DEFAULT_COUNT)


@pytest.mark.long
def test_a_thousand_attempts_of_each_kind_are_refused() -> None:
    check(trio.run(table, LONG_COUNT), LONG_COUNT)
