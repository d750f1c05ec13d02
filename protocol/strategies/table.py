"""The table of strategies: all that there are, by the name that a manifest gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from shoal.protocol.strategies.ddp import DataParallel
from shoal.protocol.strategies.diloco import DiLoCo
from shoal.protocol.strategies.gossip import Gossip
from shoal.protocol.strategies.rollouts import Rollouts
from shoal.protocol.strategies.sparse import Sparse
from shoal.protocol.strategies.strategy import Strategy
from shoal.protocol.strategies.streaming import Streaming

STRATEGIES: Final[dict[str, Strategy]] = {
    strategy.name: strategy for strategy in (DiLoCo(), DataParallel(), Streaming(), Sparse(), Gossip(), Rollouts())
}
DEFAULT_STRATEGY: Final = DiLoCo.name
SHOWN_CHARS = 64
"""Of a name that no strategy has."""


def strategy_named(name: str) -> Strategy:
    """The strategy that a manifest calls so. Raises ValueError, naming those that there are."""
    found = STRATEGIES.get(name)
    if found is None:
        raise ValueError(f"{name[:SHOWN_CHARS]!r} is none of {', '.join(STRATEGIES)}")
    return found


def named(strategies: Iterable[Strategy]) -> str:
    """Names in quotes, for a sentence: `"diloco" or "streaming"`."""
    return " or ".join(f'"{strategy.name}"' for strategy in strategies)


def with_strategy_defaults(tables: dict[str, Any]) -> dict[str, Any]:
    """`tables` with what the strategy implies for [sync], in the place of what is left out.

    Raises ValueError for a strategy that there is not.
    """
    sync = tables.get("sync")
    if not isinstance(sync, dict) or not isinstance(name := sync.get("strategy", DEFAULT_STRATEGY), str):
        return tables
    try:
        strategy = strategy_named(name)
    except ValueError as error:
        raise ValueError(f"{error} - at `$.sync.strategy`") from None
    return {**tables, "sync": {**strategy.defaults(sync), **sync}}
