"""The strategy `sparse`: of DiLoCo's update only the largest values."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.protocol.strategies.strategy import Strategy


class Sparse(Strategy):
    """Few values of each update travel; what is left out is carried on to the next."""

    name = "sparse"
    summary = "of diloco's update only the largest values, what is left out is carried on, and the outer step is plain."
    balances = True
    own_codec = "topk"

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"codec": "topk", "outer_lr": 1.0, "outer_momentum": 0.0, "error_feedback": 0.95, "norm_clip": True}
