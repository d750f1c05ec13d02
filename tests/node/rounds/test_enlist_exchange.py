"""Enlistments on real hosts: heard from who is linked, together, and no more of one peer than is of use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from shoal.node.rounds import enlist_exchange as module
from shoal.node.rounds.enlist_exchange import ENLIST_PROTOCOL, EnlistExchange
from shoal.protocol.enlisting import enlist
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Enlist, Message
from shoal.protocol.wire import canonical
from shoal.swarm.host import Host
from tests.protocol.test_enlisting import START
from tests.waiting import WAIT_S, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WISHES = [Enlist(wish=enlist(Identity.from_seed(number.to_bytes(32, "big")), START)) for number in range(1, 21)]


class End:
    """One node's exchange on a host of its own."""

    def __init__(self, number: int) -> None:
        self.host = Host(identity=Identity.from_seed(bytes([200 + number]) * 32), listen=LOOPBACK)
        self.linked: set[PeerId] = set()
        self.heard: list[tuple[PeerId, Message]] = []
        self.exchange = EnlistExchange(
            self.host, lambda: self.linked, lambda peer, message: self.heard.append((peer, message))
        )

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def heard_of(self, other: End) -> list[Message]:
        return [message for peer, message in self.heard if peer == other.peer]


@asynccontextmanager
async def ends(count: int) -> AsyncIterator[list[End]]:
    """The first is connected with all others, and linked."""
    made = [End(number) for number in range(count)]
    async with trio.open_nursery() as nursery:
        for end in made:
            await nursery.start(end.host.run)
            nursery.start_soon(end.exchange.run)
        for end in made[1:]:
            await end.host.dial(made[0].host.addresses[0], deadline_s=WAIT_S)
            end.linked.add(made[0].peer)
            made[0].linked.add(end.peer)
        yield made
        nursery.cancel_scope.cancel()


async def test_what_gathers_goes_to_each_peer_in_order_on_one_stream() -> None:
    async with ends(3) as (first, second, third):
        streams: list[PeerId] = []
        serve = second.exchange._serve
        second.host.serve(ENLIST_PROTOCOL, lambda stream: (streams.append(stream.peer), serve(stream))[1])
        for wish in WISHES:
            first.exchange.tell(second.peer, wish)
            first.exchange.tell(third.peer, wish)
        await until(lambda: len(second.heard) == len(third.heard) == len(WISHES))
        assert second.heard_of(first) == third.heard_of(first) == WISHES
        assert streams == [first.peer]
        first.exchange.tell(second.peer, WISHES[0])
        await until(lambda: len(second.heard) == len(WISHES) + 1)


async def test_no_more_of_one_peer_is_heard_than_its_rate_and_others_are_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WISHES_AT_ONCE", 4.0)
    monkeypatch.setattr(module, "WISHES_PER_S", 1e-9)
    async with ends(3) as (first, flooding, other):
        for wishes in (WISHES[:3], WISHES[3:]):
            stream = await flooding.host.open(first.peer, ENLIST_PROTOCOL, deadline_s=WAIT_S)
            await stream.send_all([canonical(wish) for wish in wishes], deadline_s=WAIT_S)
            await stream.aclose()
        await until(lambda: len(first.heard) >= 4)
        other.exchange.tell(first.peer, WISHES[0])
        await until(lambda: bool(first.heard_of(other)))
        assert first.heard_of(flooding) == WISHES[:4]


async def test_who_is_not_linked_is_not_heard_nor_what_is_no_enlistment() -> None:
    async with ends(4) as (first, unlinked, lying, other):
        first.linked.discard(unlinked.peer)
        unlinked.exchange.tell(first.peer, WISHES[0])
        stream = await lying.host.open(first.peer, ENLIST_PROTOCOL, deadline_s=WAIT_S)
        await stream.send_all([b"no message", canonical(WISHES[1])], deadline_s=WAIT_S)
        other.exchange.tell(first.peer, WISHES[2])
        await until(lambda: bool(first.heard))
        assert first.heard == [(other.peer, WISHES[2])]
