"""The strategy `rollouts`: completions in place of parameters. Its settings are the section [rollouts]."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.protocol.strategies.strategy import Exchanges, Strategy


class Rollouts(Strategy):
    """Each node trains a policy of its own, also on what others' policies answered."""

    name = "rollouts"
    summary = "no parameters at all but completions of tasks, see [rollouts]."
    exchanges = Exchanges.ROLLOUTS

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `Strategy`."""
        return {"inner_steps": 1}
