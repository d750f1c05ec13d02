"""Rendezvous by SwarmId on real hosts on loopback, with strangers in between; and what is not believed, nor said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from shoal.node.discovery import rendezvous as rendezvous_module
from shoal.node.discovery.rendezvous import Rendezvous, Table, wants_table
from shoal.node.options import NodeConfig
from shoal.protocol.manifest import Manifest, NetworkSection
from shoal.protocol.wire import SwarmId
from shoal.swarm import dialling as dialling_module
from shoal.swarm.rendezvous.kademlia import Kademlia
from shoal.swarm.rendezvous.meeting_points import open_point, sign_point
from tests.swarm.rendezvous.test_kademlia import Node as Stranger
from tests.swarm.test_members import MANIFEST, Node, identity, manifest
from tests.waiting import running, until

BEYOND = "/ip4/192.0.2.1/tcp/4001/p2p/" + identity(9).peer_id
ON_LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/" + identity(9).peer_id


@dataclass
class PointTable:
    """A table in memory: what was announced, and what a look-up gives."""

    points: list[bytes] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)
    looked_up: int = 0

    def know(self, addresses: Iterable[str]) -> None:
        list(addresses)

    async def announce(self, signed: bytes) -> int:
        self.announced.append(signed)
        return 1

    async def look_up(self) -> list[bytes]:
        self.looked_up += 1
        return self.points


@dataclass
class Seeker(Node):
    """A node's members with a way into a table: into Kademlia, unless it is given another."""

    known: list[str] = field(default_factory=list)
    table: Table | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        swarm_id = self.manifest.swarm_id
        keeps = self.members.links.linked().__contains__
        meeting = Rendezvous(
            self.table or Kademlia(self.host, swarm_id, keeps=keeps),
            identity=identity(self.seed),
            boot=self.boot,
            config=NodeConfig(manifest=self.manifest, data_dir=Path()),
            members=self.members,
            addresses=lambda: self.host.addresses,
            known=lambda: self.known,
        )
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.host.run)
                await nursery.start(self.members.run)
                await nursery.start(meeting.run)
                task_status.started()
                async for change in self.members.changes:
                    self.changes.append(change)
                    meeting.heard(change)


@pytest.fixture(autouse=True)
def _without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)
    monkeypatch.setattr(rendezvous_module, "LEAST_S", 0.05)
    monkeypatch.setattr(rendezvous_module, "ALONE_S", 0.2)
    monkeypatch.setattr(rendezvous_module, "ALONE_LIMIT_S", 0.5)


async def test_newcomer_that_knows_a_stranger_only_is_linked_with_the_swarm() -> None:
    stranger = Stranger(10, SwarmId(b"t" * 32))
    founder, other, newcomer = Seeker(1), Node(2), Seeker(3)
    async with running(stranger) as nursery:
        founder.known = newcomer.known = list(stranger.host.addresses)
        for node in (founder, other):
            await nursery.start(node.run)
        await other.join(founder)
        await nursery.start(newcomer.run)
        await until(lambda: newcomer.linked() == {founder.peer, other.peer})


async def test_swarm_that_lost_every_bootstrap_node_takes_in_who_knows_one_live_peer() -> None:
    bootstraps = [Stranger(n, SwarmId(b"t" * 32)) for n in (10, 11)]
    founder, other, newcomer = Seeker(1), Seeker(2), Seeker(3)
    async with running(*bootstraps) as nursery:
        named = [address for stranger in bootstraps for address in stranger.host.addresses]
        founder.known = other.known = list(named)
        await nursery.start(founder.run)
        await nursery.start(other.run)
        await until(lambda: founder.linked() == {other.peer})
        for stranger in bootstraps:
            stranger.scope.cancel()
        newcomer.known = [*named, *other.host.addresses]
        await nursery.start(newcomer.run)
        await until(lambda: newcomer.linked() == {founder.peer, other.peer})


async def test_node_says_where_it_is_when_it_belongs_and_anew_with_a_greater_sequence() -> None:
    founder, newcomer = Seeker(1, table=PointTable()), Seeker(2, table=(point_table := PointTable()))
    async with running(founder, newcomer):
        await until(lambda: point_table.looked_up >= 3)
        assert point_table.announced == []
        await newcomer.join(founder)
        await until(lambda: point_table.announced)
        assert isinstance(founder.table, PointTable)
        points = [open_point(data, swarm=MANIFEST.swarm_id) for data in founder.table.announced]
        assert {point.peer for point in points} == {founder.peer}
        assert {point.addresses for point in points} == {founder.host.addresses}
        sequences = [point.sequence for point in points]
        assert sequences == sorted(set(sequences))
        assert sequences[0] == (1 << 32) + 1


@pytest.mark.parametrize("lie", ["not signed", "of a foreign swarm", "of who is not admitted", "none"])
async def test_node_meets_nobody_whose_point_does_not_hold(lie: str) -> None:
    closed = manifest(allowed=[1, 2])
    member, outsider = Node(1, manifest=closed), Node(3, manifest=closed)
    seeker = Seeker(2, manifest=closed, table=(point_table := PointTable()))
    async with running(member, outsider) as nursery:
        who = outsider if lie == "of who is not admitted" else member
        swarm_id = (MANIFEST if lie == "of a foreign swarm" else closed).swarm_id
        signed = sign_point(identity(who.seed), swarm_id, addresses=who.host.addresses, sequence=1)
        point_table.points = [b"\xc1", signed[:-1] + bytes([signed[-1] ^ 1]) if lie == "not signed" else signed]
        await nursery.start(seeker.run)
        if lie == "none":
            await until(lambda: seeker.linked() == {member.peer})
        else:
            await until(lambda: point_table.looked_up >= 3)
            assert seeker.host.connected() == frozenset()


async def test_node_meets_nobody_by_a_point_that_has_expired() -> None:
    nowhere = f"/ip4/127.0.0.1/tcp/9/p2p/{identity(1).peer_id}"
    member, seeker = Node(1), Seeker(2, table=(point_table := PointTable()))
    point_table.points = [sign_point(identity(1), MANIFEST.swarm_id, addresses=[nowhere], sequence=1, valid_s=1)]
    async with running(member, seeker):
        await until(lambda: point_table.looked_up >= 2)
        expired_at = trio.current_time() + 1
        await until(lambda: trio.current_time() >= expired_at)
        there = member.host.addresses
        point_table.points = [sign_point(identity(1), MANIFEST.swarm_id, addresses=there, sequence=1, valid_s=1)]
        looked_up = point_table.looked_up
        await until(lambda: point_table.looked_up >= looked_up + 3)
        assert seeker.host.connected() == frozenset()


def _config(*, join: Sequence[str] = (), bootstrap: Sequence[str] = (), **changes: object) -> NodeConfig:
    base = MANIFEST
    with_bootstrap = Manifest(
        swarm=base.swarm, workload=base.workload, sync=base.sync, network=NetworkSection(bootstrap=list(bootstrap))
    )
    return NodeConfig(manifest=with_bootstrap, data_dir=Path(), join=tuple(join), **changes)  # type: ignore[arg-type]


def test_table_is_used_where_an_address_beyond_this_machine_is_named_or_as_the_user_says() -> None:
    assert not wants_table(_config())
    assert not wants_table(_config(join=[ON_LOOPBACK], bootstrap=[ON_LOOPBACK]))
    assert wants_table(_config(join=[BEYOND]))
    assert wants_table(_config(bootstrap=[ON_LOOPBACK, BEYOND]))
    assert wants_table(_config(rendezvous="on"))
    assert not wants_table(_config(join=[BEYOND], rendezvous="off"))
