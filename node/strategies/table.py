"""The table of rounds: by which a node takes part, for what its swarm's strategy exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shoal.node.parts import Parts
from shoal.node.strategies.certified import CertifiedRounds
from shoal.node.strategies.pairs import PairRounds
from shoal.node.strategies.rounds import Rounds
from shoal.protocol.strategies.strategy import Exchanges


def _rollouts(parts: Parts) -> Rounds:
    from shoal.node.strategies.rollouts import RolloutRounds  # with all that only an agent's node needs

    return RolloutRounds(parts)


ROUNDS: Final[Mapping[Exchanges, Callable[[Parts], Rounds]]] = {
    Exchanges.UPDATES: CertifiedRounds,
    Exchanges.GRADIENTS: CertifiedRounds,
    Exchanges.MODELS: PairRounds,
    Exchanges.ROLLOUTS: _rollouts,
}


def rounds_of(parts: Parts) -> Rounds:
    """The rounds of a node in its swarm. Raises ConfigError as the engines do."""
    return ROUNDS[parts.config.manifest.strategy.exchanges](parts)
