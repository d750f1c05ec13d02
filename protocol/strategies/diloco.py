"""The strategy `diloco`. Source: DiLoCo, arXiv 2311.08105."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.protocol.strategies.strategy import Strategy


class DiLoCo(Strategy):
    """Inner steps of each node's own, then one outer step on the mean of what they led to."""

    name = "diloco"
    summary = "H inner steps, then one outer Nesterov step on the mean pseudo-gradient."
    balances = True
    settings = frozenset({"overlap_steps", "late_steps"})
    averages_policies = True

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"norm_clip": True}
