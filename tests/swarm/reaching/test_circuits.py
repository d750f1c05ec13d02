"""Circuits through a real relay on loopback: reserved, dialled, bounded; and libp2p's own relay and its own client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from shoal.protocol.address import CircuitAddress, format_circuit, parse_any
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm import transport
from shoal.swarm.host import Host, NotReached
from shoal.swarm.limits import Door, Reason
from shoal.swarm.reaching import circuit_relay, circuits
from shoal.swarm.reaching.circuits import HOP_PROTOCOL
from shoal.swarm.streams import MessageStream
from tests.waiting import running, until

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.transport.
from libp2p import new_host  # isort: skip
from libp2p.crypto.ed25519 import create_new_key_pair  # isort: skip
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair  # isort: skip
from libp2p.io.exceptions import ConnectionClosedError  # isort: skip
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol  # isort: skip
from libp2p.relay.circuit_v2.resources import RelayLimits  # isort: skip
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE  # isort: skip
from libp2p.security.noise.transport import Transport as NoiseTransport  # isort: skip
from libp2p.tools.anyio_service import background_trio_service  # isort: skip
from multiaddr import Multiaddr  # isort: skip

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/test/echo/1"
WAIT_S = 30.0
SECRET = b"what two say to each other through a third" * 100


async def echo(stream: MessageStream) -> None:
    with contextlib.suppress(NetworkError):
        while True:
            await stream.send(await stream.receive(deadline_s=None), deadline_s=WAIT_S)


@contextlib.asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    """Real hosts; the first relays for everybody, the others are connected to it and are dialled through it alone."""
    made = [Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for host in made:
            host.serve(ECHO, echo)
            await nursery.start(host.run)
        made[0].relay.admits = lambda peer: True
        for host in made[1:]:
            await host.dial(made[0].addresses[0], deadline_s=WAIT_S)
        yield made
        nursery.cancel_scope.cancel()


def through(relay: Host, peer: PeerId) -> str:
    return format_circuit(relay.addresses[0], peer)


async def test_two_speak_through_a_relay_that_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(3) as (relay, alice, bob):
        seen: list[bytes] = []
        passing = type(relay.relay)._pass

        async def listening(self: object, source: object, sink: object, left: list[int], scope: object) -> None:
            read = source.read  # type: ignore[attr-defined]

            async def spy(limit: int) -> bytes:
                data: bytes = await read(limit)
                seen.append(data)
                return data

            source.read = spy  # type: ignore[attr-defined]
            await passing(self, source, sink, left, scope)  # type: ignore[arg-type]

        monkeypatch.setattr(type(relay.relay), "_pass", listening)
        await bob.circuits.reserve(relay.peer_id)
        await alice.dial_peer(bob.peer_id, [through(relay, bob.peer_id)], deadline_s=WAIT_S)
        assert bob.peer_id in alice.connected()
        assert not alice.is_direct(bob.peer_id)
        assert alice.host_of(bob.peer_id) is None, "nobody's address may stand for the far end's"
        assert await alice.request(bob.peer_id, ECHO, SECRET, deadline_s=WAIT_S) == SECRET
        assert await bob.request(alice.peer_id, ECHO, b"back", deadline_s=WAIT_S) == b"back"
        passed = b"".join(seen)
        assert len(passed) > 2 * len(SECRET)
        assert SECRET[:42] not in passed
        assert relay.relay.circuits == 1
        await alice.close(alice.connection(bob.peer_id))
        await until(lambda: relay.relay.circuits == 0 and alice.peer_id not in bob.connected())
        assert relay.relay.reservations == {bob.peer_id}


async def test_direct_connection_takes_the_place_of_a_relayed_one_and_never_the_other_way() -> None:
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        await alice.circuits.reserve(relay.peer_id)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        parsed = parse_any(alice.addresses[0])
        # Whoever has a connection does not dial again: the one that dials is the adapter below.
        known = next(iter(p for p in bob._network.connections if str(p) == alice.peer_id))
        await bob._network._dial(parsed, known, lambda: None)
        assert bob.is_direct(alice.peer_id), "at once, for alice has accepted it before"
        assert alice.is_direct(bob.peer_id)
        assert await alice.request(bob.peer_id, ECHO, b"direct", deadline_s=WAIT_S) == b"direct"
        circuit = parse_any(through(relay, bob.peer_id))
        assert isinstance(circuit, CircuitAddress)
        far = next(p for p in alice._network.connections if str(p) == bob.peer_id)
        await alice._network._dial_through(circuit, far)
        assert alice.is_direct(bob.peer_id)


async def test_who_has_no_reservation_is_not_called_and_proves_nothing_by_it() -> None:
    async with hosts(3) as (relay, alice, bob):
        with pytest.raises(NotReached) as caught:
            await alice.dial_peer(bob.peer_id, [through(relay, bob.peer_id)], deadline_s=WAIT_S)
        assert "204" in str(caught.value)
        assert not caught.value.proves_end(None)
        assert not caught.value.proves_end("127.0.0.1")


async def test_reservations_are_their_connections_own_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_relay, "RESERVATION_LIMIT", 1)
    async with hosts(4) as (relay, alice, bob, carol):
        await bob.circuits.reserve(relay.peer_id)
        await bob.circuits.reserve(relay.peer_id)  # again, in place of the first
        with pytest.raises(NetworkError, match="201"):
            await alice.circuits.reserve(relay.peer_id)
        assert relay.relay.reservations == {bob.peer_id}
        await bob.close(bob.connection(relay.peer_id))
        await until(lambda: bob.peer_id not in relay.connected())
        await carol.circuits.reserve(relay.peer_id)
        assert relay.relay.reservations == {carol.peer_id}
        assert bob.circuits.reserved == frozenset()


async def test_relay_serves_whom_it_admits_while_it_offers() -> None:
    async with hosts(3) as (relay, alice, bob):
        relay.relay.admits = lambda peer: peer == alice.peer_id
        with pytest.raises(NetworkError, match="202"):
            await bob.circuits.reserve(relay.peer_id)
        await alice.circuits.reserve(relay.peer_id)
        relay.relay.admits = None
        with pytest.raises(NotReached, match="202"):
            await bob.dial_peer(alice.peer_id, [through(relay, alice.peer_id)], deadline_s=WAIT_S)


@pytest.mark.parametrize(("limit", "value"), [("CIRCUIT_LIMIT_BYTES", 600_000), ("CIRCUIT_LIMIT_S", 1.0)])
async def test_circuit_ends_when_it_has_carried_what_it_may(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_relay, limit, value)
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        with contextlib.suppress(NetworkError):  # where time is short, the handshake may be cut already
            await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
            for _ in range(1000):
                await alice.request(bob.peer_id, ECHO, bytes(40_000), deadline_s=WAIT_S)
        await until(lambda: bob.peer_id not in alice.connected() and alice.peer_id not in bob.connected())
        await until(lambda: relay.relay.circuits == 0)
        assert 0 < relay.relay.bytes_passed <= circuit_relay.CIRCUIT_LIMIT_BYTES + 2 * (64 << 10)


async def test_reservation_ends_unless_it_is_asked_for_again() -> None:
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        assert relay.relay.reservations == {bob.peer_id}
        over = trio.current_time() + circuit_relay.RESERVATION_S
        assert over - WAIT_S < relay.relay._reservations[bob.peer_id] <= over
        relay.relay._reservations[bob.peer_id] = trio.current_time()  # as RESERVATION_S later
        assert relay.relay.reservations == frozenset()
        with pytest.raises(NetworkError, match="204"):
            await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        assert relay.relay.circuits == 0


async def test_circuits_of_one_peer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_relay, "PEER_CIRCUIT_LIMIT", 1)
    async with hosts(4) as (relay, alice, bob, carol):
        await bob.circuits.reserve(relay.peer_id)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        with pytest.raises(NetworkError, match="201"):
            await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        await carol.circuits.reserve(relay.peer_id)
        with pytest.raises(NetworkError, match="201"):  # nor does one call more than one
            await alice.dial(through(relay, carol.peer_id), deadline_s=WAIT_S)
        assert relay.relay.circuits == 1


async def test_circuits_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_relay, "CIRCUIT_LIMIT", 1)
    async with hosts(5) as (relay, alice, bob, carol, dave):
        await bob.circuits.reserve(relay.peer_id)
        await dave.circuits.reserve(relay.peer_id)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        with pytest.raises(NetworkError, match="201"):
            await carol.dial(through(relay, dave.peer_id), deadline_s=WAIT_S)
        assert relay.relay.circuits == 1
        await alice.close(alice.connection(bob.peer_id))
        await until(lambda: relay.relay.circuits == 0)
        await carol.dial(through(relay, dave.peer_id), deadline_s=WAIT_S)


async def test_strangers_leave_half_of_the_circuits_to_callers_that_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_relay, "CIRCUIT_LIMIT", 2)
    async with hosts(5) as (relay, alice, bob, carol, dave):
        relay.relay.comes_first = lambda peer: peer == dave.peer_id
        await bob.circuits.reserve(relay.peer_id)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        with pytest.raises(NetworkError, match="201"):
            await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        await dave.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        assert relay.relay.circuits == 2


async def test_reservation_of_who_comes_first_takes_the_place_of_a_strangers_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(circuit_relay, "RESERVATION_LIMIT", 2)
    async with hosts(5) as (relay, alice, bob, carol, dave):
        relay.relay.comes_first = lambda peer: peer in (carol.peer_id, bob.peer_id)
        await alice.circuits.reserve(relay.peer_id)
        await dave.circuits.reserve(relay.peer_id)
        await carol.circuits.reserve(relay.peer_id)
        assert relay.relay.reservations == {carol.peer_id, dave.peer_id}
        await bob.circuits.reserve(relay.peer_id)
        with pytest.raises(NetworkError, match="201"):
            await alice.circuits.reserve(relay.peer_id)
        assert relay.relay.reservations == {carol.peer_id, bob.peer_id}


async def test_calls_are_let_in_by_the_relay_that_they_come_through() -> None:
    """Whoever calls through a relay has no address here: all of one relay's share an allowance."""
    async with hosts(4) as (relay, alice, bob, carol):
        bob._door = Door(bob.refusals, per_s=(1e-3, 1), address_per_s=(1e-3, 1), newcomers_per_s=(1e-3, 1))
        await bob.circuits.reserve(relay.peer_id)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        with pytest.raises(NetworkError, match="203"):
            await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        assert bob.refusals.counts() == {Reason.HANDSHAKE_RATE.value: 1}


