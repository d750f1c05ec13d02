from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import trio
import trio.testing

from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm import lanes
from shoal.swarm.frame import FrameHeader, FrameKind
from shoal.swarm.lane import Lane, LaneLimits
from shoal.swarm.lanes import LanePool
from shoal.swarm.seal import (
    SEAL_OVERHEAD_BYTES,
    LaneAnswer,
    LaneProposal,
    LaneSummons,
    decode_answer,
    encode_handshake,
)

# Alice's PeerId is the lower: where both dialled, she settles which lane stays.
ALICE, BOB, CAROL = PeerId("12D3KooWalice"), PeerId("12D3KooWbob"), PeerId("12D3KooWcarol")
WAIT_S = 10.0
LOOPBACK = ("127.0.0.1", 0)
NOTE = FrameHeader(kind=FrameKind.STATEMENT, length=5)
DEAD_ADDRESS = "127.0.0.1:1"  # nothing listens there


@dataclass
class RecordingSink:
    frames: queue.Queue[tuple[PeerId, FrameHeader, bytes]] = field(default_factory=queue.Queue)
    closed: queue.Queue[tuple[PeerId, NetworkError | RemoteError | None]] = field(default_factory=queue.Queue)

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return memoryview(bytearray(header.length))

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self.frames.put((peer, header, bytes(payload)))

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        self.closed.put((peer, error))

    async def next_frame(self) -> tuple[PeerId, FrameHeader, bytes]:
        return await trio.to_thread.run_sync(partial(self.frames.get, timeout=WAIT_S))

    async def next_closed(self) -> tuple[PeerId, NetworkError | RemoteError | None]:
        return await trio.to_thread.run_sync(partial(self.closed.get, timeout=WAIT_S))


class Net:
    """Pools whose handshakes travel in memory and whose lanes are real connections over loopback."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.pools: dict[PeerId, LanePool] = {}
        self.sinks: dict[PeerId, RecordingSink] = {}
        self.scopes: dict[PeerId, trio.CancelScope] = {}
        self.requests = 0

    async def add(self, me: PeerId, *, advertise: tuple[str, ...] = (), limits: LaneLimits | None = None) -> LanePool:
        async def request(peer: PeerId, data: bytes) -> bytes:
            self.requests += 1
            await trio.lowlevel.checkpoint()
            return await self.pools[peer].answer(me, data)

        self.sinks[me] = RecordingSink()
        pool = LanePool(
            me=me,
            swarm_id=b"swarm",
            sink=self.sinks[me],
            listen=LOOPBACK,
            request=request,
            advertise=advertise,
            limits=limits,
        )
        self.pools[me] = pool
        self.scopes[me] = await self._nursery.start(self._run, pool)
        return pool

    async def _run(self, pool: LanePool, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(pool.run)
                task_status.started(scope)


@asynccontextmanager
async def open_net() -> AsyncIterator[Net]:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            yield Net(nursery)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def alice_and_bob() -> AsyncIterator[tuple[Net, LanePool, LanePool]]:
    async with open_net() as net:
        yield net, await net.add(ALICE), await net.add(BOB)


def lanes_of(pool: LanePool, peer: PeerId) -> list[Lane]:
    return pool._lanes_of(peer)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that lane threads do; each look costs a turn of the event loop."""
    with trio.fail_after(WAIT_S):
        while not condition():
            await trio.lowlevel.checkpoint()


def run(test: Callable[[], Awaitable[None]], clock: trio.abc.Clock | None = None) -> None:
    trio.run(test, clock=clock)


def test_pool_carries_frames_both_ways_over_one_lane() -> None:
    async def main() -> None:
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
            assert alice.bytes_sent == bob.bytes_received == 5 + SEAL_OVERHEAD_BYTES
            assert alice.rates(BOB).sent_bytes_per_s is None
            assert alice.queued_bytes(BOB) == 0

    run(main)


