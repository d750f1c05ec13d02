"""The strategy `streaming`: the parameters in fragments, whose rounds training goes on beside.

Source: Streaming DiLoCo, arXiv 2501.18512.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.protocol.strategies.strategy import Strategy, Sync

OVERLAP_STEPS: Final = 2
"""Or as many as there are between two rounds: enough to hide a round and that nodes are ready apart."""
FRAGMENTS: Final = (4, 3, 5, 2, 1)
"""The first of these that divides the inner steps."""


class Streaming(Strategy):
    """DiLoCo of one fragment after the other, each outcome mixed into what a node has learnt meanwhile."""

    name = "streaming"
    summary = "the parameters in fragments, each with rounds of its own in turn, beside which training goes on."
    balances = True
    settings = frozenset({"fragments", "mixing", "overlap_steps", "late_steps"})

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`. What is hidden is bounded by the steps between two rounds."""
        implied: dict[str, object] = {
            "codec": "int4",
            "fragments": FRAGMENTS[0],
            "overlap_steps": OVERLAP_STEPS,
            "norm_clip": True,
        }
        steps = given.get("inner_steps")
        if isinstance(steps, int):
            implied["fragments"] = next(count for count in FRAGMENTS if steps % count == 0)
            fragments = given.get("fragments", implied["fragments"])
            if isinstance(fragments, int) and fragments > 0:
                implied["overlap_steps"] = min(OVERLAP_STEPS, max(0, steps // fragments))
            implied["late_steps"] = steps
        return implied

    def mixing(self, sync: Sync) -> float | None:
        """See `Strategy`."""
        return sync.mixing
