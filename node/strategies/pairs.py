"""Rounds in pairs: each member holds a state of its own, and exchanges it with one partner after the other."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.node.gossip.engine import TAKERS, GossipEngine
from shoal.node.gossip.exchange import GossipExchange
from shoal.node.parts import Parts
from shoal.node.state.fetching import Fetcher
from shoal.node.strategies.certified import engine_parts
from shoal.node.strategies.rounds import ApartRounds
from shoal.protocol.donors import DonorScores
from shoal.swarm.members import Taker


class PairRounds(ApartRounds):
    """A node's part in rounds with partners."""

    _engine: GossipEngine

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        fetcher = Fetcher(lanes=parts.lanes, chunks=parts.chunks, scores=DonorScores())
        exchange = GossipExchange(cache=parts.vectors, fetcher=fetcher, ask=parts.ask)
        self.engine = self._engine = GossipEngine(engine_parts(parts), exchange, parts.layouts)

    @property
    def takers(self) -> Mapping[type, Taker]:
        """See `Rounds`."""
        return dict.fromkeys(TAKERS, self._engine.hear)

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """See `Rounds`."""
        await self._engine.run(numel=numel, buffers=buffers)
