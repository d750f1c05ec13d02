"""Dial-backs between real hosts on loopback: what is proven, who is believed, and nobody made to knock elsewhere."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import pytest
import trio

from shoal.protocol.address import format_circuit, parse_address
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.reaching import dial_back, networks
from shoal.swarm.reaching.dial_back import (
    DIAL_BACK_PROTOCOL,
    FINDING_S,
    PEER_BURST_PROBES,
    AskDialBack,
    DialBackServer,
    DialedBack,
    Evidence,
    Finding,
    ask_dial_back,
)
from shoal.swarm.reaching.dial_back_probes import EXPECTED_LIMIT, DialBackProbes, Expected, probe
from shoal.swarm.reaching.networks import in_dialling_order, is_private
from shoal.swarm.streams import MessageStream

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WAIT_S = 30.0


def port_of(host: Host) -> int:
    return parse_address(host.addresses[0]).port


@contextlib.asynccontextmanager
async def asker_and_checker(
    *, admits: Callable[[PeerId], bool] = lambda peer: True, more: int = 0
) -> AsyncIterator[list[Host]]:
    """The asker, which is connected to all others; the second one knocks for whom it admits."""
    made = [Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(2 + more)]
    async with trio.open_nursery() as nursery:
        for host in made:
            await nursery.start(host.run)
        DialBackServer(made[1], admits)
        for host in made[1:]:
            await made[0].dial(host.addresses[0], deadline_s=WAIT_S)
        yield made
        nursery.cancel_scope.cancel()


async def closed_port() -> int:
    """A port at which nobody listens."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


