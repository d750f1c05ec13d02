"""Handing over on real hosts: to who is of the site, once, in its form; and what is not answered counts as it is to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.node.rounds import site_exchange
from shoal.node.rounds.site_exchange import OfferedWork, SiteExchange
from shoal.node.state.contributions import Made
from shoal.node.state.fetching import Job
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import HandedOver, Offered
from shoal.protocol.messages import domain_hash
from shoal.protocol.records import NodeRecord
from shoal.protocol.sites import SITE_PROTOCOL, HandOverAnswer, HandOverOffer, TakeBackOffer, capability_of
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.host import Host
from tests.node.ledger import GRID, vector
from tests.waiting import WAIT_S, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SWARM = SwarmId(bytes(range(32)))
TEST_DEADLINE_S = 30.0
BASE, CODEC, CAP = domain_hash("test", b"base"), "int8", 4.0


class End:
    """One node's exchange on a host of its own; what it fetches comes out of the memory of `others`."""

    def __init__(self, number: int, site: str) -> None:
        self.host = Host(identity=Identity.from_seed(bytes([100 + number]) * 32), listen=LOOPBACK)
        self.site, self.number = site, number
        self.linked: set[PeerId] = set()
        self.others: list[End] = []
        self.put: list[Offered | HandedOver] = []
        self.work = OfferedWork(lambda ref: None)
        self.missing: set[int] = set()
        """Chunks that never come to who fetches from here."""
        self.exchange = SiteExchange(
            self.host,
            self.work,
            self,  # type: ignore[arg-type]
            name=site,
            swarm=SWARM,
            linked=lambda: self.linked,
            record_of=self.record_of,
        )
        self.exchange.put = self.put.append
        self.exchange.begin(BASE, GRID, CODEC)

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def record_of(self, peer: PeerId) -> NodeRecord:
        (other,) = (one for one in self.others if one.peer == peer)
        return NodeRecord(peer=peer, boot=1, capabilities=(capability_of(other.site, SWARM, peer),))

    async def fetch(self, job: Job, peers: Sequence[PeerId]) -> dict[PeerId, int]:
        (other,) = (one for one in self.others if one.peer == peers[0])
        await trio.lowlevel.checkpoint()
        for ref, size in job.wanted:
            if ref.chunk in other.missing:
                raise NetworkError("it does not come")
            data = other.work.lookup(ref)
            if data is None:
                raise NetworkError("it is not held")
            assert len(data) == size
            job.accept(ref, data, None)
        return {other.peer: sum(size for _, size in job.wanted)}

    def made(self, tokens: int = 100) -> Made:
        values = vector(self.number)
        encoded = EncodedContribution.encode(values, GRID, CODEC)
        return Made(round=1, base=BASE, number=1, tokens=tokens, values=values, encoded=encoded)

    async def hand_over(self, to: End, tokens: int = 100) -> None:
        """Hand over; returns when the other has it."""
        before = len(to.put)
        self.exchange.hand_over(to.peer, self.made(tokens))
        await until(lambda: len(to.put) > before or self.put)


@asynccontextmanager
async def ends(*sites: str) -> AsyncIterator[list[End]]:
    """The first is connected with all others, and linked."""
    made = [End(number, site) for number, site in enumerate(sites)]
    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for end in made:
                end.others = [other for other in made if other is not end]
                await nursery.start(end.host.run)
                nursery.start_soon(end.exchange.run)
            for end in made[1:]:
                await end.host.dial(made[0].host.addresses[0], deadline_s=WAIT_S)
                end.linked.add(made[0].peer)
                made[0].linked.add(end.peer)
            yield made
            nursery.cancel_scope.cancel()


async def test_what_is_handed_over_is_in_the_mean_by_tokens_and_who_did_is_told_once_that_is_on_disk() -> None:
    async with ends("a", "a", "a") as (delegate, second, third):
        await second.hand_over(delegate, 100)
        await third.hand_over(delegate, 300)
        assert set(delegate.put) == {Offered(second.peer, BASE), Offered(third.peer, BASE)}
        works = delegate.exchange.take(200, CAP)
        mean = np.multiply(vector(0), np.float32(200 / 600))
        for work in works:
            work.add_to(mean, work.tokens / 600)
        want = (200 * vector(0) + 100 * vector(1) + 300 * vector(2)) / 600
        assert np.abs(mean - want).max() < 0.02 * np.abs(want).max()
        assert not second.put
        delegate.exchange.contributed([work.peer for work in works])
        await until(lambda: second.put and third.put)
        assert second.put == third.put == [HandedOver(BASE, taken=True)]


async def test_who_is_of_another_site_is_not_heard() -> None:
    async with ends("a", "b") as (delegate, other):
        assert delegate.exchange.mates() == frozenset()
        other.exchange.hand_over(delegate.peer, other.made())
        await until(lambda: other.put)
        assert other.put == [HandedOver(BASE, taken=False)]
        assert delegate.put == []
        assert delegate.exchange.take(100, CAP) == []


@pytest.mark.parametrize("late", [False, True], ids=["other round", "too late"])
async def test_what_is_offered_for_another_round_or_too_late_is_refused(late: bool) -> None:
    async with ends("a", "a") as (delegate, second):
        if late:
            delegate.exchange.contributed()
        else:
            delegate.exchange.begin(domain_hash("test", b"next"), GRID, CODEC)
        await second.hand_over(delegate)
        assert second.put == [HandedOver(BASE, taken=False)]
        assert delegate.put == []


