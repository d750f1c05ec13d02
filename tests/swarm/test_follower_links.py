"""Links of followers, on real hosts: a few for each, of members a bounded share, and from member to member all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from shoal.protocol import neighbours as neighbours_module
from shoal.protocol.identity import PeerId
from shoal.swarm import dialling as dialling_module
from shoal.swarm import members as members_module
from tests.swarm.test_members import Node, identity, until

MEMBERS, FOLLOWERS, PLACES, NEIGHBOURS = 2, 4, 3, 4
"""As many places as there are other followers: with two, three that link one another leave the fourth a single one."""
SETTLED_LIMIT_S = 60.0
"""Two seconds on a machine that does nothing else."""


@pytest.fixture(autouse=True)
def _few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (neighbours_module, members_module):
        monkeypatch.setattr(module, "CHOSEN_LINKS", 2)
    for name in ("shoal.protocol.followers.FOLLOWERS_LIMIT", "shoal.swarm.members.FOLLOWERS_LIMIT"):
        monkeypatch.setattr(name, PLACES)
    monkeypatch.setattr(members_module, "NEIGHBOUR_LIMIT", NEIGHBOURS)
    monkeypatch.setattr(members_module, "OUTSIDE_SETTLE_S", 0.3)
    monkeypatch.setattr(members_module, "RECORD_PERIOD_S", 0.2)
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.05)
    monkeypatch.setattr(dialling_module, "DIAL_BACKOFF_LIMIT_S", 1.0)


@asynccontextmanager
async def swarm() -> AsyncIterator[tuple[list[Node], list[Node]]]:
    """Members that found the swarm, and followers that know one of them."""
    members = [Node(seed) for seed in range(1, 1 + MEMBERS)]
    followers = [Node(seed, follows=True) for seed in range(1 + MEMBERS, 1 + MEMBERS + FOLLOWERS)]
    async with trio.open_nursery() as nursery:
        for node in (*members, *followers):
            await nursery.start(node.run)
        for node in (*members[1:], *followers):
            node.members.found(members[0].peer, members[0].host.addresses)
        yield members, followers
        nursery.cancel_scope.cancel()


async def test_member_has_a_few_places_for_followers_who_link_each_other_and_whom_it_never_dials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[tuple[str, str]] = []
    meet = members_module.Links.meet

    async def noted(links: members_module.Links, peer: object, *arguments: object, **options: object) -> None:
        dialled.append((links._sealer.peer_id, str(peer)))
        await meet(links, peer, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(members_module.Links, "meet", noted)
    most: list[int] = []
    async with swarm() as (members, followers):
        ids = {node.peer for node in followers}

        def settled() -> bool:
            most.append(max(len(member.members.followers()) for member in members))
            known = all(ids <= {record.peer for record in node.members.book.records()} for node in members)
            some = members[0].linked() & ids
            return known and all(len(node.linked()) >= 2 for node in followers) and bool(some) and some != ids

        with trio.fail_after(SETTLED_LIMIT_S):
            await until(settled)
        assert members[1].peer in members[0].linked()
        assert any(follower.linked() & ids for follower in followers)
        unlinked = next(f for f in followers if f.peer not in members[0].linked())
        assert members[0].members.takes_part(unlinked.peer), "it may announce rollouts"
        assert unlinked.peer not in members[0].members.alive()
        gone = next(f for f in followers if f.peer in members[0].linked())
        gone.kill()
        await until(lambda: gone.peer not in members[0].linked())
        assert gone.peer not in members[0].members.alive(), "nobody waits for it"
        assert not members[0].says("died", gone)
        for member in members:
            member.members._dialling.look(trio.current_time())
            assert ids.isdisjoint(member.members._dialling._dials), "not at its next look either"
        assert ids.isdisjoint(peer for who, peer in dialled if who in {m.peer for m in members})
    assert max(most) == PLACES


class Outside:
    """Members that found the swarm, and others who wait outside but for those that are `called`."""

    def __init__(self, others: int) -> None:
        self.called: set[PeerId] = set()
        self.voters = {identity(seed).peer_id for seed in range(1, 1 + MEMBERS)}
        self.members = [Node(seed, outside=self.is_outside) for seed in range(1, 1 + MEMBERS)]
        self.others = [Node(seed, outside=self.is_outside) for seed in range(10, 10 + others)]

    def is_outside(self, peer: PeerId) -> bool:
        return peer not in self.voters and peer not in self.called

    def is_settled(self) -> bool:
        """True if all links that are to be are there, and no others."""
        waiting = [node for node in self.others if node.peer not in self.called]
        part = [node for node in (*self.members, *self.others) if node not in waiting]
        ids = {node.peer for node in part}
        few = all(2 <= len(node.linked()) <= NEIGHBOURS for node in waiting)
        return few and all(
            ids - {node.peer} <= node.linked() and len(node.linked() - ids) <= PLACES and node.members.links_all
            for node in part
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        nodes = (*self.members, *self.others)
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.run)
            for node in nodes[1:]:
                node.members.found(nodes[0].peer, nodes[0].host.addresses)
            yield
            nursery.cancel_scope.cancel()


async def test_links_follow_the_chain_as_it_calls_some_and_has_no_seat_for_them_then() -> None:
    swarm = Outside(6)
    async with swarm.running():
        with trio.fail_after(SETTLED_LIMIT_S):
            await until(swarm.is_settled)
            for called in (swarm.others[:4], swarm.others[2:], []):
                swarm.called.clear()
                swarm.called.update(node.peer for node in called)
                for node in (*swarm.members, *swarm.others):
                    node.members.announce()
                await until(swarm.is_settled)
        for member in swarm.members:
            assert not any(member.says("died", other) for other in swarm.others), "who follows is not given up"


async def test_member_ends_links_of_those_that_had_a_seat_where_more_of_them_stay_than_it_has_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module.Neighbours, "settle", lambda choice, linked: frozenset())
    swarm = Outside(PLACES + 2)
    swarm.called.update(node.peer for node in swarm.others)
    async with swarm.running():
        with trio.fail_after(SETTLED_LIMIT_S):
            await until(swarm.is_settled)
            swarm.called.clear()
            for member in swarm.members:
                assert len(member.members.followers()) == PLACES + 2
            await until(lambda: all(len(member.members.followers()) <= PLACES for member in swarm.members))
        assert swarm.members[1].peer in swarm.members[0].linked()


async def test_who_has_contributed_has_the_place_of_a_stranger_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "OUTSIDE_SETTLE_S", SETTLED_LIMIT_S)
    swarm = Outside(PLACES + 1)
    strangers, late = swarm.others[:-1], swarm.others[-1]
    first = swarm.members[0]
    first.members.admission.contributed = lambda peer: peer == late.peer
    async with trio.open_nursery() as nursery:
        for node in (first, *swarm.others):
            await nursery.start(node.run)
        for node in strangers:
            await node.join(first)
        await until(lambda: len(first.members.followers()) == PLACES)
        await late.join(first)
        await until(lambda: late.peer in first.linked())
        assert len(first.members.followers()) == PLACES
        nursery.cancel_scope.cancel()
