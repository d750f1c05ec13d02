"""Custody of the chain and of the state at its head: from disk, from certificates as they come, and from peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.state import CertifiedState
from shoal.node.catchup import CatchUp
from shoal.node.holds import Holds
from shoal.node.outcome import Progress, StateFetched
from shoal.node.states import StateShelf
from shoal.node.store import Store
from shoal.protocol.certificate import Chain
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Value
from shoal.swarm.links import Links

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustodyParts:
    """What custody works with."""

    store: Store
    chain: Chain
    shelf: StateShelf
    catchup: CatchUp
    links: Links
    holds: Holds
    on_progress: Callable[[Progress], None]


class Custody:
    """The chain, and the state that belongs to it. `state` may lag behind the head; `current` says whether it does."""

    def __init__(self, parts: CustodyParts) -> None:
        self._p = parts
        self.state: CertifiedState | None = None

    @property
    def head(self) -> Value:
        """The newest decided value."""
        return self._p.chain.head

    @property
    def chain(self) -> Chain:
        """All certificates this node has."""
        return self._p.chain

    @property
    def current(self) -> bool:
        """Whether the state at the head is here."""
        return self.state is not None and self.state.round == self.head.round

    @property
    def digest(self) -> bytes:
        """The digest of the state that is here."""
        assert self.state is not None
        return self._p.shelf.header(self.state).digest

    def expect(self, codec: str, numel: int, chunk_values: int) -> None:
        """The model is built: plans that are fetched have this shape."""
        self._p.catchup.shape = (codec, numel, chunk_values)

    async def load(self) -> None:
        """Take up the newest state on disk that a certificate vouches for, and the finals."""
        await trio.to_thread.run_sync(self._p.shelf.load_finals)
        for state in await trio.to_thread.run_sync(self._p.shelf.load_states):
            header = await trio.to_thread.run_sync(self._p.shelf.header, state)
            if 0 < state.round <= self.head.round and header.digest == self._p.chain.value(state.round).digest:
                self.state = state
                self._p.shelf.put(state, header)
                return

    async def adopt(self, state: CertifiedState) -> None:
        """Hold `state`, serve it, and keep it on disk. Raises StorageError."""
        header = await trio.to_thread.run_sync(self._p.shelf.header, state)
        self.state = state
        self._p.shelf.put(state, header)
        if state.round:
            await trio.to_thread.run_sync(self._p.shelf.save_state, state)

    async def append(self, certificate: Certificate) -> None:
        """Extend the chain, in memory and on disk. Raises RemoteError if it does not follow, StorageError."""
        self._p.chain.extend(certificate)
        await trio.to_thread.run_sync(self._p.store.append_certificate, certificate)
        await trio.to_thread.run_sync(self._p.store.decided, certificate.value.round)

    async def extend(self, first: Collection[PeerId], *, others: bool) -> list[PeerId]:
        """Fetch newer certificates from the peers in `first` and, with `others`, from all that are linked.

        Returns all linked peers, those in `first` before the others. Raises StorageError.
        """
        peers = sorted(self._p.links.linked(), key=lambda peer: peer not in first)
        for peer in peers if others else [p for p in peers if p in first]:
            try:
                await self._extend_from(peer)
            except (NetworkError, RemoteError) as error:
                logger.info("certificates from %s: %s", peer, error)
        return peers

    async def _extend_from(self, peer: PeerId) -> None:
        while True:
            part = await self._p.catchup.certificates(self.head.round, peer)
            for certificate in part.certificates:
                await self.append(certificate)
            if not part.certificates or self.head.round >= part.head:
                return

    async def finals(self, round: int, peers: list[PeerId]) -> Finals:
        """The finals that the certificate of `round` names. Raises NetworkError if neither disk nor peers have them."""
        return await self._p.catchup.finals(self._p.chain.value(round).plan, peers)

    async def fetch(self, peers: list[PeerId]) -> CertifiedState | None:
        """The state at the head, from peers; None when none of them can help now."""
        try:
            return await self._p.catchup.advance(self.state, self._p.chain, peers, self._on_chunk)
        except NetworkError as error:
            logger.info("%s", error)
            return None

    async def fetch_initial(self, founder: PeerId) -> CertifiedState | None:
        """S(0) as this founder has it; None if it cannot be had now."""
        try:
            return await self._p.catchup.advance(None, self._p.chain, [founder], self._on_chunk)
        except NetworkError as error:
            logger.info("%s", error)
            return None

    async def _on_chunk(self, done: int, total: int) -> None:
        self._p.on_progress(StateFetched(done_chunks=done, total_chunks=total))
        await self._p.holds.at(self.head.round + 1, "transfer", done / total)