def test_pool_stopping_ends_all_lanes_and_joins_threads() -> None:
    async def main() -> None:
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

    run(main)


def test_pool_drop_aborts_and_ensure_makes_a_new_lane() -> None:
    async def main() -> None:
        async with alice_and_bob() as (net, alice, _):
            await alice.ensure(BOB, deadline_s=WAIT_S)
            alice.drop(BOB)
            assert alice.connected() == frozenset()
            assert isinstance((await net.sinks[ALICE].next_closed())[1], NetworkError)
            assert isinstance((await net.sinks[BOB].next_closed())[1], NetworkError)
            await alice.ensure(BOB, deadline_s=WAIT_S)
            alice.post(BOB, NOTE, b"again")
            assert (await net.sinks[BOB].next_frame())[2] == b"again"

    run(main)


@pytest.mark.parametrize("attempt", range(5))
def test_pool_simultaneous_dials_leave_one_lane(attempt: int) -> None:
    async def main() -> None:
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

    run(main)


def test_pool_settles_on_the_lower_side_only() -> None:
    """Two lanes, one dialled by each: Alice keeps her own, whichever side looks first."""

    async def main() -> None:
        async with alice_and_bob() as (net, alice, bob):
            await bob.ensure(ALICE, deadline_s=WAIT_S)
            await alice._dial(BOB)  # as if both had begun at once
            await until(lambda: len(lanes_of(alice, BOB)) == len(lanes_of(bob, ALICE)) == 1)
            assert lanes_of(alice, BOB)[0].dialled
            assert not lanes_of(bob, ALICE)[0].dialled
            assert (await net.sinks[BOB].next_closed()) == (ALICE, None)

    run(main)


def test_pool_keeps_as_many_lanes_as_either_side_wants() -> None:
    async def main() -> None:
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

    run(main)


def test_pool_replaces_a_worn_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with alice_and_bob() as (net, alice, bob):
            await alice.ensure(BOB, deadline_s=WAIT_S)
            (old,) = lanes_of(alice, BOB)
            monkeypatch.setattr("shoal.swarm.lane.LANE_WORN_BYTES", 300)
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

    run(main)


def test_pool_dials_past_addresses_that_fail() -> None:
    """A dead address, then one where something else listens, then the right one."""

    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize("reachable", [ALICE, BOB])
def test_pool_summons_a_peer_that_it_cannot_reach(reachable: PeerId) -> None:
    async def main() -> None:
        async with open_net() as net:
            for peer in (ALICE, BOB):
                await net.add(peer, advertise=() if peer == reachable else (DEAD_ADDRESS,))
            dialler, other = (BOB, ALICE) if reachable == BOB else (ALICE, BOB)
            assert dialler == reachable
            await net.pools[dialler].ensure(other, deadline_s=WAIT_S)
            assert not lanes_of(net.pools[dialler], other)[0].dialled
            net.pools[dialler].post(other, NOTE, b"hello")
            assert (await net.sinks[other].next_frame())[2] == b"hello"

    run(main)


def test_pool_where_neither_is_reachable_gives_up_in_time() -> None:
    async def main() -> None:
        async with open_net() as net:
            alice = await net.add(ALICE, advertise=(DEAD_ADDRESS,))
            await net.add(BOB, advertise=(DEAD_ADDRESS,))
            with pytest.raises(NetworkError):
                await alice.ensure(BOB, deadline_s=1.0)
            assert net.requests <= 4  # offer, summons, the offer of the summoned, and no summons back
            assert alice._dialling == {}

    run(main, trio.testing.MockClock(autojump_threshold=0.05))


