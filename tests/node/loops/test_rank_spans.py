"""Spans of the flat vector: which rank has what, and who hands it over."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.loops.rank_spans import dealt, overlap, without
from shoal.protocol.errors import ConfigError

LENGTH = 40
Spans = tuple[tuple[int, int], ...]


def spans_of(values: set[int]) -> Spans:
    """The ascending spans of these places."""
    return tuple(
        (start, next(end for end in range(start, LENGTH + 1) if end not in values))
        for start in sorted(values)
        if start - 1 not in values
    )


def values_of(spans: Spans) -> list[int]:
    return [value for start, stop in spans for value in range(start, stop)]


PLACES = st.sets(st.integers(0, LENGTH - 1))


@given(PLACES, PLACES)
def test_spans_overlap_and_lack_what_sets_of_places_do(one: set[int], other: set[int]) -> None:
    assert values_of(overlap(spans_of(one), spans_of(other))) == sorted(one & other)
    assert values_of(without(spans_of(one), spans_of(other))) == sorted(one - other)


@given(st.lists(PLACES, min_size=1, max_size=4))
def test_every_value_is_handed_over_once_by_the_lowest_rank_that_has_it(held: list[set[int]]) -> None:
    wanted = set[int]().union(*held)
    handed = dealt([spans_of(values) for values in held], spans_of(wanted))
    for rank, spans in enumerate(handed):
        assert values_of(spans) == sorted(held[rank] - set[int]().union(*held[:rank]))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def test_values_that_no_rank_has_are_an_error() -> None:
    with pytest.raises(ConfigError, match="has the values 5 to 7 of its model"):
        dealt([((0, 5),), ((7, 9),)], ((0, 9),))
