from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import partial

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes import lane as lane_module
from shoal.swarm.lanes import pool as pool_module
from shoal.swarm.lanes import table as lane_table
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.limits import RATE_LIMIT_MIN_BYTES_PER_S, LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.seal import (
    SEAL_OVERHEAD_BYTES,
    LaneSummons,
    encode_handshake,
    parse_address,
)
from shoal.swarm.lanes.socket import frame_buffers
from tests.swarm.lane_net import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    DEAD_ADDRESS,
    LOOPBACK,
    NOTE,
    WAIT_S,
    RecordingSink,
    alice_and_bob,
    lanes_of,
    open_net,
    run,
    until,
)
from tests.waiting import running


async def test_pool_carries_frames_both_ways_over_one_lane() -> None:
    async with alice_and_bob() as (net, alice, bob):
        with pytest.raises(NetworkError, match="no lane"):
            alice.post(BOB, NOTE, b"early")
        await alice.ensure(BOB, deadline_s=WAIT_S)
        await bob.ensure(ALICE, deadline_s=WAIT_S)
        assert net.requests == 1  # the second found a lane
        assert alice.connected() == {BOB}
        assert bob.connected() == {ALICE}
        alice.post(BOB, NOTE, b"hello")
        bob.post(ALICE, NOTE, b"howdy")
        assert await net.sinks[BOB].next_frame() == (ALICE, NOTE, b"hello")
        assert await net.sinks[ALICE].next_frame() == (BOB, NOTE, b"howdy")
        # The kernel may deliver before the sending thread has counted.
        await until(lambda: alice.bytes_sent == bob.bytes_received == 5 + SEAL_OVERHEAD_BYTES)
        assert alice.queued_bytes(BOB) == 0


@pytest.mark.parametrize("whose", [ALICE, BOB])
@pytest.mark.parametrize("lacks", ["send", "receive"])
async def test_lane_for_which_the_system_has_no_thread_ends_and_nothing_else(
    whose: PeerId, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, other = threading.Thread.start, BOB if whose == ALICE else ALICE
    in_vain: list[str] = []

    def refused(self: threading.Thread) -> None:
        if self.name == f"lane {lacks} {other[-6:]}":
            in_vain.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    async with alice_and_bob() as (net, alice, bob):
        with monkeypatch.context() as system:
            system.setattr(threading.Thread, "start", refused)
            with suppress(NetworkError):
                await alice.ensure(BOB, deadline_s=1.0)
            _, error = await net.sinks[whose].next_closed()
            assert str(error) == f"no threads for a lane to {other}: can't start new thread"
            await until(lambda: alice.connected() == bob.connected() == frozenset())
            assert in_vain
        await alice.ensure(BOB, deadline_s=WAIT_S)
        alice.post(BOB, NOTE, b"hello")
        assert await net.sinks[BOB].next_frame() == (ALICE, NOTE, b"hello")
        assert [len(lanes_of(alice, BOB)), len(lanes_of(bob, ALICE))] == [1, 1]


async def test_lanes_that_were_agreed_on_and_come_at_once_are_no_more_than_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "LANES_PER_PEER_LIMIT", 2)
    kept: list[socket.socket] = []

    def adopt(stream: trio.SocketStream, *_: object, dialled: bool) -> None:
        kept.append(socket.socket(fileno=stream.socket.detach()))

    async with alice_and_bob() as (_, alice, bob):
        alice._dialler._adopt = adopt  # type: ignore[assignment]
        agreed = [await alice._dialler.agree(BOB, 1) for _ in range(6)]
        for answer, keys in agreed:
            stream = await trio.open_tcp_stream(*parse_address(answer.addresses[0]))
            await alice._dialler.introduce(stream, keys)
        for connection in kept[4:]:
            connection.settimeout(WAIT_S)
            assert await trio.to_thread.run_sync(connection.recv, 1) == b""
        assert len(lanes_of(bob, ALICE)) == 4
        with pytest.raises(RemoteError, match="more than 4 lanes"):
            await alice._dialler.agree(BOB, 1)
        for connection in kept:
            connection.close()


async def test_pool_counts_payload_sent_over_all_lanes_there_were() -> None:
    async with alice_and_bob() as (net, alice, _):
        assert alice.sent_bytes(BOB) == 0
        for sent in (5, 10, 15):
            await alice.ensure(BOB, deadline_s=WAIT_S)
            alice.post(BOB, NOTE, b"hello")
            await net.sinks[BOB].next_frame()
            await until(lambda sent=sent: alice.sent_bytes(BOB) == sent and alice.queued_bytes(BOB) == 0)
            alice.drop(BOB)
            await net.sinks[ALICE].next_closed()
            assert alice.sent_bytes(BOB) == sent  # remembered
        assert alice.sent_bytes(CAROL) == alice.queued_bytes(CAROL) == 0