def test_pool_ensure_tells_a_bad_answer_from_a_bad_network() -> None:
    async def main() -> None:
        replies: list[bytes | Exception] = [b"junk", NetworkError("the libp2p stream broke")]

        async def request(peer: PeerId, data: bytes) -> bytes:
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
            if isinstance(reply, Exception):
                raise reply
            return reply

        pool = LanePool(me=ALICE, swarm_id=b"s", sink=RecordingSink(), listen=LOOPBACK, request=request)
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            with pytest.raises(RemoteError) as caught:
                await pool.ensure(BOB, deadline_s=WAIT_S)
            assert caught.value.peer == BOB
            with pytest.raises(NetworkError, match="stream broke"):
                await pool.ensure(BOB, deadline_s=WAIT_S)
            nursery.cancel_scope.cancel()

    run(main)


def test_pool_ensure_cancelled_leaves_it_usable() -> None:
    async def main() -> None:
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

    run(main)


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
def test_pool_closes_strangers_within_two_seconds(garbage: bytes) -> None:
    async def main() -> None:
        async with alice_and_bob() as (net, alice, bob):
            await alice.ensure(BOB, deadline_s=WAIT_S)
            _, _, address = await agree(bob)
            stranger = await trio.open_tcp_stream(*address)
            await stranger.send_all(garbage)
            assert await turned_away(stranger) <= lanes.STRANGER_DEADLINE_S + 0.2
            assert not bob._strangers
            alice.post(BOB, NOTE, b"fine.")  # the lane in use noticed nothing
            assert (await net.sinks[BOB].next_frame())[2] == b"fine."
            assert net.sinks[BOB].closed.empty()

    run(main, trio.testing.MockClock(autojump_threshold=0.05))


def test_pool_garbage_does_not_consume_an_id() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            proposal, answer, address = await agree(bob)
            stranger = await trio.open_tcp_stream(*address)
            await stranger.send_all(answer.lane_id + bytes(400))
            await turned_away(stranger)
            assert bob.connected() == frozenset()
            keys = proposal.keys(answer)
            sealer = lanes.Sealer(keys.send_key)
            stream = await trio.open_tcp_stream(*address)
            await stream.send_all(answer.lane_id + lanes._seal_hello(sealer, keys))
            hello = await lanes._receive_exactly(stream, lanes._HELLO_WIRE_BYTES)
            lanes._open_hello(lanes.Opener(keys.receive_key, peer=BOB), keys, hello)
            await until(lambda: bob.connected() == {ALICE})
            await stream.aclose()

    run(main)


def test_pool_id_opens_one_lane_only() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            proposal, answer, address = await agree(bob)
            keys = proposal.keys(answer)
            wire = answer.lane_id + lanes._seal_hello(lanes.Sealer(keys.send_key), keys)
            first, second = await trio.open_tcp_stream(*address), await trio.open_tcp_stream(*address)
            await first.send_all(wire)
            await lanes._receive_exactly(first, lanes._HELLO_WIRE_BYTES)
            await second.send_all(wire)  # somebody who listened repeats it
            await turned_away(second)
            await until(lambda: len(lanes_of(bob, ALICE)) == 1)
            await first.aclose()

    run(main)


def test_pool_hello_of_another_agreement_is_refused() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            mine, mine_answer, address = await agree(bob)
            _, other_answer, _ = await agree(bob, CAROL)
            keys = mine.keys(mine_answer)
            stream = await trio.open_tcp_stream(*address)
            await stream.send_all(other_answer.lane_id + lanes._seal_hello(lanes.Sealer(keys.send_key), keys))
            await turned_away(stream)
            assert bob.connected() == frozenset()

    run(main)


def test_pool_id_takes_few_connections_at_once() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            _, answer, address = await agree(bob)
            streams = [await trio.open_tcp_stream(*address) for _ in range(lanes.CONNECTIONS_PER_ID_LIMIT)]
            for stream in streams:
                await stream.send_all(answer.lane_id)
            pending = bob._pending[answer.lane_id]
            await until(lambda: pending.connections == lanes.CONNECTIONS_PER_ID_LIMIT)
            late = await trio.open_tcp_stream(*address)
            await late.send_all(answer.lane_id)
            assert await turned_away(late) < lanes.STRANGER_DEADLINE_S / 2
            for stream in streams:
                await stream.aclose()
            await until(lambda: pending.connections == 0)

    run(main)


