"""Numbers in the words of a node: for its commands and its page alike."""

from __future__ import annotations

from collections.abc import Sequence

MISSING_NAMED = 3
"""Members that did not contribute to a round are named where they are so few."""


def quantity(value: float, unit: str) -> str:
    """`12.3 kB`: three digits or so and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            digits = 0 if prefix == "" and value == int(value) else 1
            return f"{value:.{digits}f} {prefix}{unit}"
        value /= 1000
    raise AssertionError("the last prefix takes what is left")


def figure(value: float | None) -> str:
    """`2.315`, `0.01234`, `1,235`: `value` with the four digits that matter, or a dash if there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def count(value: int, noun: str) -> str:
    """`1 member`, `2 members`."""
    return f"{value} {noun}{'' if value == 1 else 's'}"


def duration(seconds: float) -> str:
    """`42 s`, `10 min`, `2.5 h`."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def who_contributed(contributors: int, members: int, missing: Sequence[str] = ()) -> str:
    """`4 of 5 contributed, without m3`. Of a round in which members died, more may have than are members after it.

    missing: the members that did not, who are named where they are few.
    """
    if 0 < len(missing) <= MISSING_NAMED:
        return f"{who_contributed(contributors, members)}, without {' and '.join(missing)}"
    if contributors > members:
        return f"{contributors} contributed, {count(members, 'member')} {'goes' if members == 1 else 'go'} on"
    return f"{contributors} of {members} contributed"


def fetched_text(done_bytes: int, total_bytes: int) -> str:
    """Say how much of a state is here."""
    return f"fetching the swarm's state: {quantity(done_bytes, 'B')} of {quantity(total_bytes, 'B')}"
