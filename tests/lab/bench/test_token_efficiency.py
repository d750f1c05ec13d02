"""What synchronous training would need for a run's loss, worked out by hand on short curves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.lab.bench.token_efficiency import ending, falling, loss_at, tokens_for
from shoal.lab.bench.train_spec import Point


def curve(*losses: float, step: int = 100) -> list[Point]:
    return [Point(round=e, tokens=e * step, wire_bytes=e * 7, val_loss=loss) for e, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([8, 6, 5, 4], [8, 6, 5, 4]),
        ([8, 5, 6, 4], [8, 5.5, 5.5, 4]),
        ([8, 4, 5, 6], [8, 5, 5, 5]),
        ([8, 7, 3, 6, 6], [8, 7, 5, 5, 5]),
        ([1, 2, 3], [2, 2, 2]),
        ([2], [2]),
    ],
)
def test_falling_makes_the_mean_of_neighbours_that_rise(losses: Sequence[float], expected: Sequence[float]) -> None:
    assert falling(losses) == expected


@pytest.mark.parametrize(
    ("loss", "tokens"),
    [(9.0, 0), (8.0, 0), (7.0, 50), (6.0, 100), (5.5, 150), (5.0, 200), (4.5, 350), (4.0, 400), (3.99, None)],
)
def test_tokens_for_a_loss_lie_where_the_curve_first_comes_down_to_it(loss: float, tokens: float | None) -> None:
    assert tokens_for(loss, curve(8, 6, 4.9, 5.1, 4)) == (None if tokens is None else pytest.approx(tokens))


def test_between_points_the_loss_is_on_a_straight_line_and_beyond_the_end_the_last() -> None:
    assert [loss_at(tokens, curve(8, 6, 5)) for tokens in (0, 25, 150, 200, 300)] == [8, 7.5, 5.5, 5, 5]


def test_a_run_that_is_the_synchronous_one_has_ratio_and_efficiency_one() -> None:
    points = curve(8, 7, 6.5, 6, 5.5, 5, 4.5)
    found = ending(points, points)
    assert (found.loss_ratio, found.efficiency) == (1.0, 1.0)
    assert (found.val_loss, found.tokens, found.sync_tokens) == (5.5, 400, 400)


def test_an_ending_is_of_the_last_five_evaluations_at_the_tokens_of_each() -> None:
    sync = curve(8, 7, 6.5, 6, 5.5, 5, 4.5)
    run = curve(8, 99, 8, 7.5, 7, 6.5, 6, step=90)
    found = ending(run, sync)
    assert found.val_loss == 7.0
    assert found.tokens == 360
    # At 180, 270, 360, 450 and 540 tokens: 6.6, 6.15, 5.7, 5.25, 4.8.
    assert found.sync_val_loss == pytest.approx(5.7)
    assert found.loss_ratio == pytest.approx(7.0 / 5.7)
    assert found.sync_tokens == 100
    assert found.efficiency == pytest.approx(100 / 360)


def test_a_loss_that_synchronous_training_never_has_is_worth_more_than_all_its_tokens() -> None:
    sync = curve(8, 7, 6)
    found = ending(curve(8, 5.5, 5.0, step=90), sync)
    assert found.sync_tokens is None
    assert found.efficiency == pytest.approx(200 / 135)


def test_of_a_run_of_one_round_its_one_evaluation_counts() -> None:
    assert ending(curve(8, 6), curve(8, 6)).val_loss == 6


def test_a_synchronous_curve_that_has_passed_the_loss_tells_the_efficiency_before_it_is_as_long_as_the_run() -> None:
    run = curve(8, 7, 6.5, 6, 6, 6, 6)
    none, above, passed, whole = (ending(run, curve(8, 7, 6, 5, 5, 5, 5)[:points]) for points in (0, 2, 4, 7))
    assert [found.sync_tokens for found in (none, above, passed, whole)] == [
        None, None, pytest.approx(190), pytest.approx(190),
    ]  # fmt: skip
    assert [found.efficiency for found in (none, above, passed)] == pytest.approx([0, 100 / 400, 190 / 400])
    assert [found.loss_ratio for found in (none, above, passed)] == [None, None, None]
    assert whole.loss_ratio == pytest.approx(6.1 / 5.2)
