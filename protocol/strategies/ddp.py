"""The strategy `ddp`: what synchronous data parallel is, the mean of all gradients at every step.

So it clips no norms of contributions unless told to.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.protocol.strategies.strategy import AdamW, Exchanges, OuterStep, Strategy, Sync


class DataParallel(Strategy):
    """One step of AdamW a round, by the mean gradient of all nodes."""

    name = "ddp"
    summary = "each round one AdamW step on the mean gradient, by [inner], which all nodes wait for."
    exchanges = Exchanges.GRADIENTS

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"inner_steps": 1, "codec": "fp32"}

    def check(self, sync: Sync) -> None:
        """See `Strategy`."""
        if sync.inner_steps != 1:
            raise ValueError(f'inner_steps is {sync.inner_steps}; with strategy = "ddp" it is 1, or left out')
        if (sync.outer_lr, sync.outer_momentum) != (0.7, 0.9):
            raise ValueError('outer_lr and outer_momentum have no meaning with strategy = "ddp": it steps by [inner]')

    def outer_step(self, sync: Sync) -> OuterStep:
        """See `Strategy`."""
        return AdamW()
