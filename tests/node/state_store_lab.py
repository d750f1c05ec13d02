"""A state store over a data folder of its own, in a world of donors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import trio
from trio.testing import MockClock

from shoal.node.config import Hold
from shoal.node.holds import Holds
from shoal.node.outcome import Progress
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.key_use import KeyUse
from shoal.node.state.chain_choice import ChainChoice, ChoiceParts
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_store import StateStore, StateStoreParts
from shoal.node.state.store import Store
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import ChainPart, FetchAnswer, FetchRequest
from tests.node.donors import ME, Donor, World
from tests.node.ledger import OUTER, Ledger

GOOD, BAD = PeerId("good"), PeerId("bad")


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)


class Home:
    """My state store, over my own folder, in a world of donors."""

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
                choice=ChainChoice(
                    ChoiceParts(
                        chain=chain,
                        ask=world.catchup.certificates,
                        linked=lambda: frozenset(world.donors),
                        tell=self.progress.append,
                    )
                ),
                key_use=KeyUse(store.folder, ME, store.durable_records(), take_over=False),
                links=SimpleNamespace(linked=lambda: frozenset(world.donors)),  # type: ignore[arg-type]
                holds=self.holds,
                log=RoundLog(self.events),
                on_progress=self.progress.append,
            )
        )
        for certificate in store.certificates():
            self.state_store.chain.extend(certificate)

    async def catch_up(self, *first: PeerId) -> list[PeerId]:
        return await self.state_store.extend(set(first), others=True)


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
