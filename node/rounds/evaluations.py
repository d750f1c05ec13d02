"""Held-out losses that this node measured in earlier lives, out of its event log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.node.reporting.event_files import read_end

READ_LIMIT_BYTES = 16 << 20
"""Of the end of the log."""


class _Evaluated(msgspec.Struct, frozen=True):
    event: str
    round: int
    loss: float


def past_losses(path: Path) -> dict[int, float]:
    """The loss after each round, as measured last; what a rollback abandoned is among them. Blocks."""
    losses: dict[int, float] = {}
    try:
        lines = read_end(path, READ_LIMIT_BYTES).split(b"\n")
    except OSError:
        return losses
    for line in lines:
        if b'"evaluated"' in line:
            try:
                found = msgspec.json.decode(line, type=_Evaluated)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # cut short by a crash, or no number
            losses.pop(found.round, None)
            losses[found.round] = found.loss
    return losses