def test_pool_crowd_of_strangers_pushes_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "UNAUTHENTICATED_LIMIT", 3)

    async def main() -> None:
        async with alice_and_bob() as (_, alice, bob):
            _, _, address = await agree(bob)
            streams = []
            for number in range(3):
                streams.append(await trio.open_tcp_stream(*address))
                await until(lambda number=number: len(bob._strangers) == number + 1)
            await alice.ensure(BOB, deadline_s=WAIT_S)  # gets in all the same
            assert await turned_away(streams[0]) < lanes.STRANGER_DEADLINE_S / 2
            assert len(bob._strangers) <= 3
            for stream in streams[1:]:
                await stream.aclose()

    run(main)


def test_pool_pending_ids_expire() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            _, answer, address = await agree(bob)
            await trio.sleep(lanes.PENDING_DEADLINE_S + 1)
            stream = await trio.open_tcp_stream(*address)
            await stream.send_all(answer.lane_id)
            assert await turned_away(stream) < lanes.STRANGER_DEADLINE_S / 2
            await agree(bob)
            assert answer.lane_id not in bob._pending
            assert len(bob._pending) == 1

    run(main, trio.testing.MockClock(autojump_threshold=0.05))


def test_pool_bounds_what_a_peer_leaves_pending() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            for _ in range(lanes.PENDING_PER_PEER_LIMIT):
                await agree(bob)
            with pytest.raises(RemoteError) as caught:
                await agree(bob)
            assert caught.value.peer == ALICE
            await agree(bob, CAROL)  # others are not affected
            bob.drop(ALICE)
            assert len(bob._pending) == 1

    run(main)


def test_pool_answers_no_junk() -> None:
    async def main() -> None:
        async with alice_and_bob() as (_, _, bob):
            with pytest.raises(RemoteError):
                await bob.answer(ALICE, b"junk")
            with pytest.raises(RemoteError):
                await bob.answer(ALICE, bytes(100_000))
            assert not bob._pending

    run(main)


def test_pool_summons_are_not_multiplied() -> None:
    async def main() -> None:
        async with open_net() as net:
            await net.add(ALICE, advertise=(DEAD_ADDRESS,))
            bob = await net.add(BOB)
            for _ in range(50):
                assert await bob.answer(ALICE, encode_handshake(LaneSummons())) == b""
            await until(lambda: not bob._summoned and not bob._dialling)  # none waits for its turn either
            assert net.requests == 1  # one dial, in vain

    run(main)


def test_pool_addresses_are_what_others_can_dial() -> None:
    async def main() -> None:
        async with open_net() as net:
            bob = await net.add(BOB, advertise=("gate.example.org:4001",))
            assert bob.addresses == ("gate.example.org:4001",)
            wildcard = LanePool(
                me=ALICE,
                swarm_id=b"s",
                sink=RecordingSink(),
                listen=("0.0.0.0", 0),
                request=lambda p, d: bob.answer(p, d),
            )
            async with trio.open_nursery() as nursery:
                await nursery.start(wildcard.run)
                assert 1 <= len(wildcard.addresses) <= 8
                for text in wildcard.addresses:
                    host, port = lanes.parse_address(text)
                    assert host != "0.0.0.0"
                    assert port > 0
                nursery.cancel_scope.cancel()

    run(main)


def test_pool_that_cannot_listen_tells_the_user() -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize("advertise", [("nonsense",), ("10.0.0.1:1",) * 9, ("224.0.0.1:5",)])
def test_pool_refuses_to_advertise_nonsense(advertise: tuple[str, ...]) -> None:
    async def request(peer: PeerId, data: bytes) -> bytes:
        return b""

    with pytest.raises(ConfigError):
        LanePool(me=ALICE, swarm_id=b"s", sink=RecordingSink(), listen=LOOPBACK, request=request, advertise=advertise)
