from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import trio

from shoal.node.rounds.reducing import LANE_DEADLINE_S
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import MEMBER_LIMIT
from shoal.protocol.timeouts import in_crowd
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.pool import SUMMONED_DIAL_DEADLINE_S, LanePool
from shoal.swarm.lanes.requests import SHARE_PROTOCOL, LaneRequests, SharedAnswer, request_lane
from shoal.swarm.lanes.shared import SHARED_LEAST_BYTES, SharedOut
from shoal.swarm.streams import MessageStream
from tests.swarm.lane_ends import FAR, WAIT_S, RecordingSink
from tests.swarm.lane_net import until

LANE = "/test/lane/1"
LARGE = FrameHeader(kind=FrameKind.STATE, length=SHARED_LEAST_BYTES, total=SHARED_LEAST_BYTES)


def on_trio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**options: Any) -> None:
        async def bounded() -> None:
            with trio.fail_after(WAIT_S):
                await test(**options)

        trio.run(bounded, strict_exception_groups=True)

    return run


@dataclass
class Node:
    host: Host
    lanes: LanePool
    sink: RecordingSink

    def lane_to(self, other: Node) -> Lane:
        (lane,) = self.lanes.lanes_of(other.host.peer_id)
        return lane


def make_node() -> Node:
    host, sink = Host(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)), RecordingSink()

    async def request(to: PeerId, data: bytes) -> bytes:
        return await host.request(to, LANE, data, deadline_s=WAIT_S)

    async def answer(stream: MessageStream) -> None:
        await stream.send(await lanes.answer(stream.peer, await stream.receive(deadline_s=WAIT_S)), deadline_s=WAIT_S)

    lanes = LanePool(me=host.peer_id, swarm_id=b"s", sink=sink, listen=("127.0.0.1", 0), request=request)
    host.serve(LANE, answer)
    sink.regions[0] = bytearray(LARGE.length)
    return Node(host, lanes, sink)


@asynccontextmanager
async def two(*, knows: bool = True, linked: bool = True) -> AsyncIterator[tuple[Node, Node]]:
    """With a lane between them. knows: whether the second node knows of shared memory."""
    near, far = make_node(), make_node()
    async with trio.open_nursery() as nursery:
        for node in (near, far):
            await nursery.start(node.host.run)
            await nursery.start(node.lanes.run)
            if knows or node is near:
                requests = LaneRequests(node.host, node.lanes, node.host.connected if linked else frozenset)
                nursery.start_soon(requests.run)
        await near.host.dial(far.host.addresses[0], deadline_s=WAIT_S)
        await near.lanes.ensure(far.host.peer_id, deadline_s=WAIT_S)
        await until(lambda: bool(far.lanes.lanes_of(near.host.peer_id)))
        yield near, far
        nursery.cancel_scope.cancel()


async def send(near: Node, far: Node, data: bytes) -> None:
    near.lane_to(far).post(LARGE, data)
    header, received = await trio.to_thread.run_sync(lambda: far.sink.frames.get(timeout=WAIT_S))
    assert (header, received) == (LARGE, data)


@on_trio
async def test_a_lane_is_asked_for_as_long_as_anybody_waits_for_one() -> None:
    asked: list[float] = []

    class Asked:
        async def request(self, peer: PeerId, protocol: str, payload: bytes, *, deadline_s: float, **_: Any) -> bytes:
            asked.append(deadline_s)
            return b""

    await request_lane(Asked(), Identity.generate().peer_id, b"")  # type: ignore[arg-type]
    assert asked[0] >= in_crowd(LANE_DEADLINE_S, MEMBER_LIMIT)
    assert asked[0] >= SUMMONED_DIAL_DEADLINE_S


@on_trio
async def test_two_nodes_of_one_machine_come_to_share_memory() -> None:
    async with two() as (near, far):
        for one, other in ((near, far), (far, near)):
            with trio.fail_after(WAIT_S):
                while not one.lane_to(other)._sharing.bytes_sent:
                    await send(one, other, os.urandom(LARGE.length))
            assert other.lane_to(one)._sharing.bytes_received == one.lane_to(other)._sharing.bytes_sent


@on_trio
async def test_cap_that_is_set_later_ends_lanes_that_hand_over_in_memory_and_those_that_come_do_without() -> None:
    async with two() as (near, far):
        with trio.fail_after(WAIT_S):
            while not near.lane_to(far).uses_memory:
                await send(near, far, bytes(LARGE.length))
        lane, lanes = near.lane_to(far), near.lanes
        with pytest.raises(ConfigError, match="too low"):
            lanes.cap(upload=1 << 30, download=1)
        lanes.cap(upload=None, download=None)
        assert (lanes.caps, lane.usable) == ((None, None), True)
        lanes.cap(upload=1 << 30, download=None)
        assert not lane.usable
        await until(lambda: not lanes.lanes_of(far.host.peer_id) and not far.lanes.lanes_of(near.host.peer_id))
        await lanes.ensure(far.host.peer_id, deadline_s=WAIT_S)
        again = near.lane_to(far)
        for _ in range(5):
            await send(near, far, os.urandom(LARGE.length))
        assert (again.uses_memory, again.usable) == (False, True)
        lanes.cap(upload=None, download=1 << 30)
        assert again.usable, "nothing of it goes past a cap"
        assert lanes.caps == (None, 1 << 30)


@pytest.mark.parametrize("options", [{"knows": False}, {"linked": False}], ids=["does not know it", "is not linked"])
@on_trio
async def test_who_is_refused_goes_on_over_the_connection(options: dict[str, bool]) -> None:
    async with two(**options) as (near, far):
        answers: list[bool] = []
        answered = near.lane_to(far).answered
        near.lane_to(far).answered = lambda taken: (answers.append(taken), answered(taken))  # type: ignore[method-assign,func-returns-value,assignment,return-value]
        await send(near, far, bytes(LARGE.length))
        await until(lambda: bool(answers))
        for _ in range(3):
            await send(near, far, os.urandom(LARGE.length))
        assert answers == [False]
        assert near.lane_to(far)._sharing.bytes_sent == 0


@on_trio
async def test_an_offer_for_a_lane_that_is_not_the_askers_is_declined() -> None:
    async with two() as (near, far):
        out = SharedOut(near.lane_to(far).id)
        for offer, taken in (
            (msgspec.structs.replace(out.offer, lane=bytes(16)), False),
            (msgspec.structs.replace(out.offer, nonce=bytes(32)), False),
            (out.offer, True),
            (out.offer, True),  # again, as the first answer may have been lost
        ):
            data = await near.host.request(far.host.peer_id, SHARE_PROTOCOL, canonical(offer), deadline_s=WAIT_S)
            assert decode(data, SharedAnswer, peer=FAR).taken is taken
        out.close()


@on_trio
async def test_what_is_no_offer_gets_no_answer() -> None:
    async with two() as (near, far):
        with pytest.raises(NetworkError):
            await near.host.request(far.host.peer_id, SHARE_PROTOCOL, b"\xc1", deadline_s=WAIT_S)
        await send(near, far, bytes(LARGE.length))
