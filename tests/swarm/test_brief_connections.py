"""Brief connections by value, with a host that notes whom it dials and parts from, and once with real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm import brief_connections
from shoal.swarm.brief_connections import IDLE_LIMIT_S, LOOK_S, BriefConnections
from shoal.swarm.host import Host
from tests.waiting import WAIT_S, until
from tests.waiting import running as running_all

A, B, C, LINKED, CALLER = (PeerId(name) for name in ("a", "b", "c", "linked", "caller"))
NOWHERE = PeerId("nowhere")


class NotedHost:
    """Connects to whoever has an address, at once."""

    def __init__(self) -> None:
        self.peers = {LINKED, CALLER}
        self.dialled: list[PeerId] = []
        self.parted: list[PeerId] = []

    def connected(self) -> frozenset[PeerId]:
        return frozenset(self.peers)

    async def dial_peer(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()
        assert addresses == [f"address of {peer}"]
        self.dialled.append(peer)
        self.peers.add(peer)

    def connection(self, peer: PeerId) -> object | None:
        return peer if peer in self.peers else None

    async def close(self, connection: object | None) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(connection, str)
        self.parted.append(PeerId(connection))
        self.peers.discard(PeerId(connection))


def connections_of(host: NotedHost, linked: set[PeerId]) -> BriefConnections:
    return BriefConnections(
        host,
        addresses_of=lambda peer: [] if peer == NOWHERE else [f"address of {peer}"],
        is_linked=lambda peer: peer in linked,
    )


@asynccontextmanager
async def running() -> AsyncIterator[tuple[NotedHost, BriefConnections, set[PeerId]]]:
    host, linked = NotedHost(), {LINKED}
    connections = connections_of(host, linked)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.run)
        yield host, connections, linked
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time(limit_s=600)
async def test_connection_is_made_once_for_requests_that_follow_each_other_and_ended_when_idle() -> None:
    async with running() as (host, connections, _):
        for _ in range(3):
            async with connections.to(A):
                await trio.sleep(IDLE_LIMIT_S + 2 * LOOK_S)  # in use for longer than it may be idle
                assert A in host.peers
            await trio.sleep(IDLE_LIMIT_S - 2 * LOOK_S)
        assert (host.dialled, host.parted) == ([A], [])
        await trio.sleep(3 * LOOK_S)
        assert host.parted == [A]
        async with connections.to(A):
            assert host.dialled == [A, A]


@pytest.mark.virtual_time(limit_s=600)
async def test_what_others_made_is_used_and_left_alone() -> None:
    async with running() as (host, connections, linked):
        for peer in (LINKED, CALLER):
            async with connections.to(peer):
                pass
        async with connections.to(A):
            linked.add(A)  # it became a neighbour meanwhile
        await trio.sleep(IDLE_LIMIT_S + 2 * LOOK_S)
        assert (host.dialled, host.parted) == ([A], [])


@pytest.mark.virtual_time(limit_s=600)
async def test_too_many_make_room_idle_longest_first_and_those_in_use_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(brief_connections, "CONNECTIONS_LIMIT", 2)
    async with running() as (host, connections, _):
        for peer in (A, B):
            async with connections.to(peer):
                pass
            await trio.sleep(0.1)
        async with connections.to(C):
            assert host.peers == {LINKED, CALLER, B, C}
            async with connections.to(B):
                with trio.move_on_after(1) as waited:
                    async with connections.to(A):
                        pytest.fail("a third one in use")
                assert waited.cancelled_caught
        async with connections.to(A):
            assert len(host.peers - {LINKED, CALLER}) == 2


@pytest.mark.virtual_time(limit_s=600)
async def test_who_is_asked_again_while_others_are_parted_from_stays_and_who_is_parted_from_is_dialled_anew() -> None:
    parting, parted = trio.Event(), trio.Event()

    class SlowHost(NotedHost):
        async def close(self, connection: object | None) -> None:
            parting.set()
            await parted.wait()
            await super().close(connection)

    host = SlowHost()
    connections = connections_of(host, {LINKED})
    again: list[PeerId] = []

    async def ask(peer: PeerId) -> None:
        async with connections.to(peer):
            assert peer in host.peers
            again.append(peer)

    for peer in (A, B):
        async with connections.to(peer):
            pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.run)
        await parting.wait()
        async with connections.to(B):  # both were idle for as long
            nursery.start_soon(ask, A)
            await trio.testing.wait_all_tasks_blocked()
            assert again == []
            parted.set()
            await trio.testing.wait_all_tasks_blocked()
            assert again == [A]
            assert B in host.peers
        nursery.cancel_scope.cancel()
    assert (host.parted, host.dialled) == ([A], [A, B, A])


@pytest.mark.virtual_time(limit_s=600)
async def test_peer_without_an_address_is_not_reached() -> None:
    host = NotedHost()
    connections = connections_of(host, set())
    assert not connections.may_reach(NOWHERE)
    assert connections.may_reach(A)
    with pytest.raises(NetworkError, match="no address of nowhere is known"):
        async with connections.to(NOWHERE):
            pytest.fail("it is nowhere")


async def test_connection_that_took_the_place_of_a_brief_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief_connections, "IDLE_LIMIT_S", 0.0)
    monkeypatch.setattr(brief_connections, "LOOK_S", 0.05)
    one, other = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
    far, me = sorted((one, other), key=lambda identity: identity.peer_id)  # so the new one wins at any time
    near, first, again = (Host(identity=who, listen=("/ip4/127.0.0.1/tcp/0",)) for who in (me, far, far))
    connections = BriefConnections(near, addresses_of=lambda peer: first.addresses, is_linked=lambda peer: False)
    async with running_all(near, first, again), trio.open_nursery() as nursery:
        async with connections.to(far.peer_id):
            brief = near.connection(far.peer_id)
            await again.dial(near.addresses[0], deadline_s=WAIT_S)
            await until(lambda: near.connection(far.peer_id) not in (brief, None))
        nursery.start_soon(connections.run)
        await until(lambda: not connections._made and not connections._ending)
        assert again.peer_id in near.connected()
        nursery.cancel_scope.cancel()
