from __future__ import annotations

import pytest

from shoal.collectives.grid import Grid
from shoal.protocol.errors import LocalError


def test_grid_last_chunk_is_shorter() -> None:
    grid = Grid(10, 4)
    assert grid.chunks == 3
    assert [grid.span(c) for c in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert [grid.length(c) for c in range(3)] == [4, 4, 2]


def test_grid_that_fits_exactly_has_no_empty_chunk() -> None:
    assert Grid(8, 4).chunks == 2
    assert Grid(3, 4).span(0) == (0, 3)


@pytest.mark.parametrize(("numel", "chunk_values"), [(0, 4), (-1, 4), (4, 0), (4, 1 << 25), (1 << 30, 1)])
def test_grid_refuses_what_cannot_be(numel: int, chunk_values: int) -> None:
    with pytest.raises(LocalError):
        Grid(numel, chunk_values)


@pytest.mark.parametrize("chunk", [-1, 3])
def test_span_outside_the_grid_is_our_bug(chunk: int) -> None:
    with pytest.raises(LocalError):
        Grid(10, 4).span(chunk)
