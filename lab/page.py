"""Pages in Markdown: tables, numbers as they stand in them, and targets beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.lab.targets import Row, Spread

UNKNOWN = "–"


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table; cells may hold anything."""
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(cell(text) for text in row) + " |" for row in rows) + "\n"


def cell(text: str) -> str:
    """A text on one line that ends no cell."""
    return " ".join(text.split()).replace("|", "\\|")


def number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(found: Spread | None) -> str:
    """The median and, in brackets, the range."""
    if found is None:
        return UNKNOWN
    median, least, most = map(number, (found.median, found.least, found.most))
    return median if found.least == found.most else f"{median} ({least}–{most})"


def targets(rows: Iterable[Row]) -> str:
    """The table of all targets, and what was measured."""
    lines = (
        (row.name, _limit(row, row.target), _limit(row, row.aim), spread(row.measured), row.unit, _verdict(row))
        for row in rows
    )
    return table(("what", "target", "aim", "measured", "unit", "verdict"), lines)


def _limit(row: Row, limit: float | None) -> str:
    return UNKNOWN if limit is None else f"{'≥' if row.least else '≤'} {number(limit)}"


def _verdict(row: Row) -> str:
    if row.measured is None:
        return "not measured"
    if row.met is None:
        return UNKNOWN
    if not row.met:
        return "**missed**"
    return "met, and the aim" if row.aim_met else "met"
