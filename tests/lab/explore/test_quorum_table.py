"""The tables of quorums: that the documents have them, and figures that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.lab.explore.quorum_table import CRASH, LYING, MEMBERS, liars_page, quorums_page, reached, row

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "table"), [("agreement.md", quorums_page()), ("limits.md", liars_page())])
def test_documents_have_the_tables_as_worked_out(page: str, table: str) -> None:
    assert table in (DOCS / page).read_text(), "run `python -m shoal.lab.explore.quorum_table`"


def test_lying_survives_a_third_less_one_and_no_one_forks_it() -> None:
    rows = [row(LYING, members) for members in MEMBERS]
    assert [one.lies for one in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [one.deaths for one in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [one.needed for one in rows] == [1, 2, 3, 3, 4, 5, 5]
    assert [one.forkers for one in rows[3:]] == [()] * 4


def test_crash_survives_the_death_of_a_minority_and_no_lie() -> None:
    rows = [row(CRASH, members) for members in MEMBERS]
    assert [one.lies for one in rows] == [0] * 7
    assert [one.deaths for one in rows] == [0, 0, 1, 1, 2, 2, 3]
    assert [one.deaths_without for one in rows] == [0, 1, 1, 2, 2, 3, 3]
    assert [one.one_forks for one in rows] == ["itself", "the planner", *["anybody"] * 5]
    assert [(one.needed, one.needed_without) for one in rows[3:5]] == [(2, 3), (3, 3)]


def test_leaves_are_subtracted_in_crash_only() -> None:
    assert reached(CRASH, 4, 0, 0b0110, leaves=0b1000)
    assert not reached(CRASH, 4, 0, 0b0110)
    assert not reached(CRASH, 4, 0, 0b1010, leaves=0b1000)
    assert not reached(LYING, 4, 0, 0b0110, leaves=0b1000)
    assert reached(LYING, 4, 0, 0b1110, leaves=0b1000)
