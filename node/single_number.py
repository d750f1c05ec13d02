"""A single number, read from whatever a user's code returned."""

from __future__ import annotations


def single_number(found: object) -> float | None:
    """The number, also that in a tensor or an array of one value; None for anything else, a text of digits too."""
    if isinstance(found, str | bytes):
        return None
    try:
        return float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: of a tensor of several values
        return None
