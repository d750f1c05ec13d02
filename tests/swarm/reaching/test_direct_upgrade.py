"""Relayed connections made straight, on loopback: two that have each other through a relay alone, which sees them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.wire import canonical
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import format_address
from shoal.swarm.reaching import observed_addresses
from shoal.swarm.reaching.direct_upgrade import DIRECT_UPGRADE_PROTOCOL, DirectUpgrade, Straight, Straighten
from shoal.swarm.reaching.punching import Puncher
from shoal.swarm.reaching.reach import Reach
from tests.swarm.reaching.test_circuits import ECHO, LOOPBACK, SECRET, WAIT_S, echo, through
from tests.swarm.reaching.test_punching import HERE, bystander, in_order
from tests.swarm.reaching.test_relayed_lanes import Facts, Node, make_node
from tests.waiting import until

GREETING = b"\x13/multistream/1.0.0\n"


@dataclass
class End:
    node: Node
    puncher: Puncher
    direct_upgrade: DirectUpgrade

    @property
    def host(self) -> Host:
        return self.node.host

    def sees(self, other: End) -> bool:
        """Whether it has a connection to the other that is not relayed."""
        return self.host.is_direct(other.host.peer_id)

    async def hears(self, other: End) -> bool:
        answer = await self.host.request(other.host.peer_id, ECHO, SECRET, deadline_s=WAIT_S)
        return answer == SECRET


def end_of(node: Node, relay: Node) -> End:
    def relayed() -> list[PeerId]:
        others = node.host.connected()
        return [peer for peer in others if not node.host.is_direct(peer)]

    reach = Reach(node.peer, Facts(node, [relay]), is_direct=node.host.is_direct)
    puncher = Puncher(node.host, reach, lambda: frozenset(HERE))
    return End(node, puncher, DirectUpgrade(node.host, puncher, relayed))


@contextlib.asynccontextmanager
async def relayed_pair(*, straighten: bool = True) -> AsyncIterator[tuple[End, End, Node]]:
    """Two connected through a relay, the lower PeerId first. straighten: whether they make that straight."""
    relay, *others = [make_node() for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for node in (relay, *others):
            node.host.serve(ECHO, echo)
            await nursery.start(node.host.run)
            await nursery.start(node.lanes.run)
        relay.observed_addresses.admits = relay.host.relay.admits = lambda peer: True
        relay.lanes.use(
            Reach(relay.peer, Facts(relay, [])),
            dial_back_probes=relay.host.dial_back_probes,
            handlers=(relay.relayed_lanes, relay.observed_addresses),
        )
        for node in others:
            await node.host.dial(relay.host.addresses[0], deadline_s=WAIT_S)
        lower, higher = (end_of(node, relay) for node in in_order(*others))
        await higher.host.circuits.reserve(relay.peer)
        await lower.host.dial(through(relay.host, higher.node.peer), deadline_s=WAIT_S)
        await until(lambda: lower.node.peer in higher.host.connected())
        assert not lower.sees(higher)
        if straighten:
            for end in (lower, higher):
                nursery.start_soon(end.puncher.run)
                nursery.start_soon(end.direct_upgrade.run)
        yield lower, higher, relay
        nursery.cancel_scope.cancel()


async def test_relayed_connection_becomes_a_straight_one_and_the_relay_passes_on_no_more() -> None:
    async with relayed_pair() as (lower, higher, relay):
        await until(lambda: lower.sees(higher) and higher.sees(lower))
        await until(lambda: relay.host.relay.circuits == 0)
        passed = relay.host.relay.bytes_passed
        assert await lower.hears(higher)
        assert await higher.hears(lower)
        assert relay.host.relay.bytes_passed == passed
        assert lower.host.connected() == {higher.node.peer, relay.peer}


async def test_connection_stays_relayed_where_no_hole_leads_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the port that was seen hears how a handshake begins, and no more."""

    monkeypatch.setattr("shoal.swarm.transport.TAKE_OVER_DEADLINE_S", 0.3)
    async with bystander() as (port, heard):
        monkeypatch.setattr(observed_addresses, "format_address", lambda host, _: format_address(host, port))
        async with relayed_pair() as (lower, higher, _):
            await until(lambda: lower.puncher.reach.rests(higher.node.peer))
            assert not lower.sees(higher)
            assert await lower.hears(higher)
            assert await higher.hears(lower)
            assert lower.puncher.reach.onlooker(higher.node.peer) is None, "it is left at that for a while"
        assert heard
        assert all((GREETING + b"\x07/noise\n").startswith(part) for part in heard)


async def test_nobody_is_dialled_where_the_relay_did_not_see_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bystander() as (port, heard), relayed_pair(straighten=False) as (lower, higher, _):

        async def lie(peer: PeerId, asked: Straighten) -> Straight:
            return Straight(address=f"127.0.0.1:{port}")

        monkeypatch.setattr(higher.direct_upgrade, "_answer", lie)
        assert not await lower.direct_upgrade.begin(higher.node.peer)
        assert lower.puncher.reach.rests(higher.node.peer)
        assert heard == []
        assert not lower.sees(higher)


async def test_higher_peer_that_begins_is_at_fault() -> None:
    async with relayed_pair(straighten=False) as (lower, higher, relay):
        asked = canonical(Straighten(relay=relay.peer, address="127.0.0.1:1"))
        with pytest.raises(NetworkError):
            await higher.host.request(lower.node.peer, DIRECT_UPGRADE_PROTOCOL, asked, deadline_s=WAIT_S)
        assert lower.host.remote_errors == 1


@pytest.mark.parametrize("dialled", [True, False], ids=["dials", "is dialled"])
async def test_whoever_else_is_at_the_other_end_gets_no_connection(dialled: bool) -> None:
    async with relayed_pair(straighten=False) as (lower, higher, _):
        ends: list[trio.SocketStream] = []
        other = Host(identity=Identity.generate(), listen=LOOPBACK)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, trio.open_nursery() as nursery:

            async def accept() -> None:
                ends.append(await listener.accept())

            await nursery.start(other.run)
            nursery.start_soon(accept)
            mine = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
            await until(lambda: bool(ends))

            async def pretend() -> None:
                with contextlib.suppress(NetworkError):
                    await other.take_over(ends[0], lower.node.peer, dialled=not dialled)

            nursery.start_soon(pretend)
            with pytest.raises(NetworkError):
                await lower.host.take_over(mine, higher.node.peer, dialled=dialled)
            nursery.cancel_scope.cancel()
        assert other.peer_id not in lower.host.connected()
        assert mine.socket.fileno() == -1
        assert not lower.sees(higher)
