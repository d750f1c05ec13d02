"""Discovery on the local network, over the loopback interface's own multicast."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading

import pytest
import trio

from shoal.protocol.identity import Identity
from shoal.swarm.rendezvous import mdns
from shoal.swarm.rendezvous.mdns import LocalDiscovery, LocalPeer
from tests.waiting import WAIT_S, running

LOOPBACK = ["127.0.0.1"]
GROUP = "224.0.0.251"


def loopback_multicast_fault() -> str:
    """Send ourselves one multicast datagram over loopback; why that is impossible, or nothing."""
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("", 0))
            membership = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton("127.0.0.1"))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            receiver.settimeout(1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            sender.sendto(b"probe", (GROUP, receiver.getsockname()[1]))
            receiver.recv(16)
    except OSError as error:
        return f"multicast over loopback does not work here: {error}"
    return ""


@pytest.fixture(scope="module", autouse=True)
def _multicast() -> None:
    if fault := loopback_multicast_fault():
        pytest.skip(fault)


def discovery(seed: int, swarm_id: str, *, port: int = 4001) -> LocalDiscovery:
    peer = Identity.from_seed(bytes([seed]) * 32).peer_id
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
    return LocalDiscovery(peer=peer, swarm_id=swarm_id, addresses=[address], interfaces=LOOPBACK)


async def test_discovery_finds_the_other_of_its_swarm() -> None:
    ours, other = discovery(1, "aa" * 32), discovery(2, "aa" * 32, port=4002)
    async with trio.open_nursery() as nursery:
        for one in (other, ours):
            await nursery.start(one.run)
        seen_by_other = await other.found.receive()
        seen_by_us = await ours.found.receive()
        nursery.cancel_scope.cancel()
    peer_1, peer_2 = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in (1, 2))
    assert seen_by_us == LocalPeer(peer=peer_2, addresses=(f"/ip4/127.0.0.1/tcp/4002/p2p/{peer_2}",))
    assert seen_by_other == LocalPeer(peer=peer_1, addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_1}",))


def test_discovery_passes_over_another_swarm() -> None:
    ours, other, stranger = discovery(1, "aa" * 32), discovery(2, "aa" * 32), discovery(2, "bb" * 32)
    peer = Identity.from_seed(bytes([2]) * 32).peer_id
    assert ours._read(peer, other._service()) is not None
    assert ours._read(peer, stranger._service()) is None


def test_discovery_passes_over_addresses_that_name_another_peer() -> None:
    ours, other = discovery(1, "aa" * 32), discovery(2, "aa" * 32)
    impersonated = Identity.from_seed(bytes([9]) * 32).peer_id
    assert ours._read(impersonated, other._service()) is None


async def test_names_behind_which_there_is_nothing_keep_no_neighbour_from_being_found() -> None:
    ours, other, over = discovery(1, "aa" * 32), discovery(2, "aa" * 32, port=4002), threading.Event()

    class Answers:
        """Of whom it asks, one answers."""

        def get_service_info(self, kind: str, name: str, deadline_ms: int) -> object:
            info = other._service()
            if name == info.name:
                return info
            over.wait(WAIT_S)
            return None

    async with trio.open_nursery() as nursery:
        for number in range(mdns.LOOKUPS_AT_ONCE - 1):
            ours._sightings.put(f"nobody{number}.{mdns.SERVICE_TYPE}")
        ours._sightings.put(other._service().name)
        nursery.start_soon(ours._look_up, Answers())
        with trio.fail_after(WAIT_S):
            found = await ours.found.receive()
        over.set()
        nursery.cancel_scope.cancel()
    assert found.peer == other._peer


async def test_discovery_starts_and_stops_however_long_it_takes_to_be_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announcing, announced = threading.Event(), threading.Event()

    def register(*_: object) -> None:
        announcing.set()
        assert announced.wait(WAIT_S)

    monkeypatch.setattr(mdns.Zeroconf, "register_service", register)
    one = discovery(4, "cc" * 32)
    async with running(one):
        assert await trio.to_thread.run_sync(announcing.wait, WAIT_S)
    announced.set()


async def test_discovery_that_is_never_there_holds_nobody_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = threading.Event()
    monkeypatch.setattr(mdns, "Zeroconf", lambda **_: opening.wait(WAIT_S))
    began = trio.current_time()
    with trio.move_on_after(0.05) as scope:
        await discovery(6, "ee" * 32).run()
    assert scope.cancelled_caught
    monkeypatch.setattr(mdns, "OPEN_DEADLINE_S", 0.05)
    await discovery(7, "ee" * 32).run()
    assert trio.current_time() - began < WAIT_S / 2
    opening.set()
    (record,) = caplog.records
    assert "cannot be found (not there within 0.05 s); peers must be named by address" in record.message


@pytest.mark.parametrize(
    ("error", "why"), [(OSError(errno.ENODEV, "No such device"), "[Errno 19] No such device"), (OSError(), "OSError")]
)
def test_discovery_without_multicast_warns_once_and_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(mdns, "Zeroconf", refuse)
    with caplog.at_level(logging.WARNING):
        trio.run(discovery(5, "dd" * 32).run)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cannot be found ({why}); peers must be named by address" in caplog.records[0].message


def test_what_zeroconf_reports_of_an_address_that_went_is_one_line_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    try:
        raise OSError(101, "Network is unreachable")
    except OSError:
        logging.getLogger("zeroconf").warning("Error with socket 26", exc_info=True)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert record.getMessage().endswith("is gone or cut off: [Errno 101] Network is unreachable")
