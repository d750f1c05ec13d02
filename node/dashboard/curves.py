"""Curves of bounded size: when one is full, neighbours are averaged and each point stands for twice as much."""

from __future__ import annotations

import math
from collections.abc import Sequence

POINT_LIMIT = 512

Point = tuple[float, float]


class Curve:
    """Points (x, y) with ascending x. Once there are `limit`, pairs become their mean, and later points come in pairs.

    `changed` says what a viewer lacks since `told`: new points, or the whole curve after it was thinned or cut.
    """

    def __init__(self, limit: int = POINT_LIMIT) -> None:
        self._limit = limit
        self._points: list[Point] = []
        self._stride = 1
        self._waiting: list[Point] = []
        self._told = 0
        self._redone = False

    @property
    def points(self) -> Sequence[Point]:
        """All points, ascending in x."""
        return self._points

    def add(self, x: float, y: float) -> None:
        """Add a measurement; one that is not finite, or not beyond the last x, is left out."""
        last = self._waiting[-1:] or self._points[-1:]
        if not (math.isfinite(x) and math.isfinite(y)) or (last and x <= last[0][0]):
            return
        self._waiting.append((x, y))
        if len(self._waiting) < self._stride:
            return
        self._points.append(_mean(self._waiting))
        self._waiting.clear()
        if len(self._points) >= self._limit:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._stride *= 2
            self._redone = True

    def rewind(self, x: float) -> None:
        """Forget all beyond `x`."""
        kept = [point for point in self._points if point[0] <= x]
        self._waiting = [point for point in self._waiting if point[0] <= x]
        if len(kept) < len(self._points):
            self._points, self._redone = kept, True

    def changed(self) -> tuple[bool, list[Point]]:
        """Points that are new since the last call, and True before them if they replace all that went before."""
        redone = self._redone
        news = self._points[:] if redone else self._points[self._told :]
        self._told, self._redone = len(self._points), False
        return redone, news


def _mean(points: Sequence[Point]) -> Point:
    """The last x, so that a curve ends where its measurements end, and the mean of y."""
    return points[-1][0], sum(y for _, y in points) / len(points)
