"""Held-out losses that this node measured in earlier lives, out of its event log."""

from __future__ import annotations

from pathlib import Path

from shoal.node.reporting.event_log import read_last
from shoal.node.reporting.events import Evaluated

READ_LIMIT_BYTES = 16 << 20
"""Of the end of the log."""


def past_losses(path: Path) -> dict[int, float]:
    """The loss after each round, as measured last; what a rollback abandoned is among them. Blocks."""
    losses: dict[int, float] = {}
    try:
        events = read_last(path, READ_LIMIT_BYTES)
    except OSError:
        return losses
    for event in events:
        if isinstance(event, Evaluated) and event.loss is not None:
            losses.pop(event.round, None)
            losses[event.round] = event.loss
    return losses
