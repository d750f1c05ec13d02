"""Rounds in pairs: each member holds a state of its own, and exchanges it with one partner after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.node.gossip.engine import TAKERS, GossipEngine
from shoal.node.gossip.exchange import GossipExchange
from shoal.node.parts import Parts
from shoal.node.state.fetching import Fetcher
from shoal.node.strategies.certified import engine_parts
from shoal.node.strategies.rounds import Rounds, Standing
from shoal.protocol.chain import Position
from shoal.protocol.donors import DonorScores
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.swarm.members import Taker


class PairRounds(Rounds):
    """A node's part in rounds with partners."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        fetcher = Fetcher(lanes=parts.lanes, chunks=parts.chunks, scores=DonorScores())
        exchange = GossipExchange(cache=parts.vectors, fetcher=fetcher, ask=parts.ask)
        self.engine = self._engine = GossipEngine(engine_parts(parts), exchange, parts.layouts)

    @property
    def takers(self) -> Mapping[type, Taker]:
        """See `Rounds`."""
        return dict.fromkeys(TAKERS, self._engine.hear)

    @property
    def contributed(self) -> Callable[[PeerId], bool] | None:
        """See `Rounds`."""
        return self._engine.contributors.__contains__

    @property
    def paused(self) -> bool:
        """See `Rounds`."""
        return self._p.training_client.paused

    @property
    def position(self) -> Position:
        """See `Rounds`."""
        return Term(), self._engine.state_round

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """See `Rounds`."""
        await self._engine.run(numel=numel, buffers=buffers)

    def standing(self) -> Standing:
        """See `Rounds`."""
        members = (self._p.identity.peer_id, *sorted(self._engine.others))
        return Standing(term=Term(), round=self._engine.state_round, members=members)
