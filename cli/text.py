"""Texts for people: safe to print wherever they came from, and short."""

from __future__ import annotations

LINE_LIMIT_CHARS = 4096


def escaped(text: str) -> str:
    """`text` in one line that no terminal takes for a command: what cannot be printed is written as an escape."""
    shown = text[:LINE_LIMIT_CHARS] + ("…" if len(text) > LINE_LIMIT_CHARS else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)


def in_one_line(text: str) -> str:
    """`text` with line breaks turned into blanks, then `escaped`."""
    return escaped(" ".join(text.split()))


def quantity(value: float, unit: str) -> str:
    """`12.3 kB`: three digits or so and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            digits = 0 if prefix == "" and value == int(value) else 1
            return f"{value:.{digits}f} {prefix}{unit}"
        value /= 1000
    raise AssertionError("the last prefix takes what is left")


def number(value: float | None) -> str:
    """`value`, or a dash if there is none."""
    return "–" if value is None else f"{value:.4f}"


def figure(value: float | None) -> str:
    """`2.315`, `0.01234`, `1,235`: `value` with the four digits that matter, or a dash if there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def who_contributed(contributors: int, members: int) -> str:
    """`4 of 5 contributed`. Of a round in which members died, more may have than are members after it."""
    if contributors > members:
        return f"{contributors} contributed, {count(members, 'member')} go on"
    return f"{contributors} of {members} contributed"


def count(value: int, noun: str) -> str:
    """`1 member`, `2 members`."""
    return f"{value} {noun}{'' if value == 1 else 's'}"
