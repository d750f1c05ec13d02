"""Curves stay small, keep what they show, and tell what is new once."""

from __future__ import annotations

import math

from shoal.node.dashboard.curves import Curve


def test_a_long_curve_is_thinned_to_means_and_ends_where_its_measurements_end() -> None:
    curve = Curve(limit=8)
    for x in range(1, 65):
        curve.add(x, 2 * x)
        assert len(curve.points) < 8
    points = curve.points
    stride = int(points[1][0] - points[0][0])
    assert points[-1][0] == 64
    assert all(y == 2 * (x - (stride - 1) / 2) for x, y in points)  # the mean of the `stride` values up to x


def test_a_curve_tells_each_point_once_and_everything_anew_when_it_was_thinned() -> None:
    curve = Curve(limit=4)
    curve.add(1, 1.0)
    curve.add(2, 2.0)
    assert curve.changed() == (False, [(1, 1.0), (2, 2.0)])
    assert curve.changed() == (False, [])
    curve.add(3, 3.0)
    assert curve.changed() == (False, [(3, 3.0)])
    curve.add(4, 4.0)
    assert curve.changed() == (True, [(2, 1.5), (4, 3.5)])
    assert curve.changed() == (False, [])


def test_a_curve_takes_no_point_that_is_not_finite_or_goes_back() -> None:
    curve = Curve()
    for x, y in ((1, 5.0), (1, 6.0), (0, 7.0), (2, math.nan), (3, math.inf), (math.nan, 1.0), (4, 8.0)):
        curve.add(x, y)
    assert curve.points == [(1, 5.0), (4, 8.0)]


def test_a_curve_that_is_rewound_goes_on_from_there() -> None:
    curve = Curve()
    for x in range(1, 6):
        curve.add(x, 1.0)
    curve.changed()
    curve.rewind(3)
    curve.add(4, 2.0)
    assert curve.changed() == (True, [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)])