async def test_strangers_that_call_through_a_relay_take_nothing_from_members() -> None:
    async with hosts(4) as (relay, alice, bob, carol):
        none = (1e-9, 0.0)
        bob._door = Door(
            bob.refusals,
            per_s=none,
            address_per_s=none,
            newcomers_per_s=none,
            is_member=lambda peer: peer == alice.peer_id,
        )
        await bob.circuits.reserve(relay.peer_id)
        for _ in range(3):
            with pytest.raises(NetworkError, match="203"):
                await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        assert alice.peer_id in bob.connected()
        assert bob.refusals.counts() == {Reason.HANDSHAKE_RATE.value: 3}


def mute(host: Host) -> None:
    """Let it answer pings, and no stream that is opened to it."""

    async def never(stream: object) -> None:
        await trio.sleep_forever()

    host._network.set_stream_handler(never)


async def test_relay_that_answers_no_stream_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "MESSAGE_DEADLINE_S", 0.5)
    async with hosts(2) as (relay, alice):
        mute(relay)
        with pytest.raises(NetworkError, match=r"did not open a stream of .* within 0\.5 s"), trio.fail_after(WAIT_S):
            await alice.circuits.reserve(relay.peer_id)
        assert relay.peer_id in alice.connected()


async def test_who_takes_no_call_that_is_passed_on_keeps_no_place_of_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_relay, "MESSAGE_DEADLINE_S", 0.5)
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        mute(bob)
        with pytest.raises(NetworkError, match="203"):
            await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        await until(lambda: relay.relay.circuits == 0)


