"""Whom a node tells that it comes, and how closely it follows the chain then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from shoal.collectives.state import CertifiedState
from shoal.node.outcome import StateFetched
from shoal.node.rounds.inbox import Own, Turn
from shoal.node.state.errands import Errands
from shoal.protocol.catching_up import CatchingUp
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import GenesisFetched, StateSought
from shoal.protocol.messages import Message, Term
from shoal.protocol.newcomers import coming
from shoal.protocol.peering import ChainPart, FetchAnswer, FetchRequest, GetChain, GetFinals, GetHeader, Refusal
from tests.node.donors import Donor, World
from tests.node.ledger import forged, identity, state_of
from tests.node.state_store_lab import GOOD, GRACE_S, NOWHERE_ELSE, Home, home, ledger_of, liar

NEWCOMER = identity(50)


pytestmark = pytest.mark.usefixtures("no_threads")


class Here:
    """A node in a world of one donor, and what it said."""

    def __init__(self, world: World, donor: Donor, node: Home, me: Identity) -> None:
        self.world = world
        self.donor = donor
        self.node = node
        self.state_store = node.state_store
        self.me = me.peer_id
        self.said: list[Message] = []
        self._honest = donor.answer
        self.inputs: trio.MemorySendChannel[Own]
        self.inputs, self._received = trio.open_memory_channel[Own](100)
        self._over = trio.Event()
        self.ended = 0
        """Rounds under way that certificates showed to be over."""
        self.looked_up: list[Sequence[PeerId]] = []
        self.catching_up = CatchingUp(self.me, node, node.state_store.catchup.scores, ForkWatch(node))
        links: Any = SimpleNamespace(broadcast=self.said.append)
        self.errands = Errands(
            node.state_store, links, elsewhere=NOWHERE_ELSE, put=self.inputs.send_nowait, look_up=self._look_up
        )

    async def _look_up(self, peers: Sequence[PeerId]) -> None:
        await trio.lowlevel.checkpoint()
        self.looked_up.append(list(peers))

    async def be_an_engine(self) -> None:
        """Do with what comes of errands what engine and member do."""
        async for event in self._received:
            before = self.state_store.head.hash
            if isinstance(event, Turn):
                await event.take()
            elif isinstance(event, StateSought):
                if self.catching_up.over(event):
                    await self.hold(event.state)
                    self.catching_up.adopted(trio.current_time())
                self._over.set()
            elif isinstance(event, GenesisFetched):
                await self.hold(event.state)
            if self.state_store.head.hash != before:
                self.ended += 1
                self.catching_up.head_moved(trio.current_time())

    async def hold(self, state: object) -> None:
        assert isinstance(state, CertifiedState)
        await self.state_store.adopt(state)

    def begins(self, *, in_round: bool = False) -> bool:
        """Whether something is due, and begins."""
        errand = self.catching_up.due(trio.current_time(), in_round=in_round)
        if errand is not None:
            self.errands.begin(errand)
        return errand is not None

    def fetch_genesis(self, founder: PeerId) -> None:
        errand = self.catching_up.genesis(founder, trio.current_time())
        if errand is not None:
            self.errands.begin(errand)

    def overtake(self, times: int, *, after_s: float = 0.0, refuse: bool = False) -> None:
        """While the next `times` requests for finals or headers are answered, another round is certified each time."""
        rounds = iter(range(times))

        def busy(request: FetchRequest) -> FetchAnswer | bytes:
            given = self._honest(request)
            if isinstance(request, GetHeader | GetFinals) and next(rounds, None) is not None:
                self.world.certify()
                return Refusal(reason="not held here") if refuse else given
            return given

        self.donor.answer = busy

        async def dawdle(fetched: StateFetched) -> None:
            await trio.sleep(after_s)

        self.errands._performers = {**self.errands._performers, **self.world.catchup.performers(dawdle)}

    async def obtain(self) -> None:
        """Start, and try until the state is here."""
        await self.state_store.load()
        while not self.state_store.current:
            await self.catch_up()

    async def catch_up(self) -> None:
        """Make an attempt as soon as one is due."""
        self._over = trio.Event()
        while not self.begins():  # noqa: ASYNC110
            await trio.sleep(0.1)
        await self._over.wait()

    def assert_at_head(self) -> None:
        ledger = self.world.ledger
        assert self.state_store.state is not None
        assert self.state_store.state.round == ledger.state.round
        assert self.state_store.state.anchor.tobytes() == ledger.state.anchor.tobytes()


@asynccontextmanager
async def here(folder: Path, *, me: Identity = NEWCOMER, rounds: int = 4) -> AsyncIterator[Here]:
    world = World(folder, ledger_of(rounds))
    donor = world.donor(GOOD)
    async with home(world) as node, trio.open_nursery() as nursery:
        made = Here(world, donor, node, me)
        nursery.start_soon(made.errands.run)
        nursery.start_soon(made.be_an_engine)
        yield made
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_newcomer_that_was_overtaken_says_each_time_that_it_comes_and_follows_to_the_head(
    tmp_path: Path,
) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        assert node.said == []  # nobody waits for a first state, which may take long
        node.world.certify()
        round = node.world.ledger.chain.head.round
        node.overtake(3)
        await node.catch_up()
        heads = [node.world.ledger.chain.value(one) for one in range(round, round + 4)]
        assert node.said == [coming(head) for head in heads]
        node.assert_at_head()
        assert node.begins()  # at once: more may have been certified meanwhile


@pytest.mark.virtual_time
async def test_state_that_is_gone_by_the_time_that_it_is_asked_for_is_no_end(tmp_path: Path) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        node.world.certify()
        node.overtake(2, refuse=True)
        await node.catch_up()
        node.assert_at_head()


@pytest.mark.virtual_time
async def test_newcomer_whose_peers_give_nothing_stops_asking(tmp_path: Path) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        node.world.certify()
        honest, asked = node._honest, len(node.donor.asked)
        node.donor.answer = lambda request: (
            honest(request) if isinstance(request, GetChain) else Refusal(reason="not held here")
        )
        await node.catch_up()
        assert len(node.donor.asked) - asked <= 6
        assert not node.state_store.current
        assert not node.begins()


@pytest.mark.virtual_time
@pytest.mark.parametrize("why", ["a member", "slow"])
async def test_who_is_waited_for_anyway_or_would_be_too_slow_does_not_say_that_it_comes(
    tmp_path: Path, why: str
) -> None:
    async with here(tmp_path, me=identity(1) if why == "a member" else NEWCOMER) as node:
        node.overtake(0, after_s=0.0 if why == "a member" else GRACE_S)
        await node.obtain()
        for _ in range(2 if why == "a member" else 1):
            node.world.certify()
            await node.catch_up()
            node.assert_at_head()
        assert node.said == []


@pytest.mark.virtual_time
async def test_slow_newcomer_says_it_once_it_has_become_quick(tmp_path: Path) -> None:
    """The first state took long; the finals since then do not."""
    async with here(tmp_path) as node:
        node.overtake(0, after_s=GRACE_S)
        await node.obtain()
        for said in (0, 1):
            node.world.certify()
            await node.catch_up()
            assert len(node.said) == said


# -- claims, beside a round ----------------------------------------------------------------------------------


async def look(node: Here) -> None:
    """Let time pass in a round, as the engine's ticks do."""
    for _ in range(20):
        node.begins(in_round=True)
        await trio.sleep(0.1)