async def test_lanes_end_whose_own_or_other_end_is_at_an_address_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alice_and_bob() as (net, alice, bob):
        await alice.ensure(BOB, deadline_s=WAIT_S)
        (lane,) = lanes_of(alice, BOB)
        assert lane.ends == ("127.0.0.1", "127.0.0.1")
        alice.end_from({"192.0.2.1"})
        bob.end_towards(ALICE, "192.0.2.1")
        alice.post(BOB, NOTE, b"hello")
        assert await net.sinks[BOB].next_frame() == (ALICE, NOTE, b"hello"), "they lead elsewhere"
        alice.end_from({"127.0.0.1"})
        assert (await net.sinks[ALICE].next_closed())[0] == BOB
        assert (await net.sinks[BOB].next_closed())[0] == ALICE
        assert lane.ends is None
        await alice.ensure(BOB, deadline_s=WAIT_S)
        bob.end_towards(ALICE, "127.0.0.1")
        assert (await net.sinks[BOB].next_closed())[0] == ALICE


async def test_pool_remembers_the_peers_that_had_a_lane_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_table, "IDLE_PAIRS_LIMIT", 2)
    async with open_net() as net:
        alice = await net.add(ALICE)
        for peer in (BOB, CAROL, DAVE):
            await net.add(peer)
        await alice.ensure(BOB, deadline_s=WAIT_S)
        for peer in (CAROL, DAVE, CAROL):
            await alice.ensure(peer, deadline_s=WAIT_S)
            alice.post(peer, NOTE, b"hello")
            await net.sinks[peer].next_frame()
            await until(lambda peer=peer: alice.queued_bytes(peer) == 0)
            alice.drop(peer)
            await net.sinks[ALICE].next_closed()
        assert (alice.sent_bytes(CAROL), alice.sent_bytes(DAVE)) == (10, 5)
        for stranger in range(2):
            with pytest.raises(KeyError):  # what this net answers for nobody
                await alice.ensure(PeerId(f"12D3KooWnobody{stranger}"), deadline_s=WAIT_S)
        assert alice.sent_bytes(CAROL) == alice.sent_bytes(DAVE) == 0  # both gave way to those tried since
        alice.post(BOB, NOTE, b"hello")  # a peer with a lane does not
        assert await net.sinks[BOB].next_frame() == (ALICE, NOTE, b"hello")
        await until(lambda: alice.sent_bytes(BOB) == 5)
        assert len(alice._table._pairs) == 3


async def test_pool_counts_payload_as_it_goes_not_in_whole_frames() -> None:
    async with open_net() as net:
        slow = RateLimit(RATE_LIMIT_MIN_BYTES_PER_S)
        alice = await net.add(ALICE, limits=LaneLimits(upload=slow))
        await net.add(BOB)
        await alice.ensure(BOB, deadline_s=WAIT_S)
        size = FRAME_LIMIT_BYTES  # takes eight seconds
        alice.post(BOB, FrameHeader(kind=FrameKind.STATE, length=size, total=size), bytes(size))
        await until(lambda: 0 < alice.sent_bytes(BOB) < size)
        assert alice.queued_bytes(BOB) == size


async def test_pool_stopping_ends_all_lanes_and_joins_threads() -> None:
    async with alice_and_bob() as (net, alice, bob):
        await alice.ensure(BOB, deadline_s=WAIT_S)
        alice.post(BOB, NOTE, b"hello")
        await net.sinks[BOB].next_frame()
        threads = lanes_of(alice, BOB)[0]._threads
        net.scopes[ALICE].cancel()
        peer, error = await net.sinks[BOB].next_closed()
        assert peer == ALICE
        assert isinstance(error, NetworkError)
        await until(lambda: not any(thread.is_alive() for thread in threads))
        assert net.sinks[ALICE].closed.qsize() == 1
        assert alice.connected() == bob.connected() == frozenset()
        assert alice.bytes_sent == 5 + SEAL_OVERHEAD_BYTES  # remembered
        for _ in range(2):
            with pytest.raises(NetworkError):
                await alice.ensure(BOB, deadline_s=WAIT_S)


