"""Fragments: every value is in exactly one, a round is of one, and only the last chunk of one may be short."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.protocol.errors import ConfigError


@pytest.mark.parametrize(("numel", "count"), [(10, 1), (10, 2), (10, 3), (8, 2), (23, 4), (24, 6), (21, 6)])
def test_every_value_is_in_exactly_one_fragment(numel: int, count: int) -> None:
    vector = np.arange(1, numel + 1, dtype=np.float32)
    back = np.zeros_like(vector)
    for fragment in Fragments(Grid(numel, 4), count):
        values = fragment.gather(vector, np.empty(fragment.numel, np.float32))
        assert fragment.grid.chunks == len(fragment.chunks)
        for place, chunk in enumerate(fragment.chunks):
            assert chunk % count == fragment.number
            here, there = slice(*fragment.grid.span(place)), slice(*fragment.whole.span(chunk))
            assert values[here].tolist() == vector[there].tolist()
        before = np.count_nonzero(back)
        fragment.scatter(values, back)
        assert np.count_nonzero(back) == before + fragment.numel
    assert back.tolist() == vector.tolist()


def test_round_is_of_the_fragment_that_its_number_leaves() -> None:
    fragments = Fragments(Grid(23, 4), 4)
    assert [fragments.of_round(round).number for round in (0, 1, 3, 4, 9)] == [0, 1, 3, 0, 1]
    assert [list(fragment.chunks) for fragment in fragments] == [[0, 4], [1, 5], [2], [3]]
    assert [fragment.numel for fragment in fragments] == [8, 7, 4, 4]


def test_more_fragments_than_chunks_are_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"100000 parameters are 2 chunks of 65536 .* chunk_values = 49152 or less"):
        Fragments(Grid(100_000, 65_536), 3)
    assert Fragments(Grid(100_000, 49_152), 3).grid.chunks == 3
    with pytest.raises(ConfigError, match="fragments = 2 or less"):
        Fragments(Grid(5_000, 65_536), 3)
    assert Fragments(Grid(5_000, 4_096), 2).grid.chunks == 2