async def test_relay_that_names_callers_without_end_takes_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "CONNECTION_HANDSHAKE_DEADLINE_S", 3600.0)
    async with hosts(4) as (relay, liar, alice, bob):
        liar.relay.admits = lambda peer: True
        await bob.dial(liar.addresses[0], deadline_s=WAIT_S)
        for one in (relay, liar):
            await bob.circuits.reserve(one.peer_id)
        call = circuits.StopMessage(type=circuits.StopMessage.CONNECT, peer=circuits.circuit_peer(alice.peer_id))
        for _ in range(circuits.PENDING_LIMIT + 1):
            with contextlib.suppress(NetworkError):  # the last is refused
                opened = await liar._network.open_stream(bob.peer_id, circuits.STOP_PROTOCOL, deadline_s=WAIT_S)
                await circuits.write_message(opened.raw, call)  # and not a word of a handshake
        await until(lambda: bob.refusals.counts() == {Reason.HALF_OPEN.value: 1})
        assert bob.circuits._pending == {liar.peer_id: circuits.PENDING_LIMIT}
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)


async def test_calls_whose_handshake_is_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "PENDING_LIMIT", 1)
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        circuit = parse_any(through(relay, bob.peer_id))
        assert isinstance(circuit, CircuitAddress)
        wire = await alice.circuits.dial(circuit)  # and not a word of a handshake
        with pytest.raises(NetworkError, match="203"):
            await alice.circuits.dial(circuit)
        assert bob.refusals.counts() == {Reason.HALF_OPEN.value: 1}
        await wire.close()
        await until(lambda: not bob.circuits._pending)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)


