"""Start of a node of the strategy `gossip`: the state on which it begins.

    from disk          its own newest state, if its file is whole
    from a peer        who has trained: a snapshot, checked against the digest that the peer signed
    from the seed      as a founder, once all other founders were heard and nobody has trained, or after `timeout_s`

Whoever is no founder asks until somebody has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import trio

from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.gossip.exchange import GossipExchange
from shoal.node.outcome import Progress, StateFetched
from shoal.node.state.state_files import header_in
from shoal.node.state.states import StateCache
from shoal.node.state.tensor_files import TensorFile
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError, StorageError
from shoal.protocol.gossip_messages import Standing
from shoal.protocol.identity import PeerId

ASK_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class GossipStart:
    """Obtains the first state. `standings`: what peers said of theirs, to be filled by the engine.

    accepts: raises ConfigError, naming the parameter, if a peer's snapshot is of another layout than the model here.
    """

    def __init__(
        self,
        *,
        cache: StateCache,
        exchange: GossipExchange,
        training_client: TrainingClient,
        founder: bool,
        others: Collection[PeerId],
        accepts: Callable[[bytes], None],
        timeout_s: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._cache = cache
        self._exchange = exchange
        self._training_client = training_client
        self._founder = founder
        self._others = frozenset(others)
        self._accepts_layout = accepts
        self._on_progress = on_progress
        self._draws_at = trio.current_time() + timeout_s
        self._ask_at = float("-inf")
        self.standings: dict[PeerId, Standing] = {}

    def ask_due(self, now: float) -> bool:
        """True if peers are to be asked where they stand; once every ASK_PERIOD_S."""
        due = now >= self._ask_at
        if due:
            self._ask_at = now + ASK_PERIOD_S
        return due

    async def from_disk(self) -> CertifiedState | None:
        """The newest whole state of this node's own. Raises ConfigError if it is of another model."""
        return await trio.to_thread.run_sync(self._read)

    def _read(self) -> CertifiedState | None:
        for round in self._cache.saved_rounds():
            state = self._cache.load_state(round)
            if state is None:
                continue
            self._check_layout(state.layout_hash)
            header = self._cache.header(state)
            try:
                written = header_in(TensorFile(self._cache.state_file(round)))
            except StorageError:
                written = None
            if written is not None and written.digest == header.digest:
                self._cache.put(state, header)
                return state
            logger.warning("the state of round %d on disk is damaged, and is ignored", round)
        return None

    async def attempt(self, now: float) -> CertifiedState | None:
        """A state to begin on, as far as is known by now. Raises ConfigError if it is of another model."""
        ahead = sorted(self.standings, key=lambda peer: self.standings[peer].round, reverse=True)
        for peer in ahead:
            if self.standings[peer].round > 0:
                state = await self._from_peer(peer, self.standings.pop(peer))
                if state is not None:
                    return state
        heard_all = self._others <= self.standings.keys()
        if not self._founder or not (heard_all or now >= self._draws_at):
            return None
        state = await self._training_client.initial_state(self._cache.vectors)
        header = await trio.to_thread.run_sync(self._cache.header, state)
        self._cache.put(state, header)
        return state

    async def _from_peer(self, peer: PeerId, standing: Standing) -> CertifiedState | None:
        async def show(fetched: StateFetched) -> None:
            self._on_progress(fetched)
            await trio.lowlevel.checkpoint()

        try:
            state, header = await self._exchange.snapshot(peer, standing, self._accepts, show)
        except (NetworkError, RemoteError) as error:
            logger.warning("no snapshot from %s: %s", peer, error)
            return None
        self._cache.put(state, header)
        logger.info("begins on the snapshot of round %d of %s", state.round, peer)
        return state

    def _accepts(self, header: StateHeader) -> None:
        self._accepts_layout(header.layout)

    def _check_layout(self, layout: bytes) -> None:
        if layout != self._training_client.layout_hash:
            raise ConfigError(
                "the state in this data folder has other parameters than this workload builds here; install the same "
                "version of it, or choose another --data-dir"
            )
