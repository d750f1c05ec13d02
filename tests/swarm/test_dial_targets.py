"""Where addresses that others name may lead: how often a third party is dialled, and which addresses never are."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from shoal.protocol.address import format_address, format_circuit, parse_address, parse_any
from shoal.protocol.identity import Identity
from shoal.swarm import dial_targets
from shoal.swarm.address_book import AddressBook
from shoal.swarm.dial_targets import (
    ADDRESSES_LIMIT,
    HOST_BURST,
    TARGET_BURST,
    TARGET_PER_S,
    DialTargets,
    places_of,
    worth_dialling,
)
from shoal.swarm.host import Host, NotReached
from shoal.swarm.limits import Rates
from shoal.swarm.reaching import networks

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 40)]
ME, RELAY = PEERS[:2]
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def at(host: str, port: int = 4001, peer: str = ME) -> str:
    kind = "ip6" if ":" in host else "dns4" if host[-1].isalpha() else "ip4"
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at 192.168.7.2."""
    for module in (dial_targets, networks):
        monkeypatch.setattr(module, "own_networks", lambda: (ipaddress.ip_network("192.168.7.0/24"),))
    monkeypatch.setattr(dial_targets, "own_hosts", lambda: frozenset({"192.168.7.2", "127.0.0.1"}))


def through(host: str, port: int = 4001) -> str:
    return format_circuit(at(host, port, RELAY), ME)


