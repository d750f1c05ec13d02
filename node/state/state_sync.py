"""How a node comes to the state at the head of the chain, at its start and whenever it falls behind.

    at the start      from disk; as a founder, drawn from the seed; else from peers, tried until it is here
    behind            finals were not to be had: the state, beside the engine, while no round is under way here
    claimed ahead     certificates from who claims to be, beside the round under way, which goes on until one of them
                      holds and shows that it is over (`shoal.protocol.claims`)
    another S(0)      before anything is certified, the first founder's initial state replaces the one drawn here
    ever behind       rounds are shorter than coming to a state takes: say that this node comes, so that a lead waits
                      for it, and follow the chain until that one stands still (`protocol.newcomers`)

Whatever waits for a peer is a job of `run`, and what comes of it is put to the engine as an input. So chain and state
change in the engine's task only, which waits for nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from shoal.collectives.state import CertifiedState
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.inbox import AnotherGenesis, CaughtUp, Fetched, Own
from shoal.node.rounds.orders import obeyed
from shoal.protocol.chain import Chain, Position
from shoal.protocol.claims import Claims
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Entry
from shoal.protocol.newcomers import coming

RETRY_S = 1.0
"""Between two attempts to fetch what peers could not give."""
JOBS_LIMIT = 512
"""More than peers that can be asked at once: one job for each, one for the state, one for S(0)."""

logger = logging.getLogger(__name__)


class StateSync:
    """Brings chain and state up to date. `run` is a task beside the engine; the rest runs in the engine's task.

    put: takes what comes of a job, as an input of the engine's. look_up: called beside the engine once the state at the
    head is to be had, with the peers that may have what this node's own contribution is settled by.
    """

    def __init__(
        self, parts: EngineParts, *, put: Callable[[Own], None], look_up: Callable[[Sequence[PeerId]], Awaitable[None]]
    ) -> None:
        self._p = parts
        self._me = parts.identity.peer_id
        self._state_store = parts.state_store
        self._state_store.take = self._hand_over
        self._state_store.replace = self._hand_over_chain
        self._put = put
        self._look_up = look_up
        self._claims = Claims(parts.state_store.scores)
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](JOBS_LIMIT)
        self._coming = self._fetching_genesis = False
        self._fresh = False  # the head was decided or brought here just now: nobody has to be asked for a newer one
        self._retry_at = 0.0
        self._took_s: float | None = None  # to come to the state at the head, the last time

    async def run(self) -> None:
        """Do what waits for peers, until cancelled.

        Raises ConfigError when the swarm's parameters are not this workload's. Cancellation: what was put stands.
        """
        async with trio.open_nursery() as nursery:
            async for job in self._job_queue:
                nursery.start_soon(job)

    # -- what peers claim --------------------------------------------------------------------------------------

    def ahead(self, peer: PeerId, position: Position) -> None:
        """This peer claims that all before `position` is decided."""
        self._claims.heard(peer, position, members=self._state_store.head.members)

    # -- what is due -----------------------------------------------------------------------------------------

    def advance(self, *, in_round: bool) -> None:
        """Begin what is due. in_round: the node takes part in the round after its head."""
        now = trio.current_time()
        if in_round:
            peer = self._claims.next(self._state_store.head, now)
            if peer is not None:
                self._jobs.send_nowait(partial(self._look_into, peer))
        elif not self._coming and now >= self._retry_at:
            self._coming = True
            self._retry_at = now + RETRY_S
            self._jobs.send_nowait(self._come)

    def hurry(self) -> None:
        """The head is of just now, and its state is not here: come to it as soon as the engine has nothing else."""
        self._retry_at, self._fresh = trio.current_time(), True

    async def _look_into(self, peer: PeerId) -> None:
        new = False
        try:
            new = await self._state_store.extend_from(peer)
        except (NetworkError, RemoteError) as error:
            logger.info("certificates from %s: %s", peer, error)
        self._claims.answered(peer, self._state_store.head, trio.current_time(), new=new)

    async def _hand_over(self, peer: PeerId, entries: Sequence[Entry], *, trusted: bool = False) -> int:
        if not entries:
            return 0
        fetched = Fetched(peer, tuple(entries), trusted)
        self._put(fetched)
        return await fetched.outcome()

    async def _hand_over_chain(self, theirs: Chain, height: int) -> None:
        async def carry_out() -> None:
            await self._state_store.replace_chain(theirs, height)
            if not self._coming:
                self.hurry()

        await obeyed(self._put, carry_out)

    async def take(self, fetched: Fetched) -> bool:
        """Check what a peer gave of the chain, in order, and keep what holds; whether the head moved.

        The round under way here is over then, even if its state is still missing. Raises StorageError.
        """
        before = self._state_store.head.hash
        try:
            fetched.new = await self._state_store.take_entries(fetched.peer, fetched.entries, trusted=fetched.trusted)
        except RemoteError as error:
            fetched.fault = error
        finally:
            fetched.taken.set()
        moved = self._state_store.head.hash != before
        if moved and not self._coming:
            self.hurry()
        return moved

    # -- the state at the head -------------------------------------------------------------------------------

    async def load(self) -> None:
        """Take up the state at the head from disk, or, as a founder, draw it from the seed; peers are asked by `run`.

        Raises StorageError, ConfigError when the swarm's parameters are not this workload's.
        """
        await self._state_store.load()
        origin = self._state_store.chain.standing
        if origin.round == 0 and self._me in origin.members and not self._state_store.current:
            await self._draw()

    async def _draw(self) -> None:
        """As a founder, draw S(0); where the swarm went back to another one, that is left to peers."""
        state, certified = await self._p.training_client.initial_state(), self._state_store.chain.digest(0)
        if certified in (NO_HASH, await trio.to_thread.run_sync(self._p.cache.digest, state)):
            await self.adopt(state)

    async def _come(self) -> None:
        """Bring chain and state up to date, as far as peers can help; what they cannot is due again later."""
        began, state = trio.current_time(), None
        first, fresh, self._fresh = self._claims.claimants(self._state_store.head), self._fresh, False
        peers = list(self._p.links.linked())
        if first or not fresh:
            peers = await self._state_store.extend(first, others=True)
        if not self._state_store.current:
            awaited = self._can_be_awaited()
            if awaited:
                self._p.links.broadcast(coming(self._state_store.head))
            state = await self._state_store.fetch(peers, closely=awaited)
        if state is not None or self._state_store.current:
            await self._look_up(peers)
        self._put(CaughtUp(state, trio.current_time() - began))

    async def caught_up(self, event: CaughtUp) -> None:
        """Hold the state that was fetched, if it is still wanted. Raises ConfigError, StorageError."""
        self._coming = False
        state, held = event.state, self._state_store.state
        if state is None or self._state_store.current or not self._state_store.on_branch(state):
            return
        if held is None or state.round > held.round or not self._state_store.on_branch(held):
            await self.adopt(state)
            self._took_s = event.seconds
            self._retry_at = trio.current_time()

    def _can_be_awaited(self) -> bool:
        """Whether this node, no member, was overtaken though it needs far less than a lead would wait for it."""
        head = self._state_store.head
        manifest = self._state_store.chain.amended(head.next_round) or self._p.config.manifest
        quick = self._took_s is not None and self._took_s <= manifest.round.grace_s / 2
        return quick and self._me not in head.members

    # -- S(0) ------------------------------------------------------------------------------------------------

    def fetch_genesis(self, founder: PeerId) -> None:
        """Have S(0) as the first founder has it, unless that is under way; it is tried as often as it is heard of."""
        if not self._fetching_genesis and trio.current_time() >= self._retry_at:
            self._fetching_genesis = True
            self._jobs.send_nowait(partial(self._fetch_genesis, founder))

    async def _fetch_genesis(self, founder: PeerId) -> None:
        state = await self._state_store.fetch_initial(founder)
        self._fetching_genesis = False
        self._retry_at = trio.current_time() + RETRY_S
        if state is not None:
            self._put(AnotherGenesis(state))

    async def take_genesis(self, state: CertifiedState) -> bool:
        """Hold the first founder's S(0); False if it is none. Raises ConfigError, StorageError."""
        if state.round:
            return False
        logger.warning("the initial parameters drawn here differ from the first founder's; using theirs")
        await self.adopt(state)
        return True

    async def adopt(self, state: CertifiedState) -> None:
        """Hold a state that was not computed here from the one before.

        Raises ConfigError when it is of another model, StorageError.
        """
        if state.layout_hash != self._p.training_client.layout_hash:
            raise ConfigError(
                "the swarm's model has other parameters than this workload builds here; install the same version of it"
            )
        await self._state_store.adopt(state)
