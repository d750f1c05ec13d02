"""The strategy `gossip`: exchanges with one partner at a time. Source: NoLoCo, arXiv 2506.10911."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.protocol.strategies.strategy import Exchanges, Strategy, Sync


class Gossip(Strategy):
    """Each node holds its own parameters, and steps towards those of a partner drawn anew each round."""

    name = "gossip"
    summary = (
        "each round with one other member, drawn at random; no two hold the same parameters, nothing is certified."
    )
    exchanges = Exchanges.MODELS
    settings = frozenset({"gossip_gamma"})

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"codec": "bf16", "outer_momentum": 0.5}

    def check(self, sync: Sync) -> None:
        """See `Strategy`. Where the bound on γ is from, see `collectives.gossip`."""
        if sync.codec not in ("bf16", "fp32"):
            raise ValueError('strategy = "gossip" sends parameters and not updates: use codec bf16 or fp32')
        if sync.norm_clip or sync.error_feedback != 1:
            raise ValueError('norm_clip and error_feedback have no meaning with strategy = "gossip"')
        limit = 2 * (1 - sync.outer_momentum**2)
        if sync.gossip_gamma >= limit:
            raise ValueError(f"gossip_gamma is {sync.gossip_gamma}; with this outer_momentum it must be < {limit:.4g}")
