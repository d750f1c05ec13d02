"""Start of a node of the strategy `gossip`: the state on which it begins.

    from disk          its own newest state, if its file is whole
    from a peer        who has trained: a snapshot, checked against the digest that the peer signed, of finite values
    from the seed      as a founder, once all other founders were heard and none has trained, or after `timeout_s`

Whoever is no founder asks until somebody has one.

Nothing is certified, so which peer to begin on is a matter of what several say: all founders are heard, or whoever
answers within HEAR_S of the first founder that has trained, or FOUNDERS_S of another that has. Founders count, and
others only where not all founders answer and none of those has trained. A peer is begun on whose round is within
NEAR_ROUNDS of the median of theirs (the lower of two in the middle); a single one is believed. So whoever names a round
far from what the others name is passed over.

What remains trust: the weights of that one peer, and its count of tokens, which schedules follow, are its own word.
Where fewer than half of those who count lie, their round is right, and the weights of one of them may still be wrong:
strangers are so many as anybody likes, so a swarm is as safe to join as its founders are to be reached.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Mapping

import numpy as np
import trio

from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.gossip.exchange import GossipExchange
from shoal.node.outcome import Progress, StateFetched
from shoal.node.state.catchup import KINDS
from shoal.node.state.state_files import header_in
from shoal.node.state.states import StateCache
from shoal.node.state.tensor_files import TensorFile
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError, StorageError
from shoal.protocol.gossip_messages import Standing
from shoal.protocol.identity import PeerId

ASK_PERIOD_S = 1.0
HEAR_S = 3.0
"""From the first answer of a peer that has trained: others may need as long for theirs."""
FOUNDERS_S = 8.0
"""The same, of one that is no founder: anybody can be the first to answer, and founders may take longer to reach."""
HEARD_LIMIT_S = 10.0
"""An answer counts for as long: peers train on, or go."""
SNAPSHOT_DEADLINE_S, SNAPSHOT_LEAST_BYTES_PER_S = 60.0, 64 << 10
"""For a peer's snapshot: so long, and as long as its vectors take at that rate."""
NEAR_ROUNDS = 16
"""Rounds that a peer may be from the median: each trains at its own pace, and a slow one is led to others' rounds."""

logger = logging.getLogger(__name__)


class GossipStart:
    """Obtains the first state. `note` tells it what peers say of theirs.

    others: the founders beside this node. accepts: raises ConfigError, naming the parameter, if a peer's snapshot is of
    another layout than the model here.
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
        numel: int,
        timeout_s: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._cache = cache
        self._exchange = exchange
        self._training_client = training_client
        self._founder = founder
        self._others = frozenset(others)
        self._accepts_layout = accepts
        self._numel = numel
        self._on_progress = on_progress
        self._draws_at = trio.current_time() + timeout_s
        self._ask_at, self._decides_at = -math.inf, math.inf
        self._heard: dict[PeerId, tuple[float, Standing]] = {}
        self._passed_over: set[PeerId] = set()  # until they are asked again
        self._refused: set[PeerId] = set()

    def ask_due(self, now: float) -> bool:
        """True if peers are to be asked where they stand; once every ASK_PERIOD_S."""
        due = now >= self._ask_at
        if due:
            self._ask_at = now + ASK_PERIOD_S
            self._passed_over.clear()
        return due

    def note(self, peer: PeerId, standing: Standing, now: float) -> None:
        """A peer says where it stands."""
        self._heard[peer] = now, standing
        if standing.round:
            self._decides_at = min(self._decides_at, now + (HEAR_S if peer in self._others else FOUNDERS_S))

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
        self._heard = {peer: heard for peer, heard in self._heard.items() if now - heard[0] <= HEARD_LIMIT_S}
        standings = {peer: said for peer, (_, said) in self._heard.items()}
        heard_all = self._others <= standings.keys()
        if heard_all or now >= self._decides_at:
            for peer in self._to_begin_on({peer: said.round for peer, said in standings.items()}, heard_all=heard_all):
                state = await self._from_peer(peer, standings[peer])
                if state is not None:
                    return state
                self._passed_over.add(peer)
        no_founder_has_trained = heard_all and not any(standings[peer].round for peer in self._others)
        if not self._founder or not (no_founder_has_trained or now >= self._draws_at):
            return None
        try:
            state = await self._training_client.initial_state(self._cache.vectors)
        except NetworkError as error:  # it is started again, or its user's loop is away
            logger.warning("no state to begin on yet: %s", error)
            return None
        header = await trio.to_thread.run_sync(self._cache.header, state)
        self._cache.put(state, header)
        return state

    def _to_begin_on(self, rounds: Mapping[PeerId, int], *, heard_all: bool) -> list[PeerId]:
        """Peers whose snapshot to ask for, the best first. rounds: of each that was heard, 0 of one without a state."""
        trained = {peer: round for peer, round in rounds.items() if round > 0}
        founders = {peer: round for peer, round in trained.items() if peer in self._others}
        counted = founders if founders or heard_all else trained
        if not counted:
            return []
        median = statistics.median_low(counted.values())
        away = {peer: abs(round - median) for peer, round in counted.items()}
        near = [peer for peer in counted if away[peer] <= NEAR_ROUNDS]
        return sorted(set(near) - self._passed_over - self._refused, key=lambda peer: (away[peer], peer))

    async def _from_peer(self, peer: PeerId, standing: Standing) -> CertifiedState | None:
        async def show(fetched: StateFetched) -> None:
            self._on_progress(fetched)
            await trio.lowlevel.checkpoint()

        bytes_expected = len(KINDS) * 4 * self._numel  # at most
        deadline_s = SNAPSHOT_DEADLINE_S + bytes_expected / SNAPSHOT_LEAST_BYTES_PER_S
        try:
            with trio.fail_after(deadline_s):
                state, header = await self._exchange.snapshot(peer, standing, self._accepts, show)
        except trio.TooSlowError:
            logger.warning("no snapshot from %s within %.0f s", peer, deadline_s)
            return None
        except (NetworkError, RemoteError) as error:
            logger.warning("no snapshot from %s: %s", peer, error)
            return None
        except ConfigError as error:
            if peer in self._others:
                raise
            self._refuse(peer, str(error))
            return None
        if not await trio.to_thread.run_sync(_is_finite, state):
            self._refuse(peer, "its weights are not finite")
            return None
        self._cache.put(state, header)
        logger.info("begins on the snapshot of round %d of %s", state.round, peer)
        return state

    def _refuse(self, peer: PeerId, why: str) -> None:
        self._refused.add(peer)
        logger.warning("no start on the snapshot of %s: %s", peer, why)

    def _accepts(self, header: StateHeader) -> None:
        self._accepts_layout(header.layout)
        if header.numel != self._numel:  # a hash of names and shapes says nothing of who copied it
            raise RemoteError(f"its state has {header.numel} values, and that of this model {self._numel}")

    def _check_layout(self, layout: bytes) -> None:
        if layout != self._training_client.layout_hash:
            raise ConfigError(
                "the state in this data folder has other parameters than this workload builds here; install the same "
                "version of it, or choose another --data-dir"
            )


def _is_finite(state: CertifiedState) -> bool:
    """True if all values are: what is not finite shows in their sum, and finite ones of float32 have a finite one."""
    return all(math.isfinite(state.vector(kind).sum(dtype=np.float64)) for kind in state.kinds)