@pytest.mark.parametrize("attempt", range(5))
async def test_pool_simultaneous_dials_leave_one_lane(attempt: int) -> None:
    async with alice_and_bob() as (net, alice, bob):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(alice.ensure, BOB, deadline_s=WAIT_S))
            nursery.start_soon(partial(alice.ensure, BOB, deadline_s=WAIT_S))
            nursery.start_soon(partial(bob.ensure, ALICE, deadline_s=WAIT_S))
        for number in range(10):
            alice.post(BOB, replace(NOTE, chunk=number), b"hello")
            bob.post(ALICE, replace(NOTE, chunk=number), b"howdy")
        for sink in (net.sinks[ALICE], net.sinks[BOB]):
            chunks = [(await sink.next_frame())[1].chunk for _ in range(10)]
            assert sorted(chunks) == list(range(10))  # none lost with the lane that went
        await until(lambda: len(lanes_of(alice, BOB)) == len(lanes_of(bob, ALICE)) == 1)
        assert all(error is None for _, error in net.sinks[ALICE].closed.queue)
        assert all(error is None for _, error in net.sinks[BOB].closed.queue)


async def test_who_leaves_it_to_the_other_to_dial_has_the_lane_that_comes_or_says_that_none_did() -> None:
    async with alice_and_bob() as (net, alice, bob):
        assert not await bob.comes(ALICE, within_s=0.02)
        assert net.requests == 0
        came: list[bool] = []

        async def wait() -> None:
            came.append(await bob.comes(ALICE, within_s=WAIT_S))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await alice.ensure(BOB, deadline_s=WAIT_S)
        assert came == [True]
        assert await bob.comes(ALICE, within_s=0.0)
        assert net.requests == 1


async def test_of_many_lanes_only_the_first_have_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(pool_module, "HUGE_LANES", 1)
    monkeypatch.setattr(lane_module, "frame_buffers", lambda *, huge: asked.append(huge) or frame_buffers(huge=huge))
    async with alice_and_bob() as (net, alice, _):
        await net.add(CAROL)
        await alice.ensure(BOB, deadline_s=WAIT_S)
        await until(lambda: len(asked) == 2)  # both ends
        await alice.ensure(CAROL, deadline_s=WAIT_S)
        await until(lambda: len(asked) == 4)
        assert (asked[:2], sorted(asked[2:])) == ([True, True], [False, True])


async def test_pool_settles_on_the_lower_side_only() -> None:
    """Two lanes, one dialled by each: Alice keeps her own, whichever side looks first."""
    async with alice_and_bob() as (net, alice, bob):
        await bob.ensure(ALICE, deadline_s=WAIT_S)
        await alice._dialler.dial(BOB, 1)  # as if both had begun at once
        await until(lambda: len(lanes_of(alice, BOB)) == len(lanes_of(bob, ALICE)) == 1)
        assert lanes_of(alice, BOB)[0].dialled
        assert not lanes_of(bob, ALICE)[0].dialled
        assert (await net.sinks[BOB].next_closed()) == (ALICE, None)


async def test_pool_keeps_as_many_lanes_as_either_side_wants() -> None:
    async with open_net() as net:
        alice = await net.add(ALICE)
        bob = await net.add(BOB, limits=LaneLimits(lanes_per_peer=3))
        await alice.ensure(BOB, deadline_s=WAIT_S)
        await bob.ensure(ALICE, deadline_s=WAIT_S)
        assert len([lane for lane in lanes_of(alice, BOB) if lane.usable]) == 3
        for number in range(30):
            bob.post(ALICE, replace(NOTE, chunk=number), b"hello")
        chunks = [(await net.sinks[ALICE].next_frame())[1].chunk for _ in range(30)]
        assert sorted(chunks) == list(range(30))


async def test_pool_replaces_a_worn_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alice_and_bob() as (net, alice, bob):
        await alice.ensure(BOB, deadline_s=WAIT_S)
        (old,) = lanes_of(alice, BOB)
        monkeypatch.setattr("shoal.swarm.lanes.lane.LANE_WORN_BYTES", 300)
        for _ in range(3):
            alice.post(BOB, NOTE, b"hello")
            await net.sinks[BOB].next_frame()
        assert old.worn
        await bob.ensure(ALICE, deadline_s=WAIT_S)
        await until(lambda: len(lanes_of(alice, BOB)) == 1)
        assert lanes_of(alice, BOB) != [old]
        assert await net.sinks[BOB].next_closed() == (ALICE, None)
        alice.post(BOB, NOTE, b"fresh")
        assert (await net.sinks[BOB].next_frame())[2] == b"fresh"


async def test_pool_dials_past_addresses_that_fail() -> None:
    """A dead address, then one where something else listens, then the right one."""
    async with alice_and_bob() as (net, alice, bob), trio.open_nursery() as nursery:

        async def other_service(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.receive_some()
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))

        listeners = await nursery.start(trio.serve_tcp, other_service, 0)
        port = listeners[0].socket.getsockname()[1]
        bob.addresses = (DEAD_ADDRESS, f"127.0.0.1:{port}", *bob.addresses)
        await alice.ensure(BOB, deadline_s=WAIT_S)
        assert net.requests == 2  # other keys for the other connection
        alice.post(BOB, NOTE, b"hello")
        assert (await net.sinks[BOB].next_frame())[2] == b"hello"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("reachable", [ALICE, BOB])
