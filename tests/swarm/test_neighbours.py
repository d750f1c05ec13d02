"""A swarm whose nodes keep links with a few neighbours, on real hosts: what one says is heard by all all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from shoal.protocol import neighbours as neighbours_module
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.rollouts import RolloutGroup, TaskRef, announce_group, assigned_seed, encode_group
from shoal.protocol.wire import Sealer
from shoal.swarm import brief_connections
from shoal.swarm import dialling as dialling_module
from shoal.swarm import members as members_module
from shoal.swarm.links import LINK_LIMIT
from shoal.swarm.rollouts import RolloutExchange
from tests.swarm.rollout_lab import Groups
from tests.swarm.test_members import MANIFEST, Node, identity, until

NODES = 8
CHOSEN, LIMIT = 2, 4


@pytest.fixture(autouse=True)
def _few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (neighbours_module, members_module):
        monkeypatch.setattr(module, "CHOSEN_LINKS", CHOSEN)
    monkeypatch.setattr(members_module, "NEIGHBOUR_LIMIT", LIMIT)
    monkeypatch.setattr(members_module, "UNLINKED_S", 1.0)
    monkeypatch.setattr(members_module, "RECORD_PERIOD_S", 0.2)
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.05)
    monkeypatch.setattr(dialling_module, "DIAL_BACKOFF_LIMIT_S", 2.0)
    monkeypatch.setattr(brief_connections, "IDLE_LIMIT_S", 0.5)
    monkeypatch.setattr(brief_connections, "LOOK_S", 0.1)


def rollouts_manifest() -> Manifest:
    tables = msgspec.to_builtins(MANIFEST)
    tables["sync"] = {"strategy": "rollouts"}
    tables["workload"] = {"name": "char-policy"}
    tables["rollouts"] = {"tasks": [{"family": "sums"}]}
    return validate_manifest(tables, source="the test's manifest")


SHARING = rollouts_manifest()


class Sharer(Node):
    """A node that shares rollouts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, manifest=SHARING)
        self.store = Groups()
        self.sharing = trio.CancelScope()
        self.exchange = RolloutExchange(
            host=self.host,
            sealer=Sealer(identity(self.seed), SHARING.swarm_id, 1),
            swarm_id=SHARING.swarm_id,
            holdings=self.store,
            round_number=lambda: 0,
            takes_part=self.members.takes_part,
            rank=self.members.rank,
            connections=self.members.brief_connections(),
        )

    async def share(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.sharing:
            await self.exchange.run(task_status=task_status)

    def kill(self) -> None:
        self.sharing.cancel()
        super().kill()

    async def announce(self, index: int) -> bytes:
        seed = assigned_seed(SHARING.swarm_id, self.peer, 0, index)
        group = RolloutGroup(
            origin=self.peer,
            round=0,
            policy_version=1,
            task=TaskRef(family="sums", version="1", config=b"\x80", seed=seed, index=index),
            completions=("7", "8"),
        )
        data = encode_group(group)
        announcement = announce_group(group, data, (1.0, 0.0))
        await self.exchange.announce(announcement, data)
        return announcement.digest

    def has_heard(self, digest: bytes) -> bool:
        return self.exchange.book.get(digest) is not None


@asynccontextmanager
async def swarm() -> AsyncIterator[list[Sharer]]:
    """Nodes that have joined through the first, each of which knows all others by their records."""
    nodes = [Sharer(seed) for seed in range(1, NODES + 1)]
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
            await nursery.start(node.share)
        for node in nodes[1:]:
            node.members.found(nodes[0].peer, nodes[0].host.addresses)
        await until(lambda: all(len(node.members.present()) == NODES - 1 for node in nodes))
        yield nodes
        nursery.cancel_scope.cancel()


def assert_few(nodes: list[Sharer]) -> None:
    """Connections may be a few more: with whom is being refused, or a group is pulled from."""
    assert max(len(node.linked()) for node in nodes) <= LIMIT


async def until_all_have_the_last_record(node: Sharer, others: list[Sharer]) -> None:
    """Have a node tell one more record, and whatever it greets with be that one, until all others have it.

    One that is newer, and under way when its maker is killed, may come after the news of that, and makes it count
    again.
    """
    sealer, last = node.members._sealer, node.members._sealed_record()
    sealer.seal = lambda kind, payload: last  # type: ignore[method-assign]
    node.members.announce()
    await until(lambda: all(other.members.book.order(node.peer) == sealer.order for other in others))


def reached(nodes: list[Sharer]) -> set[PeerId]:
    """Peers to which ways over links lead from the first of these."""
    by_peer = {node.peer: node for node in nodes}
    found, new = set[PeerId](), {nodes[0].peer}
    while new:
        found |= new
        new = {other for peer in new if peer in by_peer for other in by_peer[peer].linked()} - found
    return found


async def test_eight_nodes_with_four_links_each_at_most_hear_every_group_and_pull_it_from_whoever_has_it() -> None:
    async with swarm() as nodes:
        await until(lambda: all(len(node.linked()) >= CHOSEN for node in nodes))
        await until(lambda: reached(nodes) == {node.peer for node in nodes})
        digests = [await node.announce(0) for node in nodes]
        for node in nodes:
            others = [digest for digest, origin in zip(digests, nodes, strict=True) if origin is not node]
            await until(lambda n=node, o=others: all(n.has_heard(digest) for digest in o))  # type: ignore[misc]
            assert_few(nodes)
        await until(lambda: max(len(node.host.connected()) for node in nodes) <= LIMIT + 1)
        # A group of one that is no neighbour comes over a connection that is made for it, and ends.
        taker = nodes[-1]
        holder = next(node for node in nodes if node is not taker and node.peer not in taker.linked())
        digest = await holder.announce(1)
        await until(lambda: taker.has_heard(digest))
        offer = taker.exchange.book.get(digest)
        assert offer is not None
        came = await taker.exchange.fetch([offer], limit_bytes=1 << 20, deadline_s=20)
        assert came.keys() == {offer.digest}
        assert holder.peer in taker.host.connected() or holder.peer in taker.linked()
        await until(lambda: holder.peer not in taker.host.connected() or holder.peer in taker.linked())
        # Neighbours alone are watched; nobody is told who is not reached.
        await until(lambda: all(node.members.alive() <= node.linked() for node in nodes))
        assert not any(node.members.links.message_relay.lacking for node in nodes)


async def test_neighbour_that_is_killed_is_gone_and_replaced_though_its_record_lasts() -> None:
    async with swarm() as nodes:
        await until(lambda: all(len(node.linked()) >= CHOSEN for node in nodes))
        victim, *others = nodes  # the one through which all came
        await until_all_have_the_last_record(victim, others)
        watchers = [node for node in others if victim.peer in node.linked()]
        victim.kill()
        for node in watchers:
            await until(lambda n=node: n.says("died", victim))  # type: ignore[misc]
            assert victim.peer not in node.members.present()
        await until(lambda: all(len(node.linked()) >= CHOSEN for node in others))
        await until(lambda: reached(others) == {node.peer for node in others})
        await until(lambda: all(node.members.machine.state_of(victim.peer) is None for node in watchers))
        assert all(victim.peer not in node.members.present() for node in watchers)  # its old record is still there
        assert_few(others)
        digest = await others[0].announce(0)
        await until(lambda: all(node.has_heard(digest) for node in others[1:]))


def test_strategy_says_who_is_linked() -> None:
    some, everybody = Sharer(1).members, Node(1).members
    assert (some.links_all, some.links_wanted, some.brief_connections() is None) == (False, CHOSEN, False)
    assert (everybody.links_all, everybody.links_wanted, everybody.brief_connections()) == (True, LINK_LIMIT, None)