async def test_stranger_whose_handshakes_never_end_keeps_members_out_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (circuits, transport):
        monkeypatch.setattr(module, "CONNECTION_HANDSHAKE_DEADLINE_S", 3600.0)
    async with hosts(4) as (relay, alice, bob, carol):
        bob.is_admitted = lambda peer: peer == relay.peer_id
        bob.is_expected = lambda peer: peer == alice.peer_id
        await bob.circuits.reserve(relay.peer_id)
        circuit = parse_any(through(relay, bob.peer_id))
        assert isinstance(circuit, CircuitAddress)
        wires = [await carol.circuits.dial(circuit) for _ in range(circuits.STRANGERS_PENDING_LIMIT)]
        with pytest.raises(NetworkError, match="203"):
            await carol.circuits.dial(circuit)
        assert bob.refusals.counts() == {Reason.HALF_OPEN.value: 1}
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        for wire in wires:
            await wire.close()
        await until(lambda: not bob.circuits._strangers_pending)
        await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)


async def test_call_whose_handshake_does_not_end_gives_its_place_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "PENDING_LIMIT", 1)
    monkeypatch.setattr(circuits, "CONNECTION_HANDSHAKE_DEADLINE_S", 1.0)
    monkeypatch.setattr(transport, "CONNECTION_HANDSHAKE_DEADLINE_S", 1e6)  # which would end it too
    async with hosts(3) as (relay, alice, bob):
        bob.is_admitted = lambda peer: peer == relay.peer_id
        await bob.circuits.reserve(relay.peer_id)
        circuit = parse_any(through(relay, bob.peer_id))
        assert isinstance(circuit, CircuitAddress)
        wire = await alice.circuits.dial(circuit)
        with pytest.raises(ConnectionClosedError):
            await wire.read(1 << 20)  # more than bob says first
        monkeypatch.setattr(circuits, "CONNECTION_HANDSHAKE_DEADLINE_S", WAIT_S)
        await until(lambda: not bob.circuits._pending and not bob.circuits._strangers_pending)
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)


async def test_call_gives_its_place_back_when_its_relay_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "CONNECTION_HANDSHAKE_DEADLINE_S", 1e6)  # not only when its time is over
    async with hosts(3) as (relay, alice, bob):
        bob.is_admitted = lambda peer: peer == relay.peer_id
        await bob.circuits.reserve(relay.peer_id)
        circuit = parse_any(through(relay, bob.peer_id))
        assert isinstance(circuit, CircuitAddress)
        await alice.circuits.dial(circuit)
        assert bob.circuits._pending == bob.circuits._strangers_pending == {relay.peer_id: 1}
        await bob.close(bob.connection(relay.peer_id))
        await until(lambda: not bob.circuits._pending and not bob.circuits._strangers_pending)


