"""Two reductions at once over one lane: both exact, and the small one does not wait for the large one to be through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Participant, Plan, Term, domain_hash
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, SCOPE_BYTES, FrameHeader
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.queue import Frame, FrameQueue
from shoal.swarm.lanes.seal import Opener, Sealer
from tests.swarm.lane_ends import WAIT_S, tcp_pair

CHUNK_VALUES = 1 << 16
LARGE, SMALL = 32, 4
"""Chunks: 8 MB and 1 MB."""
BYTES_PER_S = 8_000_000
WEIGHTS = (3, 1)
KEYS = (bytes([1]) * 32, bytes([2]) * 32)
IDENTITIES = [Identity.from_seed(bytes([n + 1]) * 32) for n in range(2)]


def values(reduction: int, place: int, grid: Grid) -> F32:
    drawn: F32 = np.random.default_rng([reduction, place]).standard_normal(grid.numel, np.float32)
    return drawn


def reference(reduction: int, grid: Grid) -> F32:
    """In the order of the plan, from +0, each step rounded."""
    total = np.zeros(grid.numel, np.float32)
    for place, weight in enumerate(WEIGHTS):
        total += values(reduction, place, grid) * np.float32(weight)
    return total / np.float32(sum(WEIGHTS))


@dataclass
class Node:
    """One end of the lane, with a traffic for each reduction; a frame goes to the one of its scope."""

    place: int
    traffics: dict[bytes, PlanTraffic] = field(default_factory=dict)
    reductions: list[Reduction] = field(default_factory=list)
    through: list[threading.Event] = field(default_factory=list)
    first_then: list[int] = field(default_factory=list)
    """How many chunks of the first reduction were final when another was through."""
    lane: Lane = field(init=False)

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return self.traffics[header.scope].region(peer, header)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self.traffics[header.scope].received(peer, header, payload)

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        pass


@contextmanager
def joined(queue: type[FrameQueue]) -> Iterator[list[Node]]:
    """Two nodes with one lane between them, through which so many bytes go in a second each way."""
    nodes = [Node(place) for place in range(2)]
    for node, connection in zip(nodes, tcp_pair(), strict=True):
        node.lane = Lane(
            connection,
            peer=IDENTITIES[1 - node.place].peer_id,
            sealer=Sealer(KEYS[node.place]),
            opener=Opener(KEYS[1 - node.place], peer=IDENTITIES[1 - node.place].peer_id),
            sink=node,
            limits=LaneLimits(upload=RateLimit(BYTES_PER_S), shares=False),
            dialled=node.place == 1,
            queue=queue(),
        )
    try:
        yield nodes
    finally:
        for node in nodes:
            node.lane.abort()
            assert node.lane.join(WAIT_S)


def begin(nodes: list[Node], number: int, chunks: int) -> Grid:
    """Have a reduction at both, to be started."""
    grid = Grid(chunks * CHUNK_VALUES, CHUNK_VALUES)
    contributions = [EncodedContribution.encode(values(number, place, grid), grid, "fp32") for place in range(2)]
    plan = Plan(
        term=Term(),
        round=1,
        base=domain_hash("base", bytes([number])),
        view=0,
        attempt=0,
        planner=IDENTITIES[0].peer_id,
        participants=tuple(
            Participant(one.peer_id, weight, 1, contribution.root)
            for one, weight, contribution in zip(IDENTITIES, WEIGHTS, contributions, strict=True)
        ),
        owners=deal([(0, 0)] * 2, grid.chunks),
        codec="fp32",
        numel=grid.numel,
        chunk_values=CHUNK_VALUES,
    )
    scope = plan.lineage[:SCOPE_BYTES]
    for node in nodes:
        through = threading.Event()

        def on_progress(progress: ReduceProgress, node: Node = node, through: threading.Event = through) -> None:
            if progress.final == progress.total:
                node.first_then.append(node.reductions[0].final_chunks)
                through.set()

        traffic = PlanTraffic(
            post=lambda peer, header, payload, lane=node.lane: lane.post(header, payload),  # type: ignore[misc]
            waiting=lambda to, scope: (),
        )
        reduction = Reduction(
            plan=plan,
            identity=IDENTITIES[node.place],
            contribution=contributions[node.place],
            post=lambda *payload, traffic=traffic: traffic.post(scope, *payload),  # type: ignore[misc]
            on_progress=on_progress,
        )
        traffic.begin(reduction, Routes(plan, IDENTITIES[node.place].peer_id))
        node.traffics[scope] = traffic
        node.reductions.append(reduction)
        node.through.append(through)
    return grid


class OneAfterTheOther(FrameQueue):
    """Serves what came first until nothing of it waits."""

    def take(self, limit_bytes: int, frame_bytes: int = FRAME_LIMIT_BYTES) -> list[Frame]:
        if self._turns:
            self._scopes[self._turns[0]].credit = 1 << 40
        return super().take(limit_bytes, frame_bytes)


def share_done_when_the_small_one_is(queue: type[FrameQueue]) -> float:
    """How much of the large reduction was final at the first node when the small one, begun later, was."""
    with joined(queue) as nodes:
        grids = begin(nodes, 0, LARGE), begin(nodes, 1, SMALL)
        for node in nodes:
            node.lane.start()
        for number in range(2):  # all that the large one contributes is queued first
            for node in nodes:
                node.reductions[number].start()
        for node in nodes:
            for event in node.through:
                assert event.wait(WAIT_S)
        for number, grid in enumerate(grids):
            want = reference(number, grid).tobytes()
            for node in nodes:
                assert node.reductions[number].verify() == []
                assert node.reductions[number].result().concatenated() == want
        small_then, *_ = nodes[0].first_then  # or the large one's own, if that was through before
    return small_then / LARGE


@pytest.mark.parametrize(("queue", "fair"), [(FrameQueue, True), (OneAfterTheOther, False)], ids=["product", "seeded"])
def test_two_reductions_at_once_are_exact_and_share_the_lane(queue: type[FrameQueue], fair: bool) -> None:
    """Served in turn, the small one is through when about as much of the large one has moved."""
    assert (share_done_when_the_small_one_is(queue) <= 0.5) == fair
