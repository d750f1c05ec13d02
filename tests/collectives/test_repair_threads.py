"""Repairs under threads: several lanes per pair deliver through real traffic while the plan is revised."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Post
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Held, Plan
from shoal.swarm.lanes.frame import SCOPE_BYTES, FrameHeader
from tests.collectives.reduce_lab import CODECS, WAIT_S, encode, peer
from tests.collectives.repair_lab import SMALL, Node, Swarm

LANES = 2
SEEDS = 40

Frame = tuple[PeerId, FrameHeader, bytes]


@dataclass
class ThreadedSwarm(Swarm):
    """A swarm whose frames go through `PlanTraffic` and queues, LANES threads for each node and direction."""

    traffic: list[PlanTraffic] = field(default_factory=list)
    lanes: dict[tuple[PeerId, PeerId], queue.SimpleQueue[Frame | None]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    taken: int = 0

    def __post_init__(self) -> None:
        count = len(self.weights)
        self.traffic = [PlanTraffic(post=partial(self.transmit, n), waiting=lambda to, scope: ()) for n in range(count)]
        super().__post_init__()
        for node, traffic in zip(self.nodes, self.traffic, strict=True):
            traffic.begin(node.reduction, Routes(self.plan, node.peer))
        for to in range(count):
            for sender in range(count):
                if sender != to:
                    self.lanes[peer(sender), peer(to)] = queue.SimpleQueue()
                    lane = partial(self.read_lane, to, self.lanes[peer(sender), peer(to)])
                    self.threads += [threading.Thread(target=lane) for _ in range(LANES)]

    def poster(self, n: int) -> Post:
        return partial(self.traffic[n].post, self.plans[0].hash[:SCOPE_BYTES])

    def told(self, events: list[ReduceProgress], progress: ReduceProgress) -> None:
        with self.changed:
            super().told(events, progress)
            self.changed.notify_all()

    def transmit(self, n: int, to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
        if self.nodes[n].up:
            self.lanes[peer(n), to].put((peer(n), header, bytes(payload)))

    def read_lane(self, n: int, lane: queue.SimpleQueue[Frame | None]) -> None:
        while (frame := lane.get()) is not None:
            sender, header, payload = frame
            try:
                if self.nodes[n].up:
                    region = self.traffic[n].region(sender, header)
                    if region is not None:
                        region[:] = payload
                        self.traffic[n].received(sender, header, region)
            except Exception as error:
                self.errors.append(error)
            with self.changed:
                self.taken += 1
                self.changed.notify_all()

    def spawn(self, work: Callable[[], None]) -> None:
        """`work` in a thread of its own."""
        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def adopt(self, node: Node, plan: Plan, helds: Mapping[PeerId, Held] | None = None) -> None:
        """As a node does it: the tables first, then the frames of this revision, then the work, in a thread."""
        node.plan = plan
        node.reduction.follow(plan)
        self.traffic[node.number].revise(plan, Routes(plan, node.peer))
        self.spawn(partial(node.reduction.repair, plan, helds or {}))

    def lose(self, victim: int, *, after: int) -> None:
        """Node `victim` dies once `after` frames were taken, and the others repair."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.taken >= after or self.complete(), WAIT_S)
        self.kill(victim)
        self.repair()

    def complete(self) -> bool:
        """Whether every survivor has all finals and has said so."""
        chunks = self.plan.chunks
        return all(
            node.reduction.final_chunks == chunks and node.events[-1].final == chunks for node in self.survivors()
        )

    def run(self, losses: Sequence[tuple[int, int]]) -> None:
        """From the start to the end, with these (victim, after how many frames) on the way."""
        for thread in self.threads:
            thread.start()
        for node in self.nodes:
            self.spawn(node.reduction.start)
        try:
            for victim, after in losses:
                self.lose(victim, after=after)
            with self.changed:
                assert self.changed.wait_for(self.complete, WAIT_S), [n.reduction.waiting_for() for n in self.nodes]
        finally:
            for traffic in self.traffic:
                traffic.close()  # what was on its way to the dead waits for plans that they never get
            for lane in self.lanes.values():
                for _ in range(LANES):
                    lane.put(None)
            for thread in self.threads:
                thread.join(WAIT_S)
        assert self.errors == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_repairs_while_lanes_deliver_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(3, 4)
    weights = [rng.choice((1, 2, 1000)) for _ in range(count)]
    name = CODECS[seed % len(CODECS)]
    swarm = ThreadedSwarm([encode(n, name, SMALL) for n in range(count)], weights, seed)
    frames = 2 * SMALL.chunks * (count - 1)
    victims = rng.sample(range(count), count - 2)
    swarm.run([(victim, rng.randrange(frames)) for victim in victims])
    swarm.check()
