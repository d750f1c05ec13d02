"""What a machine's own addresses become, from what its kernel says and from what is there."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace

import pytest
import trio

from shoal.protocol.identity import Identity
from shoal.swarm import host as host_module
from shoal.swarm.host import Host
from shoal.swarm.reaching import networks, own_addresses
from shoal.swarm.reaching.networks import bound_hosts
from shoal.swarm.reaching.own_addresses import POLL_S, SETTLE_S, AddressChange, Heard, OwnAddresses, Poll, heard_in

HOME, CAFE, CABLE = "192.168.1.5", "10.8.0.7", "192.168.1.6"
DELETED_ADDRESS, NEW_ADDRESS, NEW_ROUTE = 21, 20, 24
MAIN, LOCAL = 254, 255


class Machine:
    """Addresses that a test changes, and what its kernel says of that."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = set(hosts)
        self._say, self._heard = trio.open_memory_channel[Heard](10)

    async def next(self) -> Heard:
        return await self._heard.receive()

    def change(self, *, gone: tuple[str, ...] = (), come: tuple[str, ...] = (), rerouted: bool = False) -> None:
        self.hosts = (self.hosts - set(gone)) | set(come)
        self._say.send_nowait(Heard(removed=frozenset(gone), rerouted=rerouted))

    def own(self) -> OwnAddresses:
        return OwnAddresses(self, lambda: frozenset(self.hosts))


@pytest.mark.virtual_time(limit_s=60)
async def test_change_is_what_is_gone_and_what_has_come_once_it_is_quiet() -> None:
    machine = Machine(HOME, CABLE)
    own = machine.own()

    async def go_elsewhere() -> None:
        machine.change(gone=(HOME,))
        await trio.sleep(SETTLE_S / 2)
        machine.change(come=(CAFE,))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_elsewhere)
        assert await own.next_change() == AddressChange(gone=frozenset({HOME}), come=frozenset({CAFE}))
    assert trio.current_time() - began == pytest.approx(1.5 * SETTLE_S)
    assert own.now == {CAFE, CABLE}


@pytest.mark.virtual_time(limit_s=60)
async def test_address_that_went_and_came_back_is_both_and_what_changes_nothing_is_no_change() -> None:
    machine = Machine(HOME)
    own = machine.own()
    machine.change()  # a lease was renewed, say
    with trio.move_on_after(10.0) as waited:
        await own.next_change()
    assert waited.cancelled_caught
    machine.change(gone=(HOME,), come=(HOME,))
    assert await own.next_change() == AddressChange(gone=frozenset({HOME}), come=frozenset({HOME}))
    machine.change(gone=("172.17.0.1",))
    machine.change(rerouted=True)
    assert await own.next_change() == AddressChange(), "another way out; that address was nobody's here"


@pytest.mark.virtual_time(limit_s=60)
async def test_network_that_is_never_quiet_is_not_waited_for_for_ever() -> None:
    machine = Machine(HOME)
    own = machine.own()

    async def flap() -> None:
        while True:
            machine.change(gone=(HOME,))
            await trio.sleep(SETTLE_S / 2)
            machine.change(come=(HOME,))
            await trio.sleep(SETTLE_S / 4)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flap)
        await own.next_change()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began <= own_addresses.SETTLE_LIMIT_S + SETTLE_S


@pytest.mark.virtual_time(limit_s=60)
async def test_where_nothing_is_said_the_addresses_are_looked_at() -> None:
    hosts = {HOME}
    own = OwnAddresses(Poll(), lambda: frozenset(hosts))
    hosts.add(CABLE)
    began = trio.current_time()
    assert await own.next_change() == AddressChange(come=frozenset({CABLE}))
    assert trio.current_time() - began == pytest.approx(POLL_S + SETTLE_S)


def message(kind: int, body: bytes) -> bytes:
    """As of rtnetlink(7), padded to the next one."""
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body + bytes(-len(body) % 4)


