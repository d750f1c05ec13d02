"""How a node comes to the state at the head of the chain, at its start and whenever it falls behind.

    at the start      from disk; as a founder, drawn from the seed; else from peers, tried until it is here
    behind            a peer has certified more, or finals were not to be had: certificates, then finals or the state
    a peer behind     what it says of an older round is answered with that round's certificate
    another S(0)      before anything is certified, the first founder's initial state replaces the one drawn here
    ever behind       rounds are shorter than coming to a state takes: say that this node comes, so that a lead waits
                      for it, and follow the chain until that one stands still (`protocol.newcomers`)

The engine says when, and begins a round once the state is here; `Custody` holds what is obtained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from shoal.collectives.state import CertifiedState
from shoal.node.rounds.engine_parts import EngineParts
from shoal.protocol.chain import Position
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Leave, Message, Ready, RoundMessage
from shoal.protocol.newcomers import Newcomers, coming

ANSWER_PERIOD_S = 1.0
RETRY_S = 1.0
"""Between two attempts to fetch what peers could not give."""

logger = logging.getLogger(__name__)


class StateSync:
    """Brings chain and state up to date. All of it runs in the engine's task."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._me = parts.identity.peer_id
        self._custody = parts.custody
        self._ahead: set[PeerId] = set()
        self._retry_at = 0.0
        self._answered: dict[PeerId, float] = {}
        self._took_s: float | None = None  # to come to the state at the head, the last time
        self.newcomers = Newcomers()
        """Who is on the way to a state, for the rounds that this node leads."""

    def ahead(self, peer: PeerId) -> None:
        """This peer has certified a round that is not certified here, or says so."""
        self._ahead.add(peer)

    def answer_late(self, peer: PeerId, position: Position, message: Message) -> None:
        """Anything of an older round is answered with its certificate, or with the rebase that abandoned it, at most
        once a second per peer."""
        now = trio.current_time()
        due = now - self._answered.get(peer, float("-inf")) > ANSWER_PERIOD_S
        if due and isinstance(message, RoundMessage) and not isinstance(message, Leave):
            certificate = self._custody.chain.decided(position)
            if certificate is not None:
                self._answered[peer] = now
                self._p.links.send(peer, certificate)

    def due(self, now: float, *, in_round: bool) -> bool:
        """Whether to catch up at this time. `in_round`: the node takes part in the round after its head."""
        return (bool(self._ahead) or not in_round) and now >= self._retry_at

    async def obtain(self, before_attempt: Callable[[], None]) -> None:
        """Get the state at the head: from disk, as a founder from the seed, or from others, however often it takes.

        Raises StorageError, ConfigError when the swarm's parameters are not this workload's.
        """
        await self._custody.load()
        origin = self._custody.chain.standing
        if origin.round == 0 and self._me in origin.members and not self._custody.current:
            await self._draw()
        while not self._custody.current:
            before_attempt()
            await self._fetch(from_all=True)
            if not self._custody.current:
                await trio.sleep(RETRY_S)

    async def _draw(self) -> None:
        """As a founder, draw S(0); where the swarm went back to another one, that is left to peers."""
        state, certified = await self._p.desk.initial_state(), self._custody.chain.digest(0)
        if certified in (NO_HASH, await trio.to_thread.run_sync(self._p.shelf.digest, state)):
            await self.adopt(state)

    async def catch_up(self, *, in_round: bool) -> bool:
        """Bring chain and state up to date, as far as peers can help; what they cannot is due again later.

        Returns whether the head moved: the round under way here is over then, even if its state is still missing.
        Raises StorageError, ConfigError when the swarm's parameters are not this workload's.
        """
        self._retry_at = trio.current_time() + RETRY_S
        before = self._custody.head.hash
        await self._fetch(from_all=not in_round)
        moved = self._custody.head.hash != before
        if moved and self._custody.current:
            self._retry_at = trio.current_time()
        return moved

    async def _fetch(self, *, from_all: bool) -> None:
        began = trio.current_time()
        peers = await self._custody.extend(self._ahead, others=from_all)
        self._ahead.clear()
        if self._custody.current:
            return
        awaited = self._can_be_awaited()
        if awaited:
            self._p.links.broadcast(coming(self._custody.head))
        state = await self._custody.fetch(peers, closely=awaited)
        if state is not None:
            await self.adopt(state)
            self._took_s = trio.current_time() - began

    def _can_be_awaited(self) -> bool:
        """Whether this node, no member, was overtaken though it needs far less than a lead would wait for it."""
        head = self._custody.head
        manifest = self._custody.chain.amended(head.next_round) or self._p.config.manifest
        quick = self._took_s is not None and self._took_s <= manifest.round.grace_s / 2
        return quick and self._me not in head.members

    def another_genesis(self, peer: PeerId, ready: Ready) -> bool:
        """Whether the first founder drew another S(0) than this machine, while its word still decides.

        The same seed may give other last bits on another CPU. Once something is bound here, others may have decided on
        a state that follows from the one here.
        """
        head = self._custody.head
        if head.round or peer != head.planner or peer == self._me or ready.state == self._custody.digest:
            return False
        return not any(record.kind in ("prepare", "vote", "propose") for record in self._p.store.durable_records())

    async def fetch_genesis(self, founder: PeerId) -> CertifiedState | None:
        """S(0) as the first founder has it, to be adopted; None if it cannot be had now."""
        state = await self._custody.fetch_initial(founder)
        if state is not None:
            logger.warning("the initial parameters drawn here differ from the first founder's; using theirs")
        return state

    async def adopt(self, state: CertifiedState) -> None:
        """Hold a state that was not computed here from the one before.

        Raises ConfigError when it is of another model, StorageError.
        """
        if state.layout_hash != self._p.desk.layout_hash:
            raise ConfigError(
                "the swarm's model has other parameters than this workload builds here; install the same version of it"
            )
        await self._custody.adopt(state)
