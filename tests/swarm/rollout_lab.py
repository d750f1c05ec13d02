"""Nodes that share rollouts, on real hosts on loopback."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

import trio

from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.rollouts import Reason, RolloutGroup, TaskRef, announce_group, assigned_seed, encode_group
from shoal.protocol.wire import Sealer, SwarmId
from shoal.swarm.brief_connections import BriefConnections
from shoal.swarm.host import Host
from shoal.swarm.rollouts import RolloutExchange
from tests.waiting import until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SWARM = SwarmId(bytes(range(32)))
TOPIC = f"shoal/{SWARM.hex()}/rollouts"


class Groups(dict[bytes, bytes]):
    """The groups that a node can serve: `Holdings` of the exchange."""

    def keep(self, digest: bytes, data: bytes) -> bool:
        self[digest] = data
        return True


@dataclass
class Node:
    """One node's exchange on its own host. `members`: seeds of those who may announce, None for anybody."""

    seed: int
    members: Collection[int] | None = None
    blamed: Counter[tuple[PeerId, Reason]] = field(default_factory=Counter)
    ignores: set[PeerId] = field(default_factory=set)
    pulled: list[bytes] = field(default_factory=list)
    round: int = 0
    has_neighbours: bool = False
    store: Groups = field(default_factory=Groups)

    def __post_init__(self) -> None:
        self.identity = identity(self.seed)
        self.host = Host(identity=self.identity, listen=LOOPBACK)
        self.sealer = Sealer(self.identity, SWARM, 1)
        self.exchange = self.new_exchange()
        self.scope = trio.CancelScope()

    def new_exchange(self) -> RolloutExchange:
        members = None if self.members is None else {identity(seed).peer_id for seed in self.members}
        return RolloutExchange(
            host=self.host,
            sealer=self.sealer,
            swarm_id=SWARM,
            holdings=self.store,
            round_number=lambda: self.round,
            takes_part=lambda peer: members is None or peer in members,
            connections=self.connections,
            pulled=self.pulled.append,
            ignored=self.is_ignored,
            blame=self.blame,
        )

    @property
    def connections(self) -> BriefConnections | None:
        """Whoever is connected is a neighbour, where it has any."""
        if not self.has_neighbours:
            return None
        return BriefConnections(self.host, addresses_of=lambda peer: (), is_linked=lambda peer: True)

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def is_ignored(self, peer: PeerId) -> bool:
        return peer in self.ignores

    def blame(self, peer: PeerId, reason: Reason) -> None:
        self.blamed[peer, reason] += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.host.run)
                await nursery.start(self.exchange.run)
                task_status.started()

    def group(self, index: int, *, text_bytes: int = 8, completions: int = 4, round_number: int = 0) -> RolloutGroup:
        """A group of this node's, of about `text_bytes` a completion; every other completion is right."""
        seed = assigned_seed(SWARM, self.peer, round_number, index)
        letters = random.Random(seed)
        return RolloutGroup(
            origin=self.peer,
            round=round_number,
            policy_version=1,
            task=TaskRef(family="sums", version="1", config=b"\x80", seed=seed, index=index),
            completions=tuple(letters.randbytes(text_bytes // 2).hex() for _ in range(completions)),
        )

    async def announce(self, index: int, *, text_bytes: int = 8, round_number: int = 0) -> bytes:
        """Announce the group of this index as half right; its digest."""
        group = self.group(index, text_bytes=text_bytes, round_number=round_number)
        return await self.announce_group(group, (1.0, 0.0, 1.0, 0.0))

    async def announce_group(self, group: RolloutGroup, rewards: tuple[float, ...]) -> bytes:
        """Announce a group of this node's with these rewards; its digest."""
        data = encode_group(group)
        announcement = announce_group(group, data, rewards)
        await self.exchange.announce(announcement, data)
        return announcement.digest

    def offered(self) -> set[bytes]:
        """Digests of what others offer."""
        return {offer.digest for offer in self.exchange.offers()}

    async def fetch(self, *digests: bytes, limit_bytes: int = 1 << 30, deadline_s: float = 30) -> dict[bytes, bytes]:
        offers = [offer for offer in self.exchange.offers() if offer.digest in digests]
        return await self.exchange.fetch(offers, limit_bytes=limit_bytes, deadline_s=deadline_s)


def identity(seed: int) -> Identity:
    return Identity.from_seed(bytes([seed]) * 32)


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """The nodes run, all connected with all, and each knows that the others listen."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
        for at, node in enumerate(nodes):
            for other in nodes[:at]:
                await node.host.dial(other.host.addresses[0], deadline_s=10)
        for node in nodes:
            await until(lambda node=node: len(node.host.gossip_peers(TOPIC)) == len(nodes) - 1)
        yield
        nursery.cancel_scope.cancel()
