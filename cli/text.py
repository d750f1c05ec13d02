"""Texts for people: safe to print wherever they came from, and short."""

from __future__ import annotations

import shlex

import typer

from shoal.node.text import count, figure, quantity, who_contributed

__all__ = ["count", "escaped", "figure", "in_one_line", "note", "number", "quantity", "who_contributed"]

LINE_LIMIT_CHARS = 4096


def escaped(text: str) -> str:
    """`text` in one line that no terminal takes for a command: what cannot be printed is written as an escape."""
    shown = text[:LINE_LIMIT_CHARS] + ("…" if len(text) > LINE_LIMIT_CHARS else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)


def in_one_line(text: str) -> str:
    """`text` with line breaks turned into blanks, then `escaped`."""
    return escaped(" ".join(text.split()))


def note(text: str) -> None:
    """Print a note beside what is copied: quoted, so that a shell in which it is pasted too runs nothing of it."""
    typer.echo(f"note: {shlex.quote(text)}", err=True)


def number(value: float | None) -> str:
    """`value`, or a dash if there is none."""
    return "–" if value is None else f"{value:.4f}"
