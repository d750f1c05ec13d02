"""A single number, read from whatever a user's code returned."""

from __future__ import annotations

from shoal.protocol.records import STEP_TOKENS_LIMIT


def single_number(found: object) -> float | None:
    """The number, also that in a tensor or an array of one value; None for anything else, a text of digits too."""
    if isinstance(found, str | bytes):
        return None
    try:
        return float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: of a tensor of several values
        return None


def tokens_of_step(found: object) -> int | None:
    """The number of tokens or samples that a step was made on; None for what is no such number."""
    number = single_number(found)
    return int(number) if number is not None and 0 <= number < STEP_TOKENS_LIMIT else None