@pytest.mark.parametrize("belongs", ["is admitted", "is expected", "comes first", "is a stranger"])
async def test_who_is_admitted_or_expected_or_comes_first_calls_as_a_member(belongs: str) -> None:
    """And spends its relay's account, whoever calls through others."""
    async with hosts(3) as (relay, alice, bob):
        bob.is_admitted = lambda peer: peer == relay.peer_id or (belongs == "is admitted" and peer == alice.peer_id)
        bob.is_expected = lambda peer: belongs == "is expected" and peer == alice.peer_id
        bob.comes_first = lambda peer: belongs == "comes first" and peer == alice.peer_id
        none = (0.0, 0.0)  # is left for strangers
        bob._door = Door(
            bob.refusals, per_s=none, newcomers_per_s=none, address_per_s=none, is_member=bob._door._is_member
        )
        await bob.circuits.reserve(relay.peer_id)
        if belongs == "is a stranger":
            with pytest.raises(NetworkError, match="203"):
                await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
            return
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        assert list(bob._door._calls._buckets) == [relay.peer_id]


async def test_nothing_is_relayed_over_a_circuit_nor_taken_from_a_relay_that_was_not_asked() -> None:
    async with hosts(3) as (relay, alice, bob):
        await bob.circuits.reserve(relay.peer_id)
        bob.relay.admits = lambda peer: True
        await alice.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)
        with pytest.raises(NetworkError, match="without a relay"):
            await alice.circuits.reserve(bob.peer_id)
        stream = (await alice._network.open_stream(bob.peer_id, HOP_PROTOCOL, deadline_s=WAIT_S)).raw
        await stream.write(b"\x02\x08\x00")  # RESERVE
        assert b"\xca\x01" in await stream.read(64), "202: permission denied"
        bob.circuits._reserved.clear()
        carol = Host(identity=Identity.generate(), listen=LOOPBACK)
        async with running(carol):
            with pytest.raises(NetworkError, match="203"):
                await carol.dial(through(relay, bob.peer_id), deadline_s=WAIT_S)


ALICE, BOB = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE}/p2p-circuit",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE}/p2p-circuit/p2p/",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE}/p2p-circuit/p2p/{ALICE}",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE}/p2p-circuit/p2p/{BOB}/p2p-circuit/p2p/{ALICE}",
        f"/p2p/{ALICE}/p2p-circuit/p2p/{BOB}",
        "/p2p-circuit/p2p/" + "x" * 600,
    ],
)
def test_malformed_circuit_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_any(text)


def test_circuit_address_is_read_as_it_was_written() -> None:
    relay = f"/ip4/192.0.2.7/tcp/4001/p2p/{ALICE}"
    parsed = parse_any(format_circuit(relay, BOB))
    assert isinstance(parsed, CircuitAddress)
    assert (parsed.relay, parsed.peer) == (parse_any(relay), BOB)


@contextlib.asynccontextmanager
async def relay_of_libp2p() -> AsyncIterator[tuple[str, PeerId]]:
    """A host of libp2p's own that relays as it comes: its address and PeerId."""
    keys = create_new_key_pair()
    security = {NOISE: NoiseTransport(keys, noise_privkey=x25519_key_pair().private_key)}
    listen = [Multiaddr(LOOPBACK[0])]
    host = new_host(key_pair=keys, listen_addrs=listen, sec_opt=security)
    limits = RelayLimits(duration=3600, data=1 << 20, max_circuit_conns=4, max_reservations=4)
    relay = CircuitV2Protocol(host, limits=limits, allow_hop=True)
    async with host.run(listen_addrs=listen), background_trio_service(relay):
        peer = PeerId(str(host.get_id()))
        port = host.get_transport_addrs()[0].value_for_protocol("tcp")
        yield f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}", peer


@pytest.mark.filterwarnings("ignore")
async def test_another_implementation_relays_as_well() -> None:
    alice, bob = (Host(identity=Identity.generate(), listen=LOOPBACK) for _ in range(2))
    async with relay_of_libp2p() as (address, relay), trio.open_nursery() as nursery:
        for host in (alice, bob):
            host.serve(ECHO, echo)
            await nursery.start(host.run)
            await host.dial(address, deadline_s=WAIT_S)
        await bob.circuits.reserve(relay)
        await alice.dial(format_circuit(address, bob.peer_id), deadline_s=WAIT_S)
        assert await alice.request(bob.peer_id, ECHO, SECRET, deadline_s=WAIT_S) == SECRET
        assert not alice.is_direct(bob.peer_id)
        nursery.cancel_scope.cancel()