async def test_what_came_between_the_mean_and_the_disk_is_refused() -> None:
    async with ends("a", "a") as (delegate, second):
        works = delegate.exchange.take(100, CAP)
        await second.hand_over(delegate)
        assert not second.put
        delegate.exchange.contributed([work.peer for work in works])
        await until(lambda: second.put)
        assert second.put == [HandedOver(BASE, taken=False)]


async def test_what_is_taken_back_in_time_is_in_no_mean_and_after_that_it_is_said_to_be_in_it() -> None:
    async with ends("a", "a", "a") as (delegate, second, third):
        await second.hand_over(delegate)
        await third.hand_over(delegate)
        second.exchange.take_back()
        await until(lambda: second.put)
        assert second.put == [HandedOver(BASE, taken=False)]
        works = delegate.exchange.take(100, CAP)
        assert [work.peer for work in works] == [third.peer]
        delegate.exchange.contributed([third.peer])
        assert await third.exchange.outcome(BASE) is True
        assert await second.exchange.outcome(BASE) is False


@pytest.mark.parametrize("comes_true", [True, False])
async def test_what_is_taken_back_while_the_mean_is_made_waits_for_what_comes_of_that(comes_true: bool) -> None:
    async with ends("a", "a") as (delegate, second):
        await second.hand_over(delegate)
        works = delegate.exchange.take(100, CAP)
        heard, let_go = trio.Event(), delegate.exchange._let_go

        async def noting(peer: PeerId, base: bytes) -> bool:
            heard.set()
            return await let_go(peer, base)

        delegate.exchange._let_go = noting  # type: ignore[method-assign]
        second.exchange.take_back()
        await heard.wait()
        assert not second.put
        delegate.exchange.contributed([work.peer for work in works] if comes_true else ())
        await until(lambda: second.put)
        assert second.put == [HandedOver(BASE, taken=comes_true)]


async def test_a_delegate_that_is_a_round_ahead_still_says_what_it_took_in_the_round_before() -> None:
    async with ends("a", "a") as (delegate, second):
        await second.hand_over(delegate)
        delegate.exchange.contributed([second.peer])
        await until(lambda: second.put)
        delegate.exchange.begin(domain_hash("test", b"next"), GRID, CODEC)
        data = await second.host.request(
            delegate.peer, SITE_PROTOCOL, canonical(TakeBackOffer(base=BASE)), deadline_s=WAIT_S
        )
        assert decode(data, HandOverAnswer).taken


async def test_offers_are_over_with_the_round_of_the_delegate() -> None:
    async with ends("a", "a") as (delegate, second):
        await second.hand_over(delegate)
        delegate.exchange.begin(domain_hash("test", b"next"), GRID, CODEC)
        await until(lambda: second.put)
        assert second.put == [HandedOver(BASE, taken=False)]


@pytest.mark.parametrize("all_fetched", [True, False])
async def test_of_a_delegate_that_is_gone_what_it_had_all_of_counts_as_taken(
    all_fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_exchange, "LOOK_S", 0.01)
    async with ends("a", "a") as (delegate, second):
        if not all_fetched:
            second.missing = {GRID.chunks - 1}
            hangs = trio.Event()
            monkeypatch.setattr(delegate, "fetch", lambda job, peers: hangs.wait())
        second.exchange.hand_over(delegate.peer, second.made())
        if all_fetched:
            await until(lambda: delegate.put)
        second.linked.clear()
        await until(lambda: second.put)
        assert second.put == [HandedOver(BASE, taken=all_fetched)]
        assert await second.exchange.outcome(BASE) is all_fetched


async def test_what_came_of_an_offer_is_told_again_where_the_round_begins_again() -> None:
    async with ends("a", "a") as (delegate, second):
        made = second.made()
        second.exchange.hand_over(delegate.peer, made)
        await until(lambda: delegate.put)
        delegate.exchange.contributed([second.peer])
        await until(lambda: second.put)
        second.exchange.hand_over(delegate.peer, made)
        assert second.put == [HandedOver(BASE, taken=True)] * 2


async def test_nobody_of_a_site_counts_for_more_tokens_than_the_cap_has_it() -> None:
    async with ends("a", "a", "a") as (delegate, second, boasting):
        await second.hand_over(delegate, 100)
        await boasting.hand_over(delegate, 1 << 20)
        tokens = {work.peer: work.tokens for work in delegate.exchange.take(100, CAP)}
        assert tokens == {second.peer: 100, boasting.peer: 400}


async def test_chunks_that_are_not_the_ones_offered_are_refused() -> None:
    async with ends("a", "a") as (delegate, liar):
        made = liar.made()
        other = EncodedContribution.encode(vector(5), GRID, CODEC)
        liar.work.offer(other)
        liar.work.offer = lambda encoded: None  # type: ignore[method-assign]
        liar.work._encoded = other
        request = HandOverOffer(
            base=BASE,
            root=made.encoded.root,
            tokens=1,
            codec=CODEC,
            numel=GRID.numel,
            chunk_values=GRID.chunk_values,
        )
        object.__setattr__(other, "root", made.encoded.root)
        data = await liar.host.request(delegate.peer, SITE_PROTOCOL, canonical(request), deadline_s=WAIT_S)
        assert not decode(data, HandOverAnswer).taken
        assert delegate.put == []
        with pytest.raises((NetworkError, RemoteError)):
            await liar.host.request(delegate.peer, SITE_PROTOCOL, b"\xc1", deadline_s=WAIT_S)
