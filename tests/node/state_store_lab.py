"""A state store over a data folder of its own, in a world of donors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import trio

from shoal.collectives.state import CertifiedState
from shoal.node.holds import Holds
from shoal.node.options import Hold
from shoal.node.outcome import Progress
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.key_use import KeyUse
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.errands import Performers, carry_out
from shoal.node.state.state_store import StateStore, StateStoreParts
from shoal.node.state.store import Store
from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import CatchingUp
from shoal.protocol.chain import Chain
from shoal.protocol.errands import AwaitLinks, Clock, Errand, LookElsewhere, Steps
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import GenesisFetched
from shoal.protocol.messages import NO_HASH, Value
from shoal.protocol.peering import ChainPart, FetchAnswer, FetchRequest
from shoal.protocol.surroundings import Rules
from tests.node.donors import ME, Donor, World
from tests.node.ledger import OUTER, Ledger

GRACE_S = 4.0
GOOD, BAD = PeerId("good"), PeerId("bad")


async def _linked_already(request: AwaitLinks) -> None:
    pass


async def _unheard(request: Broadcast) -> None:
    pass


async def _nowhere_else(request: LookElsewhere) -> dict[str, Chain]:
    await trio.lowlevel.checkpoint()
    return {}


NOWHERE_ELSE: Performers = {AwaitLinks: _linked_already, LookElsewhere: _nowhere_else}
"""For a node all of whose peers are linked, each in one place."""


class Home:
    """My state store, over my own folder, in a world of donors."""

    is_follower = takes_images = False

    def __init__(self, world: World, store: Store, holds: tuple[Hold, ...] = ()) -> None:
        self.world = world
        self.store = store
        self.events = EventLog(store.folder / "events.jsonl")
        self.progress: list[Progress] = []
        self.holds = Holds(holds, self.events)
        chain = world.ledger.empty_chain()
        self.state_store = StateStore(
            StateStoreParts(
                store=store,
                chain=chain,
                cache=world.cache,
                catchup=world.catchup,
                earlier=EarlierStates(store.folder, chain=chain, cache=world.cache, outer=OUTER),
                key_use=KeyUse(store.folder, ME, store.durable_records(), take_over=False),
                holds=self.holds,
                log=RoundLog(self.events),
                on_progress=self.progress.append,
            )
        )
        self.peers: Collection[PeerId] | None = None
        """Who is linked, if not all of the world."""
        self.fork_watch = ForkWatch(self)
        self.catching_up = CatchingUp(ME, self, self.state_store.catchup.scores, self.fork_watch)
        for certificate in store.certificates():
            self.state_store.chain.extend(certificate)

    async def catch_up(self, *first: PeerId) -> list[PeerId]:
        """Ask for newer entries of the chain, those in `first` first; all who are linked, in that order."""
        peers = sorted(self.world.donors, key=lambda peer: peer not in first)
        self._clock.now = trio.current_time()
        await self._outcome(self.catching_up._look_for_entries(self.catching_up._in_order(peers, first)))
        return peers

    async def fetch(self, peers: Sequence[PeerId]) -> CertifiedState | None:
        """The state at the head, from peers; None when none of them can help now."""
        self.peers = peers
        return await self._outcome(self.catching_up._pursue())

    async def fetch_initial(self, founder: PeerId) -> CertifiedState | None:
        """S(0) as this founder has it."""
        found: GenesisFetched | None = await self._outcome(self.catching_up._fetch_genesis(founder))
        return None if found is None else cast(CertifiedState, found.state)

    async def fetch_earlier(
        self, value: Value, peers: Collection[PeerId], *, initial: bytes = NO_HASH
    ) -> CertifiedState | None:
        """The state that `value` led to, from peers."""
        self.peers = peers
        before = self.chain.back_to(value, initial=initial)
        return await self._outcome(self.catching_up._fetch_earlier(before, value.round))

    @property
    def _clock(self) -> Clock:
        return self.catching_up._search.clock

    async def _outcome(self, steps: Steps) -> Any:
        performers = {**self.state_store.performers, **NOWHERE_ELSE, Broadcast: _unheard}
        return await carry_out(Errand(steps, self._clock), performers)

    # -- what catching up looks at ---------------------------------------------------------------------------

    forks: Sequence[Fork] = ()

    @property
    def chain(self) -> Chain:
        return self.state_store.chain

    @property
    def current(self) -> bool:
        return self.state_store.current

    @property
    def held(self) -> CertifiedState | None:
        return self.state_store.state

    @property
    def replayed_rounds(self) -> int:
        return self.state_store.catchup.replayed_rounds

    @property
    def donors(self) -> Collection[PeerId]:
        return self.state_store.catchup.donated

    def linked(self) -> Collection[PeerId]:
        return frozenset(self.world.donors) if self.peers is None else self.peers

    def rules(self, round: int) -> Rules:
        settings: Any = SimpleNamespace(grace_s=GRACE_S)
        return Rules(settings=settings, staleness_rounds=3)


@asynccontextmanager
async def home(world: World, *holds: Hold) -> AsyncIterator[Home]:
    with Store(world.folder / str(ME)) as store:
        made = Home(world, store, holds)
        try:
            yield made
        finally:
            made.events.close()


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    if rounds:
        ledger.certify(rounds)
    return ledger


def liar(donor: Donor, change: Callable[[ChainPart], FetchAnswer | bytes]) -> None:
    """Have a donor change the certificates it gives."""
    honest = donor.answer

    def answer(request: FetchRequest) -> FetchAnswer | bytes:
        given = honest(request)
        return change(given) if isinstance(given, ChainPart) else given

    donor.answer = answer