async def test_pool_summons_a_peer_that_it_cannot_reach(reachable: PeerId) -> None:
    async with open_net() as net:
        for peer in (ALICE, BOB):
            await net.add(peer, advertise=() if peer == reachable else (DEAD_ADDRESS,))
        dialler, other = (BOB, ALICE) if reachable == BOB else (ALICE, BOB)
        assert dialler == reachable
        await net.pools[dialler].ensure(other, deadline_s=WAIT_S)
        assert not lanes_of(net.pools[dialler], other)[0].dialled
        net.pools[dialler].post(other, NOTE, b"hello")
        assert (await net.sinks[other].next_frame())[2] == b"hello"


async def test_pool_summons_as_many_lanes_as_it_wants() -> None:
    async with open_net() as net:
        alice = await net.add(ALICE, advertise=(DEAD_ADDRESS,))
        bob = await net.add(BOB, limits=LaneLimits(lanes_per_peer=3))
        await bob.ensure(ALICE, deadline_s=WAIT_S)
        await until(lambda: len(lanes_of(alice, BOB)) == len(lanes_of(bob, ALICE)) == 3)
        assert all(lane.dialled for lane in lanes_of(alice, BOB))


def test_pool_where_neither_is_reachable_gives_up_in_time() -> None:
    async def main() -> None:
        async with open_net() as net:
            alice = await net.add(ALICE, advertise=(DEAD_ADDRESS,))
            await net.add(BOB, advertise=(DEAD_ADDRESS,))
            with pytest.raises(NetworkError):
                await alice.ensure(BOB, deadline_s=1.0)
            assert net.requests <= 4  # offer, summons, the offer of the summoned, and no summons back
            assert alice._dialling == {}

    run(main)


async def test_pool_ensure_tells_a_bad_answer_from_a_bad_network() -> None:
    replies: list[bytes | Exception] = [b"junk", NetworkError("the libp2p stream broke")]

    async def request(peer: PeerId, data: bytes) -> bytes:
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    pool = LanePool(me=ALICE, swarm_id=b"s", sink=RecordingSink(), listen=LOOPBACK, request=request)
    async with running(pool):
        with pytest.raises(RemoteError) as caught:
            await pool.ensure(BOB, deadline_s=WAIT_S)
        assert caught.value.peer == BOB
        with pytest.raises(NetworkError, match="stream broke"):
            await pool.ensure(BOB, deadline_s=WAIT_S)


async def test_pool_ensure_cancelled_leaves_it_usable() -> None:
    async with alice_and_bob() as (net, alice, _):
        for turns in range(12):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(alice.ensure, BOB, deadline_s=WAIT_S))
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
        await alice.ensure(BOB, deadline_s=WAIT_S)
        alice.post(BOB, NOTE, b"hello")
        assert (await net.sinks[BOB].next_frame())[2] == b"hello"


async def test_pool_answers_no_junk() -> None:
    async with alice_and_bob() as (_, _, bob):
        with pytest.raises(RemoteError):
            await bob.answer(ALICE, b"junk")
        with pytest.raises(RemoteError):
            await bob.answer(ALICE, bytes(100_000))
        assert not bob._listener._pending


async def test_pool_summons_are_not_multiplied() -> None:
    async with open_net() as net:
        await net.add(ALICE, advertise=(DEAD_ADDRESS,))
        bob = await net.add(BOB)
        for _ in range(50):
            assert await bob.answer(ALICE, encode_handshake(LaneSummons())) == b""
        await until(lambda: not bob._summoned and not bob._dialling)  # none waits for its turn either
        assert net.requests == 1  # one dial, in vain


async def test_pool_addresses_are_what_others_can_dial() -> None:
    async with open_net() as net:
        bob = await net.add(BOB)
        wildcard = LanePool(
            me=ALICE,
            swarm_id=b"s",
            sink=RecordingSink(),
            listen=("0.0.0.0", 0),
            request=lambda p, d: bob.answer(p, d),
        )
        async with running(wildcard):
            assert 1 <= len(wildcard.addresses) <= 8
            for text in wildcard.addresses:
                host, port = parse_address(text)
                assert host != "0.0.0.0"
                assert port > 0


async def test_pool_that_cannot_listen_tells_the_user() -> None:
    async with alice_and_bob() as (_, alice, bob):
        port = int(bob.addresses[0].rpartition(":")[2])
        taken = LanePool(
            me=CAROL,
            swarm_id=b"s",
            sink=RecordingSink(),
            listen=("127.0.0.1", port),
            request=lambda p, d: bob.answer(p, d),
        )
        with pytest.raises(ConfigError, match="give another"):
            await taken.run()
        assert alice.addresses
