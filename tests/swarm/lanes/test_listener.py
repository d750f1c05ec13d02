from __future__ import annotations

import socket
from contextlib import suppress

import pytest
import trio
import trio.testing

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm import incoming
from shoal.swarm.lanes import listener as lane_listener
from shoal.swarm.lanes import pool as pool_module
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES, open_hello, receive_exactly, seal_hello
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.seal import (
    LANES_PER_PEER_LIMIT,
    LaneAnswer,
    LaneProposal,
    Opener,
    Sealer,
    decode_answer,
    encode_handshake,
)
from shoal.swarm.limits import LANE_ADDRESS_CONNECTIONS_BURST, LANE_CONNECTIONS_BURST, Reason
from shoal.swarm.reaching.dial_back_probes import DialBackProbes, Expected, probe_of
from tests.swarm.lane_net import (
    ALICE,
    BOB,
    CAROL,
    NOTE,
    WAIT_S,
    alice_and_bob,
    run,
    until,
)


async def agree(bob: LanePool, me: PeerId = ALICE) -> tuple[LaneProposal, LaneAnswer, tuple[str, int]]:
    """What a dialler of Bob's holds before it connects."""
    proposal = LaneProposal(me=me, peer=BOB, swarm_id=b"swarm")
    answer = decode_answer(await bob.answer(me, encode_handshake(proposal.offer)), peer=BOB)
    host, _, port = bob.addresses[0].rpartition(":")
    return proposal, answer, (host, int(port))


async def turned_away(stream: trio.SocketStream) -> float:
    """Wait for the far end to close; returns how long that took."""
    started = trio.current_time()
    with suppress(trio.BrokenResourceError):
        assert await stream.receive_some() == b""
    await stream.aclose()
    return trio.current_time() - started


@pytest.mark.parametrize("garbage", [b"", b"GET", bytes(16), bytes(400)], ids=["silence", "short", "id", "long"])
def test_listener_closes_strangers_within_two_seconds(garbage: bytes) -> None:
    clock = trio.testing.MockClock()  # stands still unless it is told to jump: lanes work in threads, at their own pace

    async def main() -> None:
        async with alice_and_bob() as (net, alice, bob), trio.open_nursery() as nursery:
            await alice.ensure(BOB, deadline_s=WAIT_S)
            _, _, address = await agree(bob)
            stranger, over = await trio.open_tcp_stream(*address), trio.Event()
            await stranger.send_all(garbage)

            async def wait() -> None:
                assert await turned_away(stranger) <= lane_listener.STRANGER_DEADLINE_S + 0.2
                over.set()

            nursery.start_soon(wait)
            if len(garbage) < len(bytes(16)):  # it may still say who it is
                await until(lambda: len(bob._listener._strangers) == 1)
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(lane_listener.STRANGER_DEADLINE_S - 0.1)
                await trio.testing.wait_all_tasks_blocked()
                assert not over.is_set()
                clock.jump(0.2)
            await over.wait()
            assert not bob._listener._strangers
            alice.post(BOB, NOTE, b"fine.")  # the lane in use noticed nothing
            assert (await net.sinks[BOB].next_frame())[2] == b"fine."
            assert net.sinks[BOB].closed.empty()

    run(main, clock)


async def test_listener_lets_nothing_in_that_begins_with_an_id_that_nobody_waits_for() -> None:
    class OneTicket:
        def claims(self, ticket: bytes) -> bool:
            return ticket == b"a desk's ticket."

        async def hold(self, ticket: bytes, stream: trio.SocketStream) -> None:
            raise AssertionError

    async with alice_and_bob() as (_, _, bob):
        _, answer, _ = await agree(bob)
        door, expected = bob._listener, Expected(ports=(4001,))
        door.handlers, door.dial_back_probes = (OneTicket(),), DialBackProbes()
        door.dial_back_probes.expect(expected)
        before = door.refusals.counts()
        for welcome in (answer.lane_id, b"a desk's ticket.", probe_of(expected.secret, 4001), b"", bytes(15)):
            assert not door._is_noise(welcome)
        assert door.refusals.counts() == before
        assert door._is_noise(bytes(16))
        door.dial_back_probes.forget(expected)
        assert door._is_noise(probe_of(expected.secret, 4001))
        assert door.refusals.counts()[Reason.LANE_HELLO.value] == 2