def address(host: str, attribute: int = 2) -> bytes:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host)
    label = struct.pack("=HH", 4 + 5, 3) + b"eth0\0" + bytes(3)
    return struct.pack("=BBBBI", family, 24, 0, 0, 7) + label + struct.pack("=HH", 4 + len(packed), attribute) + packed


def route(bits: int, table: int) -> bytes:
    return struct.pack("=BBBBBBBBI", socket.AF_INET, bits, 0, 0, table, 0, 0, 0, 0)


def test_kernel_is_understood() -> None:
    assert heard_in(message(DELETED_ADDRESS, address(HOME)) + message(NEW_ADDRESS, address(CAFE))) == Heard(
        removed=frozenset({HOME})
    )
    assert heard_in(message(DELETED_ADDRESS, address("2001:db8::5", 1))) == Heard(removed=frozenset({"2001:db8::5"}))
    assert heard_in(message(NEW_ADDRESS, address(CAFE))) == Heard()
    assert heard_in(message(NEW_ROUTE, route(0, MAIN))) == Heard(rerouted=True)
    assert heard_in(message(NEW_ROUTE, route(24, MAIN)) + message(NEW_ROUTE, route(0, LOCAL))) is None
    whole = message(DELETED_ADDRESS, address(HOME))
    for cut in range(len(whole)):
        assert heard_in(whole[:cut]) is None, "what is not whole says nothing"


async def test_this_machine_is_watched() -> None:
    with own_addresses.own_addresses() as own:
        assert own.now == own_addresses.usable_hosts()
        assert not any(host.startswith("127.") or host == "::1" for host in own.now)


def test_what_listens_at_an_address_that_is_gone_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "own_hosts", lambda: frozenset({"127.0.0.1", CAFE}))
    monkeypatch.setattr(networks, "interface_hosts", lambda family: [CAFE] if family == socket.AF_INET else ["::7"])
    assert [bound_hosts(host) for host in ("0.0.0.0", "::", CAFE, HOME)] == [[CAFE], ["::7"], [CAFE], []]
    assert bound_hosts("127.0.0.2") == ["127.0.0.2"]


@pytest.mark.parametrize(
    ("up", "addresses", "has_network"),
    [
        (True, ["127.0.0.1", "::1", HOME], True),
        (True, ["2001:db8::5", "fe80::1%eth0"], True),
        (True, ["127.0.0.1", "::1", "169.254.3.4", "fe80::1%eth0"], False),
        (False, [HOME], False),  # its cable is out
        (True, [], False),
    ],
)
def test_machine_has_a_network_where_an_interface_that_is_up_has_an_address_for_others(
    monkeypatch: pytest.MonkeyPatch, up: bool, addresses: list[str], has_network: bool
) -> None:
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
    entries = [SimpleNamespace(family=family, address=host) for family, host in zip(families, addresses, strict=True)]
    monkeypatch.setattr(networks.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=up)})
    monkeypatch.setattr(networks.psutil, "net_if_addrs", lambda: {"eth0": entries, "gone": entries})
    assert networks.has_network() is has_network
    beyond, within = (
        Host(identity=Identity.generate(), listen=[f"/ip4/{at}/tcp/0"]) for at in ("0.0.0.0", "127.0.0.1")
    )
    assert (beyond.is_cut_off, within.is_cut_off) == (not has_network, False)


def test_whether_there_is_a_network_is_looked_at_seldom_and_at_once_where_addresses_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has, looks = [False], list[bool]()

    def look() -> bool:
        looks.append(True)
        return has[0]

    monkeypatch.setattr(host_module, "has_network", look)
    monkeypatch.setattr(host_module, "NETWORK_LOOK_S", 3600.0)
    host = Host(identity=Identity.generate(), listen=["/ip4/0.0.0.0/tcp/0"])
    host._bound = []
    assert [host.is_cut_off for _ in range(100)] == [True] * 100
    assert len(looks) == 1
    has[0] = True
    host.renew_addresses()
    assert not host.is_cut_off
    monkeypatch.setattr(host_module, "NETWORK_LOOK_S", 0.0)
    has[0] = False
    assert host.is_cut_off