@contextlib.asynccontextmanager
async def bystander() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A third party that listens: its port, and what anybody who connected sent."""
    heard: list[bytes] = []

    async def listen(stream: trio.SocketStream) -> None:
        async with stream:
            heard.append(b"")
            heard[-1] = bytes(await stream.receive_some(100))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, listen, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1], heard
        nursery.cancel_scope.cancel()


async def test_port_at_which_this_node_listens_is_reached_and_another_is_not() -> None:
    async with asker_and_checker() as (asker, checker), bystander() as (stranger, heard):
        mine, nobodys = port_of(asker), await closed_port()
        finding = await ask_dial_back(asker, checker.peer_id, (mine, nobodys, stranger))
        assert finding == Finding(
            checker=checker.peer_id,
            host="127.0.0.1",
            asked=(mine, nobodys, stranger),
            reached=frozenset({mine}),
            own_host="127.0.0.1",
        )
        assert finding.found_at > 0
        assert [len(data) for data in heard] == [16], "a stranger is sent a knock and nothing else"
        assert checker.peer_id in asker.connected(), "a knock is no connection"
        assert await probe("127.0.0.1", mine, bytes(32)) is False, "a knock that nobody expects has no answer"


async def test_nobody_is_sent_against_a_third_party() -> None:
    """The message has no place for a host, and a relayed connection no address: the relay would be what is hit."""
    async with asker_and_checker(more=1) as (asker, checker, relay), bystander() as (stranger, heard):
        relay.relay.admits = lambda peer: True
        await checker.dial(relay.addresses[0], deadline_s=WAIT_S)
        await checker.circuits.reserve(relay.peer_id)
        await asker.close(asker.connection(checker.peer_id))
        await asker.dial(format_circuit(relay.addresses[0], checker.peer_id), deadline_s=WAIT_S)
        assert not asker.is_direct(checker.peer_id)
        with pytest.raises(NetworkError, match="no address to knock at"):
            await ask_dial_back(asker, checker.peer_id, (stranger,))
        assert heard == []
        request = canonical(AskDialBack(secret=bytes(32), ports=(stranger,)))
        named = request.replace(b"\xa5ports", b"\xa4host\xa9127.0.0.9\xa5ports").replace(b"\x83", b"\x84", 1)
        with pytest.raises(NetworkError):
            await asker.request(checker.peer_id, DIAL_BACK_PROTOCOL, named, deadline_s=2.0)
        assert heard == []


async def test_forged_answer_counts_for_nothing() -> None:
    async with asker_and_checker(more=1) as (asker, _, liar):

        async def lie(stream: MessageStream) -> None:
            await stream.receive(deadline_s=WAIT_S)
            await stream.send(canonical(DialedBack(host="192.0.2.7", reached=(port_of(asker),))), deadline_s=WAIT_S)

        liar.serve(DIAL_BACK_PROTOCOL, lie)
        with pytest.raises(RemoteError, match="did not"):
            await ask_dial_back(asker, liar.peer_id, (port_of(asker),))


async def test_knock_from_the_own_network_proves_nothing_of_the_outside() -> None:
    """A member in the same network, or one whose knock came back from the own router, cannot vouch for the world."""
    async with asker_and_checker(more=1) as (asker, _, inside):

        async def probe_from_inside(stream: MessageStream) -> None:
            asked = await stream.receive(deadline_s=WAIT_S)
            secret = decode(asked, AskDialBack).secret
            assert await probe("127.0.0.1", port_of(asker), secret)
            answer = DialedBack(host="192.0.2.7", reached=(port_of(asker),))
            await stream.send(canonical(answer), deadline_s=WAIT_S)

        inside.serve(DIAL_BACK_PROTOCOL, probe_from_inside)
        finding = await ask_dial_back(asker, inside.peer_id, (port_of(asker),))
        assert finding.reached == frozenset()
    assert not dial_back._from_outside("192.0.2.7", "192.0.2.7")
    assert dial_back._from_outside("192.0.2.8", "192.0.2.7")


async def test_strangers_and_the_impatient_are_refused() -> None:
    async with asker_and_checker(admits=lambda peer: False) as (asker, checker):
        with pytest.raises(NetworkError, match="members only"):
            await ask_dial_back(asker, checker.peer_id, (port_of(asker),))
    async with asker_and_checker() as (asker, checker), bystander() as (stranger, heard):
        ports = (stranger, port_of(asker))
        for _ in range(PEER_BURST_PROBES // 2):
            await ask_dial_back(asker, checker.peer_id, ports)
        with pytest.raises(NetworkError, match="too many knocks"):
            await ask_dial_back(asker, checker.peer_id, (stranger, *range(1, 4)))
        assert len(heard) == PEER_BURST_PROBES // 2


async def test_knocks_end_with_the_question() -> None:
    async with asker_and_checker() as (asker, checker):
        await ask_dial_back(asker, checker.peer_id, (port_of(asker),))
        assert asker.dial_back_probes._expected == {}
    dial_back_probes = DialBackProbes()
    for _ in range(EXPECTED_LIMIT // 2):
        dial_back_probes.expect(Expected(ports=(1, 2)))
    with pytest.raises(NetworkError):
        dial_back_probes.expect(Expected(ports=(1, 2)))


MEMBERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(5)]


def found(number: int, *, reached: bool, host: str = "192.0.2.7") -> Finding:
    ports = frozenset({4001}) if reached else frozenset[int]()
    return Finding(checker=MEMBERS[number], host=host, asked=(4001,), reached=ports)


@pytest.mark.parametrize(
    ("words", "proven"),
    [((1,), True), ((0,), False), ((1, 0), True), ((1, 0, 0), False), ((1, 1, 0, 0, 0), True), ((0, 0, 0), False)],
)
def test_a_port_is_proven_by_two_or_by_half_of_who_knocked(words: tuple[int, ...], proven: bool) -> None:
    evidence = Evidence()
    for number, word in enumerate(words):
        evidence.add(found(number, reached=bool(word)))
    assert evidence.reached(4001) == (("192.0.2.7",) if proven else ())
    assert evidence.reached(4002) == ()
    assert evidence.outside()


def test_newest_word_of_a_member_counts_once_and_at_its_own_address() -> None:
    evidence = Evidence()
    for reached in (False, True, False):
        evidence.add(found(0, reached=reached))
    assert (len(evidence), evidence.reached(4001)) == (1, ())
    evidence.add(found(1, reached=True, host="10.1.2.3"))
    assert evidence.reached(4001) == ("10.1.2.3",)
    only_inside = Evidence()
    only_inside.add(found(1, reached=True, host="10.1.2.3"))
    assert not only_inside.outside()


def test_findings_of_long_ago_count_no_more_once_there_are_others_and_the_last_ones_stay() -> None:
    evidence = Evidence()
    for number, at in enumerate((0.0, 1.0, 600.0)):
        evidence.add(replace(found(number, reached=True, host="198.51.100.3"), found_at=at))
    assert (len(evidence), evidence.reached(4001)) == (3, ("198.51.100.3",)), "however long ago: nobody looked since"
    evidence.add(replace(found(3, reached=False), found_at=FINDING_S))
    assert (len(evidence), evidence.reached(4001)) == (3, ("198.51.100.3",))
    evidence.add(replace(found(3, reached=False), found_at=FINDING_S + 1.0))
    assert (len(evidence), evidence.hosts()) == (2, {"192.0.2.7", "198.51.100.3"})
    evidence.add(replace(found(3, reached=False), found_at=2 * FINDING_S))
    assert (len(evidence), evidence.reached(4001), evidence.hosts()) == (1, (), {"192.0.2.7"})


def test_proofs_of_an_address_that_is_gone_are_dropped_and_those_of_another_stay() -> None:
    evidence = Evidence()
    for number, (host, own_host) in enumerate(
        [("192.0.2.7", "192.168.1.5"), ("198.51.100.3", "10.8.0.7"), ("192.168.1.5", ""), ("10.8.0.7", "10.8.0.7")]
    ):
        finding = Finding(
            checker=MEMBERS[number], host=host, asked=(4001,), reached=frozenset({4001}), own_host=own_host
        )
        evidence.add(finding)
    evidence.forget_from({"192.168.1.5"})
    assert evidence.reached(4001) == ("10.8.0.7", "198.51.100.3")
    evidence.forget_from({"10.8.0.7"})
    assert (len(evidence), evidence.outside()) == (0, False)


def test_addresses_are_dialled_in_the_order_in_which_they_are_likely_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "own_networks", lambda: (ipaddress.ip_network("192.168.7.0/24"),))
    me, relay = MEMBERS[0], MEMBERS[1]
    elsewhere, near = f"/ip4/10.0.0.9/tcp/1/p2p/{me}", f"/ip4/192.168.7.3/tcp/1/p2p/{me}"
    public, named = f"/ip4/198.51.100.4/tcp/1/p2p/{me}", f"/dns4/example.org/tcp/1/p2p/{me}"
    relayed = format_circuit(f"/ip4/203.0.113.5/tcp/1/p2p/{relay}", me)
    given = (relayed, elsewhere, public, named, near)
    assert in_dialling_order(given) == (near, public, named, relayed, elsewhere)


@pytest.mark.parametrize("host", ["10.1.1.1", "172.31.0.1", "192.168.0.1", "100.64.0.1", "127.0.0.1", "::1", "fd00::1"])
def test_addresses_that_others_have_as_well_are_private(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize("host", ["172.32.0.1", "198.18.0.1", "8.8.8.8", "2001:db8::1", "example.org"])
def test_addresses_that_mean_one_machine_are_not(host: str) -> None:
    assert not is_private(host)
