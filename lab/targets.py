"""Numbers beside what they are to reach.

A target is data, declared where its number is measured. What was not measured is neither met nor missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The median of some numbers, and their range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Spread:
        """Median, least and most of at least one number."""
        found = sorted(numbers)
        return cls(median=statistics.median(found), least=found[0], most=found[-1])

    @classmethod
    def of_any(cls, numbers: Iterable[float]) -> Spread | None:
        """The same; None of none."""
        found = list(numbers)
        return cls.of(found) if found else None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One target: what is to be reached (`target`), what was hoped for (`aim`), and what was measured.

    least: whether the number has to be at least the target instead of at most.
    """

    name: str
    unit: str
    target: float | None
    aim: float | None
    measured: Spread | None
    least: bool = False

    @property
    def met(self) -> bool | None:
        """True if the median reaches the target; None if it was not measured or there is no target."""
        return self._reaches(self.target)

    @property
    def aim_met(self) -> bool | None:
        """The same for the aim."""
        return self._reaches(self.aim)

    def _reaches(self, limit: float | None) -> bool | None:
        if self.measured is None or limit is None:
            return None
        return self.measured.median >= limit if self.least else self.measured.median <= limit

    def __str__(self) -> str:
        """The row on one line, like `added delay: 2.5 s, wanted at most 2`."""
        measured = "not measured" if self.measured is None else f"{self.measured.median:.4g} {self.unit}".rstrip()
        limit = "" if self.target is None else f", wanted at {'least' if self.least else 'most'} {self.target:g}"
        return f"{self.name}: {measured}{limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a benchmark's number: at most `most`, or at least `least`; neither where it is only shown.

    aim: what was hoped for beyond that, on the same side.
    """

    name: str
    unit: str = ""
    most: float | None = None
    least: float | None = None
    aim: float | None = None

    def row(self, measured: Spread | float | None) -> Row:
        """The target beside what was measured; None where it was not."""
        spread = measured if measured is None or isinstance(measured, Spread) else Spread.of([float(measured)])
        limit, at_least = (self.most, False) if self.least is None else (self.least, True)
        return Row(name=self.name, unit=self.unit, target=limit, aim=self.aim, measured=spread, least=at_least)


def missed(rows: Iterable[Row]) -> list[Row]:
    """Rows that were measured and do not reach their target."""
    return [row for row in rows if row.met is False]