@pytest.mark.virtual_time
async def test_claim_in_a_round_brings_certificates_that_end_it_and_nothing_else(tmp_path: Path) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        node.ended, asked = 0, len(node.donor.asked)
        node.catching_up.claimed(GOOD, (Term(), 6))  # it is at round 5, as this node is: nothing comes of it
        await look(node)
        assert node.donor.asked[asked:] == [GetChain(after=4)]
        assert node.ended == 0
        node.world.certify()
        node.catching_up.claimed(GOOD, (Term(), 6))
        await look(node)
        assert node.ended == 1
        assert node.state_store.head == node.world.ledger.chain.head
        assert not node.state_store.current  # the state is fetched once no round is under way
        assert all(isinstance(request, GetChain) for request in node.donor.asked[asked:])
        await node.catch_up()
        node.assert_at_head()
        assert node.looked_up[-1] == [GOOD]


@pytest.mark.virtual_time
async def test_certificates_that_do_not_hold_end_no_round(tmp_path: Path) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        node.ended = 0
        node.world.certify()
        liar(
            node.donor,
            lambda part: ChainPart(
                certificates=tuple(forged(one) for one in part.certificates[:1]),  # type: ignore[arg-type]
                head=part.head,
            ),
        )
        node.catching_up.claimed(GOOD, (Term(), 6))
        await look(node)
        assert node.ended == 0
        assert node.state_store.head.round == 4
        assert node.state_store.catchup.scores.resting(GOOD, trio.current_time() - 1.5)


@pytest.mark.virtual_time
async def test_peer_that_hangs_costs_a_node_that_is_behind_no_ten_seconds(tmp_path: Path) -> None:
    async with here(tmp_path) as node:
        await node.obtain()
        node.world.certify()
        hanging = PeerId("a hanging peer")
        node.world.share(replace(node.donor, peer=hanging))
        ask = node.world.catchup._ask

        async def hang(peer: PeerId, request: bytes) -> bytes:
            await trio.sleep(10.0 if peer == hanging else 0.0)
            return await ask(peer, request)

        node.world.catchup._ask = hang
        began = trio.current_time()
        await node.catch_up()
        node.assert_at_head()
        assert trio.current_time() - began < 5.0


# -- another S(0) --------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_first_founders_state_is_fetched_once_at_a_time_and_held(tmp_path: Path) -> None:
    async with here(tmp_path, me=identity(2), rounds=0) as node:
        ledger = node.world.ledger
        founder = ledger.peers[0]
        await node.hold(state_of(0, seed=77))
        theirs = node.world.donor(founder)
        node.fetch_genesis(founder)
        node.fetch_genesis(founder)
        await trio.sleep(1.0)
        assert sum(isinstance(request, GetHeader) for request in theirs.asked) == 1
        assert node.state_store.digest == ledger.header(0).digest
