"""Custody of the chain and of the state at its head: from disk, from certificates as they come, and from peers.

A state that this node computed is saved beside the rounds that follow: until it is, an older one and the finals since
lead to it (`durability = "disk"`), or peers have it (`"memory"`). One that came from elsewhere is on disk before
anything follows from it, and so is S(0), which nobody certifies: what does follow from it, tells whether it is the one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.catchup import CatchUp
from shoal.node.holds import Holds
from shoal.node.outcome import Progress, StateFetched
from shoal.node.state_saver import StateSaver
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
        self._saver = StateSaver(parts.shelf)
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
        return self._p.shelf.digest(self.state)

    def expect(self, codec: str, numel: int, chunk_values: int) -> None:
        """The model is built: plans that are fetched have this shape."""
        self._p.catchup.shape = (codec, numel, chunk_values)

    async def run(self) -> None:
        """Save states beside the rounds, until cancelled. Raises StorageError.

        Cancellation: the newest state is saved first.
        """
        await self._saver.run()

    async def load(self) -> None:
        """Take up the newest state that the disk has, or leads to, and that a certificate vouches for; and the finals.

        Raises StorageError.
        """
        shelf = self._p.shelf
        await trio.to_thread.run_sync(shelf.tidy)
        for round in shelf.saved_rounds():
            saved = await self._saved(round)
            state = None if saved is None else await self._p.catchup.replay(saved, self._p.chain, ())
            if saved is not None and state is not None and state.round > 0:
                self._saver.begin(round)
                self._hold(state, await trio.to_thread.run_sync(shelf.header, state))
                if state is not saved:
                    await self._saver.save_soon(state)
                break
        await trio.to_thread.run_sync(shelf.load_finals)

    async def _saved(self, round: int) -> CertifiedState | None:
        """The state of a round on disk, if it is the certified one. S(0) may be: see what follows from it."""
        if round > self.head.round:
            return None
        state = await trio.to_thread.run_sync(self._p.shelf.load_state, round)
        if state is None or round == 0:
            return state
        header = await trio.to_thread.run_sync(self._p.shelf.header, state)
        return state if header.digest == self._p.chain.value(round).digest else None

    def _hold(self, state: CertifiedState, header: StateHeader) -> None:
        self.state = state
        self._p.shelf.put(state, header)

    async def adopt(self, state: CertifiedState) -> None:
        """Hold a state that was not computed here from the one before, serve it, and have it on disk.

        Raises StorageError.
        """
        self._hold(state, await trio.to_thread.run_sync(self._p.shelf.header, state))
        await self._saver.save_now(state)

    async def follow(self, state: CertifiedState, header: StateHeader) -> None:
        """Hold a state that this node computed from the one before, and serve it; it is saved in time.

        Waits only where the disk is far behind.
        """
        self._hold(state, header)
        await self._saver.save_soon(state)

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
