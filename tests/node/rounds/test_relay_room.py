"""A reduction of three over real hosts and lanes, of which two reach each other through the third, and one is slow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio

from shoal.collectives import frame_relay
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.collectives.traffic import KINDS, PlanTraffic, Routes
from shoal.node.rounds import relay_room
from shoal.node.rounds.relay_room import LET_GO_PROTOCOL, AskLetGo, RelayRoom
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Relay
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, SCOPE_BYTES
from shoal.swarm.lanes.lane import FrameTakers
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.streams import MessageStream
from tests.collectives.reduce_lab import identity, peer
from tests.collectives.traffic_lab import contribution, plan_of
from tests.swarm.lane_net import LOOPBACK

WAIT_S = 60.0
LANE = "/test/lane/1"
FRAMES = 6
WINDOW = 2 * FRAME_LIMIT_BYTES
SLOW_BYTES_PER_S = 4 << 20
FAR, SLOW, RELAY = range(3)
"""The first two have no lane between them."""


@dataclass
class Node:
    host: Host
    lanes: LanePool
    traffic: PlanTraffic
    room: RelayRoom
    done: trio.Event = field(default_factory=trio.Event)
    reduction: Reduction | None = None
    most_bytes: int = 0

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id


def make_node(number: int, download: RateLimit) -> Node:
    host, frames = Host(identity=identity(number), listen=("/ip4/127.0.0.1/tcp/0",)), FrameTakers()

    async def request(to: PeerId, data: bytes) -> bytes:
        return await host.request(to, LANE, data, deadline_s=WAIT_S)

    async def answer(stream: MessageStream) -> None:
        await stream.send(await lanes.answer(stream.peer, await stream.receive(deadline_s=WAIT_S)), deadline_s=WAIT_S)

    limits = LaneLimits(download=download)
    lanes = LanePool(me=host.peer_id, swarm_id=b"s", sink=frames, listen=LOOPBACK, request=request, limits=limits)
    host.serve(LANE, answer)
    traffic = PlanTraffic(post=lanes.post, waiting=lanes.waiting)
    frames.register(KINDS, traffic)
    node = Node(host, lanes, traffic, RelayRoom(host, traffic, host.connected, trio.lowlevel.checkpoint))
    take = traffic.holding.take

    def measured(*args: object, **options: object) -> memoryview | None:
        memory = take(*args, **options)  # type: ignore[arg-type]
        node.most_bytes = max(node.most_bytes, traffic.holding.held_bytes)
        return memory

    traffic.holding.take = measured  # type: ignore[assignment, method-assign]
    return node


@asynccontextmanager
async def three(*, asks: bool = True) -> AsyncIterator[list[Node]]:
    """Connected in pairs, with lanes to the relay. asks: whether who keeps frames back asks the relay for room."""
    nodes = [make_node(n, RateLimit(SLOW_BYTES_PER_S if n == SLOW else None)) for n in range(3)]
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.host.run)
            await nursery.start(node.lanes.run)
            if asks:
                nursery.start_soon(node.room.run)
        for one, other in ((FAR, RELAY), (SLOW, RELAY), (FAR, SLOW)):
            await nodes[one].host.dial(nodes[other].host.addresses[0], deadline_s=WAIT_S)
        for one in (FAR, SLOW):
            await nodes[one].lanes.ensure(nodes[RELAY].peer, deadline_s=WAIT_S)
        yield nodes
        nursery.cancel_scope.cancel()


def begin(node: Node, number: int, plan: Plan, mine: EncodedContribution) -> Reduction:
    token = trio.lowlevel.current_trio_token()

    def on_progress(progress: ReduceProgress) -> None:
        if progress.final == progress.total:
            token.run_sync_soon(node.done.set)

    node.reduction = Reduction(
        plan=plan,
        identity=identity(number),
        contribution=mine,
        post=partial(node.traffic.post, plan.lineage[:SCOPE_BYTES]),
        on_progress=on_progress,
    )
    node.traffic.begin(node.reduction, Routes(plan, node.peer))
    return node.reduction


async def reduce(nodes: list[Node]) -> list[Finals]:
    """Go through one reduction; its values are checked, against those of the plain formula."""
    values = FRAMES * FRAME_LIMIT_BYTES - 50_000  # of a byte each
    given = [contribution(n, Grid(3 * values, values)) for n in range(3)]
    plan = plan_of(given, relays=(Relay(FAR, SLOW, RELAY),))
    for number, node in enumerate(nodes):
        begin(node, number, plan, given[number])
    async with trio.open_nursery() as nursery:
        for node in nodes:
            assert node.reduction is not None
            nursery.start_soon(trio.to_thread.run_sync, node.reduction.start)
    for node in nodes:
        await node.done.wait()
    finals = [node.reduction.result() for node in nodes if node.reduction is not None]
    want = reference(plan, {peer(n): c.concatenated() for n, c in enumerate(given)}, finals[0].bitmaps)
    assert finals[0].bitmaps == (bytes([0b111]),) * plan.chunks
    assert [wrong_values(one.decoded(), want.update) for one in finals] == [0] * 3
    return finals


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_relay, "WINDOW_LIMIT_BYTES", WINDOW)


async def test_relay_holds_one_window_for_each_of_two_of_which_one_is_slow() -> None:
    async with three() as nodes:
        await reduce(nodes)
        ways = 2 * WINDOW
        assert FRAME_LIMIT_BYTES < nodes[RELAY].most_bytes <= ways < FRAMES * FRAME_LIMIT_BYTES
        with trio.fail_after(WAIT_S):
            while nodes[RELAY].traffic.holding.held_bytes:  # noqa: ASYNC110 - lanes' threads set no event
                await trio.sleep(0.01)
        assert [node.traffic.kept_back() for node in nodes] == [()] * 3


async def test_relay_of_an_earlier_release_is_sent_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no question; what it holds it bounds by reading no more, here as there."""
    monkeypatch.setattr(RelayRoom, "_serve", refuse)
    async with three() as nodes:
        with pytest.raises(NetworkError):
            await nodes[FAR].host.request(nodes[RELAY].peer, LET_GO_PROTOCOL, b"", deadline_s=WAIT_S)
        await reduce(nodes)
        assert nodes[RELAY].most_bytes <= 4 * WINDOW


async def refuse(self: RelayRoom, stream: MessageStream) -> None:
    raise NetworkError("there is no such protocol here")


async def test_who_is_not_linked_is_told_nothing() -> None:
    async with three(asks=False) as nodes:
        nodes[RELAY].room._linked = lambda: frozenset({nodes[SLOW].peer})
        asked = canonical(AskLetGo(scope=bytes(SCOPE_BYTES), to=nodes[SLOW].peer))
        reply = await nodes[FAR].host.request(nodes[RELAY].peer, LET_GO_PROTOCOL, asked, deadline_s=WAIT_S)
        assert isinstance(decode(reply, relay_room.LetGoReply), Refusal)  # type: ignore[arg-type]
        reply = await nodes[SLOW].host.request(nodes[RELAY].peer, LET_GO_PROTOCOL, asked, deadline_s=WAIT_S)
        assert decode(reply, relay_room.LetGoReply) == relay_room.LetGo(size=0)  # type: ignore[arg-type]
