"""Links of followers, on real hosts: a few for each, of members a bounded share, and from member to member all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from shoal.protocol import neighbours as neighbours_module
from shoal.swarm import dialling as dialling_module
from shoal.swarm import members as members_module
from tests.swarm.test_members import Node, until

MEMBERS, FOLLOWERS, PLACES = 2, 4, 3
"""As many places as there are other followers: with two, three that link one another leave the fourth a single one."""
SETTLED_LIMIT_S = 60.0
"""Two seconds on a machine that does nothing else."""


@pytest.fixture(autouse=True)
def _few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (neighbours_module, members_module):
        monkeypatch.setattr(module, "CHOSEN_LINKS", 2)
    monkeypatch.setattr("shoal.protocol.followers.FOLLOWERS_LIMIT", PLACES)
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
        assert ids.isdisjoint(peer for who, peer in dialled if who in {m.peer for m in members})
    assert max(most) == PLACES