CIRCUIT = through("198.51.100.4")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("named", "tried"),
    [
        ((at("127.0.0.1"),), (at("127.0.0.1"),)),  # all on one machine
        ((at("192.168.7.2"), at("127.0.0.1")), (at("192.168.7.2"), at("127.0.0.1"))),
        ((at("192.168.7.3"), at("127.0.0.1", 6379)), (at("192.168.7.3"),)),  # another machine's loopback
        ((at("198.51.100.9"), at("127.0.0.1", 6379)), (at("198.51.100.9"),)),
        ((at("198.51.100.9"), at("192.168.7.3")), (at("192.168.7.3"), at("198.51.100.9"))),  # behind the same router
        ((at("198.51.100.9"), at("10.0.0.1", 22)), (at("198.51.100.9"),)),
        ((CIRCUIT, at("10.0.0.1")), (CIRCUIT, at("10.0.0.1"))),  # a router may know the way
        ((CIRCUIT, at("127.0.0.1", 22), at("10.0.0.1")), (CIRCUIT, at("10.0.0.1"))),
        ((CIRCUIT, at("127.0.0.1", 22)), (CIRCUIT,)),
        ((through("127.0.0.1"),), (through("127.0.0.1"),)),  # all on one machine, the relay too
        ((CIRCUIT, through("127.0.0.1", 22)), (CIRCUIT,)),
        ((at("192.168.7.3"), through("127.0.0.1", 22)), (at("192.168.7.3"),)),
        ((at("192.168.7.3"), through("::ffff:127.0.0.1", 22)), (at("192.168.7.3"),)),
        ((at("192.168.7.3"), through("0.0.0.0", 22)), (at("192.168.7.3"),)),
        ((at("198.51.100.9"), through("10.0.0.1", 22)), (at("198.51.100.9"),)),
        ((CIRCUIT, through("10.0.0.1", 22)), (CIRCUIT,)),
        ((CIRCUIT, through("192.168.7.3")), (CIRCUIT, through("192.168.7.3"))),  # of both this machine's and another
        ((through("10.0.0.1"), at("10.0.0.2")), (through("10.0.0.1"), at("10.0.0.2"))),
        ((through("relay.example"), at("10.0.0.2")), (through("relay.example"), at("10.0.0.2"))),
        (("nonsense", at("example.org")), ("nonsense", at("example.org"))),
        ((at("198.51.100.9"), at("0.0.0.0", 6379)), (at("198.51.100.9"),)),  # it is this machine that answers there
        ((at("198.51.100.9"), at("::", 6379)), (at("198.51.100.9"),)),
        ((at("198.51.100.9"), at("::ffff:127.0.0.1", 6379)), (at("198.51.100.9"),)),
        ((at("198.51.100.9"), at("::ffff:10.0.0.1", 22)), (at("198.51.100.9"),)),
        ((at("198.51.100.9"), at("::ffff:192.168.7.3")), (at("198.51.100.9"), at("::ffff:192.168.7.3"))),
        ((at("0.0.0.0"), at("::ffff:127.0.0.1")), (at("0.0.0.0"), at("::ffff:127.0.0.1"))),  # all on one machine
    ],
)
def test_private_addresses_are_tried_where_they_can_be_the_peers(
    named: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    assert worth_dialling(named) == tried


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("named", "tried"),
    [
        ((at("127.0.0.1", 6379),), ()),
        ((at("::1", 6379), at("0.0.0.0", 6379), at("::ffff:127.0.0.1", 6379), through("127.0.0.1", 6379)), ()),
        ((at("192.168.7.2"), at("127.0.0.1", 6379)), (at("192.168.7.2"),)),
        ((at("192.168.7.3"), at("198.51.100.9")), (at("192.168.7.3"), at("198.51.100.9"))),
    ],
)
async def test_who_is_elsewhere_too_tries_no_loopback_whatever_a_peer_names(
    named: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    assert worth_dialling(named, on_loopback=False) == tried
    trio.socket.set_custom_hostname_resolver(Names("127.0.0.1"))
    assert await places_of(parse_any(at("node.example", 6379)), named, on_loopback=False) == []


@pytest.mark.parametrize(
    ("listens_at", "user_named", "dialled"),
    [
        (("127.0.0.1",), "", 1),
        (("198.51.100.2", "127.0.0.1"), "", 0),
        (("198.51.100.2",), "127.0.0.1", 1),
        (("198.51.100.2",), "localhost", 1),
        (("198.51.100.2",), "198.51.100.3", 0),
    ],
)
async def test_loopback_is_dialled_by_who_is_there_alone_or_was_sent_there_by_its_user(
    listens_at: tuple[str, ...], user_named: str, dialled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(identity=Identity.generate(), listen=LOOPBACK)
    async with victim() as (port, came), trio.open_nursery() as nursery:
        await nursery.start(host.run)
        host.addresses = tuple(format_address(one, 4001, host.peer_id) for one in listens_at)
        if user_named:
            host._targets.named(parse_any(at(user_named)))
        with pytest.raises(NotReached):
            await host.dial_peer(ME, [at("127.0.0.1", port)], deadline_s=10)
        assert len(came) == dialled
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("machine")
def test_way_through_a_relay_that_is_connected_dials_nobody_wherever_that_is_said_to_be() -> None:
    ways = (at("198.51.100.9"), through("127.0.0.1", 22), through("10.0.0.1"))
    assert worth_dialling(ways) == ways[:1]
    assert worth_dialling(ways, is_connected={RELAY}.__contains__) == ways
    assert worth_dialling((at("127.0.0.1"), CIRCUIT), is_connected={RELAY}.__contains__) == (at("127.0.0.1"), CIRCUIT)


def test_few_addresses_of_one_peer_are_tried() -> None:
    many = [at(f"198.51.100.{n}") for n in range(16)]
    assert worth_dialling(many) == tuple(many[:ADDRESSES_LIMIT])


@pytest.mark.virtual_time
async def test_target_is_dialled_a_few_times_then_seldom_until_somebody_is_there() -> None:
    targets, victim = DialTargets(), [parse_any(at("198.51.100.9", 80, peer)) for peer in PEERS]
    assert [targets.may_dial(one) for one in victim].count(True) == TARGET_BURST
    assert not targets.may_dial(parse_any(format_circuit(at("198.51.100.9", 80, RELAY), ME)))
    assert targets.may_dial(parse_any(at("198.51.100.8", 80)))
    await trio.sleep(1 / TARGET_PER_S)
    assert [targets.may_dial(one) for one in victim].count(True) == 1
    targets.reached(victim[0])
    assert targets.may_dial(victim[1])
    assert [targets.may_dial(one) for one in victim].count(True) == TARGET_BURST - 1
    targets.begin_anew()
    assert [targets.may_dial(one) for one in victim].count(True) == TARGET_BURST


@pytest.mark.virtual_time
async def test_target_that_is_written_otherwise_is_the_same() -> None:
    targets, ways = DialTargets(), ("198.51.100.9", "::ffff:198.51.100.9", "::ffff:c633:6409")
    dialled = [targets.may_dial(parse_any(at(host, 80, peer))) for peer in PEERS for host in ways]
    assert dialled.count(True) == TARGET_BURST


@pytest.mark.virtual_time
async def test_ports_of_one_public_host_are_not_searched() -> None:
    targets = DialTargets()
    assert sum(targets.may_dial(parse_any(at("198.51.100.9", port))) for port in range(1, 300)) == HOST_BURST
    assert sum(targets.may_dial(parse_any(at("10.0.0.9", port))) for port in range(1, 300)) == 299


@pytest.mark.virtual_time
async def test_names_that_others_give_are_one_target_and_those_of_the_user_are_not() -> None:
    targets = DialTargets()
    targets.named(parse_any(at("bootstrap.example.org")))
    others = [parse_any(at(f"n{n}.example.org")) for n in range(40)]
    assert sum(map(targets.may_dial, others)) == TARGET_BURST
    assert targets.may_dial(parse_any(at("bootstrap.example.org")))


@contextlib.asynccontextmanager
async def victim() -> AsyncIterator[tuple[int, list[None]]]:
    """A third party that listens and wants nothing of it: its port, and one entry for each who came."""
    came: list[None] = []

    async def turn_away(stream: trio.SocketStream) -> None:
        came.append(None)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, turn_away, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1], came
        nursery.cancel_scope.cancel()


class Names(trio.abc.HostnameResolver):
    """A resolver by which all names lead to `hosts`."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    async def getaddrinfo(
        self, host: bytes | None, port: object, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port)) for found in self.hosts]

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        raise AssertionError("nobody asks")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("beside", "leads_to", "tried"),
    [
        ((), ("198.51.100.9", "192.168.7.3"), ("192.168.7.3", "198.51.100.9")),
        ((), ("127.0.0.1",), ("127.0.0.1",)),  # all on one machine
        ((at("192.168.7.2"),), ("127.0.0.1",), ("127.0.0.1",)),
        ((), ("10.0.0.1",), ("10.0.0.1",)),  # a router may know the way
        ((at("198.51.100.9"),), ("192.168.7.3",), ("192.168.7.3",)),  # behind the same router
        ((at("198.51.100.9"),), ("10.0.0.1", "127.0.0.1", "198.51.100.8"), ("198.51.100.8",)),
        ((at("192.168.7.3"),), ("127.0.0.1",), ()),  # another machine's loopback
        ((), ("198.51.100.9", "10.0.0.1", "0.0.0.0"), ("198.51.100.9",)),
    ],
)
async def test_name_leads_to_private_addresses_where_these_could_be_named(
    beside: tuple[str, ...], leads_to: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    trio.socket.set_custom_hostname_resolver(Names(*leads_to))
    name = parse_address(at("node.example"))
    assert [one.host for one in await places_of(name, (*beside, at("node.example")))] == list(tried)


async def test_name_that_another_gave_leads_nobody_to_this_machine_and_is_counted_where_it_leads() -> None:
    names = Names("127.0.0.1")
    trio.socket.set_custom_hostname_resolver(names)
    host, other = (Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(2))
    while host._targets.may_dial(parse_any(at("198.51.100.9"))):
        pass  # so that nobody beyond this machine is
    async with victim() as (port, came), trio.open_nursery() as nursery:
        await nursery.start(host.run)
        await nursery.start(other.run)
        with pytest.raises(NotReached, match=r"rebound\.example leads nowhere that"):
            await host.dial_peer(ME, [at("rebound.example", port), at("198.51.100.9")], deadline_s=10)
        assert came == []
        host._targets._targets = Rates(1e-3, 3.0)
        for peer in PEERS[:3]:
            with pytest.raises(NotReached, match="cannot connect"):
                await host.dial_peer(peer, [format_address("127.0.0.1", port, peer)], deadline_s=10)
        assert len(came) == 3
        with pytest.raises(NotReached, match="leads nowhere"):
            await host.dial_peer(ME, [at("rebound.example", port)], deadline_s=10)
        assert len(came) == 3, "the same machine by a name is no other target"
        _, _, port_text = other.addresses[0].partition("/tcp/")
        named = at("home.example", int(port_text.split("/")[0]), other.peer_id)
        await host.dial_peer(other.peer_id, [named], deadline_s=10)
        assert other.peer_id in host.connected()
        nursery.cancel_scope.cancel()


async def test_way_through_a_relay_leads_nobody_to_this_machine_by_number_or_name() -> None:
    trio.socket.set_custom_hostname_resolver(Names("127.0.0.1"))
    host, relay, far = (Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(3))
    while host._targets.may_dial(parse_any(at("198.51.100.9"))):
        pass  # so that nobody beyond this machine is
    async with victim() as (port, came), trio.open_nursery() as nursery:
        for one in (host, relay, far):
            await nursery.start(one.run)
        for named in ("127.0.0.1", "0.0.0.0", "rebound.example"):
            with pytest.raises(NotReached):
                await host.dial_peer(ME, [through(named, port), at("198.51.100.9")], deadline_s=10)
        assert came == []
        relay.relay.admits = lambda peer: True
        await far.dial(relay.addresses[0], deadline_s=10)
        await far.circuits.reserve(relay.peer_id)
        own = relay.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/relay.example/")
        await host.dial_peer(far.peer_id, [format_circuit(own, far.peer_id)], deadline_s=10)
        assert far.peer_id in host.connected()
        nursery.cancel_scope.cancel()


async def test_relay_that_goes_before_its_turn_sends_nobody_where_it_was_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trio.socket.set_custom_hostname_resolver(Names("127.0.0.1"))
    host, relay = (Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(2))
    while host._targets.may_dial(parse_any(at("198.51.100.9"))):
        pass  # so that nobody beyond this machine is
    async with victim() as (port, came), trio.open_nursery() as nursery:
        for one in (host, relay):
            await nursery.start(one.run)
        for named in ("127.0.0.1", "rebound.example"):
            await host.dial(relay.addresses[0], deadline_s=10)
            gone = host.connection(relay.peer_id)

            async def part(address: Any, *arguments: Any, of: object = gone, **options: Any) -> list[Any]:
                await host.close(of)  # while another of the addresses is tried
                return []

            first, last = at("slow.example"), format_circuit(at(named, port, relay.peer_id), ME)
            monkeypatch.setattr("shoal.swarm.host.places_of", part)
            with pytest.raises(NotReached):
                await host.dial_peer(ME, [first, at("198.51.100.9"), last], deadline_s=10)
            monkeypatch.undo()
            assert relay.peer_id not in host.connected()
        assert came == []
        nursery.cancel_scope.cancel()


async def test_many_records_send_a_node_to_a_third_party_a_few_times_only() -> None:
    host, other = (Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(2))
    host._targets._targets = Rates(1e-3, 3.0)
    async with victim() as (port, came), trio.open_nursery() as nursery:
        await nursery.start(host.run)
        await nursery.start(other.run)
        for peer in PEERS[:3]:
            with pytest.raises(NotReached, match="cannot connect"):
                await host.dial_peer(peer, [format_address("127.0.0.1", port, peer)], deadline_s=10)
        for named in (format_address("127.0.0.1", port, ME), format_circuit(at("127.0.0.1", port, RELAY), ME)):
            with pytest.raises(NotReached, match="too often") as caught:
                await host.dial_peer(ME, [named], deadline_s=10)
            assert not caught.value.proves_end("127.0.0.1")
        assert len(came) == 3
        back = format_circuit(host.addresses[0], other.peer_id)
        with pytest.raises(NotReached, match="leads back here"):
            await host.dial_peer(other.peer_id, [back], deadline_s=10)
        for _ in range(5):  # who is there is dialled as often as it takes
            await host.dial_peer(other.peer_id, other.addresses, deadline_s=10)
            await host.close(host.connection(other.peer_id))
        nursery.cancel_scope.cancel()


def test_address_book_keeps_ways_through_relays() -> None:
    book = AddressBook()
    book.linked(ME, (CIRCUIT, at("10.0.0.1"), format_circuit(at("198.51.100.4", peer=RELAY), PEERS[2])))
    (known,) = AddressBook.parse(book.to_bytes()).best()
    assert known.addresses == (CIRCUIT, at("10.0.0.1"))