async def test_listener_makes_no_task_for_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there when a connection is taken is looked at then; who has said nothing yet is greeted."""
    greeted: list[tuple[str, int]] = []
    greet = lane_listener.LaneListener._greet

    async def noting(self: lane_listener.LaneListener, stream: trio.SocketStream, address: str) -> None:
        greeted.append(stream.socket.getpeername())
        await greet(self, stream, address)

    monkeypatch.setattr(lane_listener.LaneListener, "_greet", noting)
    async with alice_and_bob() as (_, _, bob):
        _, answer, address = await agree(bob)
        callers = [socket.create_connection(address) for _ in range(3)]
        for caller, said in zip(callers, (bytes(16), b"", answer.lane_id), strict=True):
            caller.sendall(said)
        noisy, silent, welcome = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in callers)
        quiet_names = {one.socket.getsockname() for one in (silent, welcome)}
        await turned_away(noisy)
        assert bob._listener.refusals.counts() == {Reason.LANE_HELLO.value: 1}
        await until(lambda: len(bob._listener._strangers) == 2)
        assert set(greeted) == quiet_names  # in whichever order their tasks began
        assert len(greeted) == 2
        await silent.aclose()
        await welcome.aclose()


async def test_listener_takes_so_many_of_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_listener, "LANE_ADDRESS_CONNECTIONS_PER_S", 0.0)
    monkeypatch.setattr(lane_listener, "LANE_ADDRESS_CONNECTIONS_BURST", 2.0)
    monkeypatch.setattr(incoming, "REFUSED_HANGING_S", 0.0)
    async with alice_and_bob() as (_, _, bob):
        _, _, address = await agree(bob)
        streams = [await trio.open_tcp_stream(*address) for _ in range(3)]
        await turned_away(streams[2])
        assert len(bob._listener._strangers) == 2
        assert bob._listener.refusals.counts() == {Reason.LANE_RATE.value: 1}
        for stream in streams[:2]:
            await stream.aclose()


def test_listener_has_room_for_all_lanes_of_a_whole_swarm_on_one_machine() -> None:
    assert 63 * LANES_PER_PEER_LIMIT <= LANE_ADDRESS_CONNECTIONS_BURST <= LANE_CONNECTIONS_BURST


async def test_listener_garbage_does_not_consume_an_id() -> None:
    async with alice_and_bob() as (_, _, bob):
        proposal, answer, address = await agree(bob)
        stranger = await trio.open_tcp_stream(*address)
        await stranger.send_all(answer.lane_id + bytes(400))
        await turned_away(stranger)
        assert bob.connected() == frozenset()
        keys = proposal.keys(answer)
        sealer = Sealer(keys.send_key)
        stream = await trio.open_tcp_stream(*address)
        await stream.send_all(answer.lane_id + seal_hello(sealer, keys))
        hello = await receive_exactly(stream, HELLO_WIRE_BYTES)
        open_hello(Opener(keys.receive_key, peer=BOB), keys, hello)
        await until(lambda: bob.connected() == {ALICE})
        await stream.aclose()


async def test_listener_id_takes_few_connections_at_once() -> None:
    async with alice_and_bob() as (_, _, bob):
        _, answer, address = await agree(bob)
        streams = [await trio.open_tcp_stream(*address) for _ in range(lane_listener.CONNECTIONS_PER_ID_LIMIT)]
        for stream in streams:
            await stream.send_all(answer.lane_id)
        pending = bob._listener._pending[answer.lane_id]
        await until(lambda: pending.connections == lane_listener.CONNECTIONS_PER_ID_LIMIT)
        late = await trio.open_tcp_stream(*address)
        await late.send_all(answer.lane_id)
        assert await turned_away(late) < lane_listener.STRANGER_DEADLINE_S / 2
        for stream in streams:
            await stream.aclose()
        await until(lambda: pending.connections == 0)


async def test_listener_crowd_of_strangers_pushes_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_listener, "UNAUTHENTICATED_LIMIT", 3)
    async with alice_and_bob() as (_, alice, bob):
        _, _, address = await agree(bob)
        streams = []
        for number in range(3):
            streams.append(await trio.open_tcp_stream(*address))
            await until(lambda number=number: len(bob._listener._strangers) == number + 1)
        await alice.ensure(BOB, deadline_s=WAIT_S)  # gets in all the same
        assert await turned_away(streams[0]) < lane_listener.STRANGER_DEADLINE_S / 2
        assert len(bob._listener._strangers) <= 3
        for stream in streams[1:]:
            await stream.aclose()


def test_listener_pending_ids_expire() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            _, answer, address = await agree(bob)
            clock.jump(lane_listener.PENDING_DEADLINE_S + 1)
            stream = await trio.open_tcp_stream(*address)
            await stream.send_all(answer.lane_id)
            assert await turned_away(stream) == 0
            await agree(bob)
            assert answer.lane_id not in bob._listener._pending
            assert len(bob._listener._pending) == 1

    clock = trio.testing.MockClock()
    run(main, clock)


async def test_listener_bounds_what_a_peer_leaves_pending() -> None:
    async with alice_and_bob() as (_, _, bob):
        agreed = [(await agree(bob, CAROL))[1].lane_id]  # others are not affected
        agreed += [(await agree(bob))[1].lane_id for _ in range(lane_listener.PENDING_PER_PEER_LIMIT + 2)]
        assert list(bob._listener._pending) == [agreed[0], *agreed[3:]], "the oldest gave way"
        bob.drop(ALICE)
        assert len(bob._listener._pending) == 1


async def test_strangers_leave_half_of_the_pending_lanes_and_of_all_lanes_to_whom_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with alice_and_bob() as (_, _, bob):
        bob.prefer(comes_first=lambda peer: peer == CAROL, is_known=lambda address: False)
        monkeypatch.setattr(lane_listener, "PENDING_LIMIT", 4)
        for _ in range(2):
            await agree(bob)
        with pytest.raises(NetworkError, match="2 lanes are waiting"):
            await agree(bob)
        for _ in range(2):
            await agree(bob, CAROL)
        with pytest.raises(NetworkError, match="4 lanes are waiting"):
            await agree(bob, CAROL)
        monkeypatch.setattr(pool_module, "LANE_COUNT_LIMIT", 1)  # of which a stranger may have none
        with pytest.raises(NetworkError, match="0 lanes already"):
            await agree(bob)


def test_lanes_of_members_addresses_are_let_in_whatever_strangers_have_spent() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            known: set[str] = set()
            bob.prefer(comes_first=lambda peer: True, is_known=known.__contains__)
            door = bob._listener._door
            flood = (f"10.0.{number // 256}.{number % 256}" for number in range(4096))
            assert not all(door.lets_in(address) for address in flood for _ in range(8)), "all is spent"
            assert not door.lets_in("192.0.2.1")
            known.add("192.0.2.1")
            assert door.lets_in("192.0.2.1")

    run(main, trio.testing.MockClock())
