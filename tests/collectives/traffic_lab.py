"""Nodes joined by lanes in memory: real reductions and real traffic, frames that are lost, links that are cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Participant, Plan, Relay
from shoal.swarm.lanes.frame import BULK_KINDS, SCOPE_BYTES, FrameHeader, FrameKind
from tests.collectives.reduce_lab import identity, peer
from tests.round_messages import plan_with

GRID = Grid(10_000, 4096)
WAIT_S = 60.0


def contribution(n: int, grid: Grid = GRID) -> EncodedContribution:
    values: F32 = np.random.default_rng(n).standard_normal(grid.numel).astype(np.float32)
    return EncodedContribution.encode(values, grid, "int8")


def plan_of(
    contributions: Sequence[EncodedContribution],
    *,
    round: int = 1,
    view: int = 0,
    attempt: int = 0,
    relays: tuple[Relay, ...] = (),
) -> Plan:
    peers = [peer(n) for n in range(len(contributions))]
    return plan_with(
        (Participant(p, n + 1, 10, contributions[n].root) for n, p in enumerate(peers)),
        contributions[0].grid,
        round=round,
        view=view,
        attempt=attempt,
        relays=relays,
    )


@dataclass
class Node:
    peer: PeerId
    traffic: PlanTraffic = field(init=False)
    done: threading.Event = field(default_factory=threading.Event)
    reduction: Reduction | None = None
    errors: list[RemoteError] = field(default_factory=list)

    def on_progress(self, progress: ReduceProgress) -> None:
        if progress.final == progress.total:
            self.done.set()


@dataclass
class Net:
    """Traffics joined by lanes: each pair of nodes has a thread per direction, as it has with real lanes."""

    nodes: list[Node]
    cut: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    lose: Callable[[FrameHeader], bool] = lambda header: False
    alter: Callable[[FrameHeader, bytes], bytes] = lambda header, payload: payload
    frames: list[tuple[PeerId, PeerId, FrameHeader, bytes]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    mended: bool = False
    queued: dict[tuple[PeerId, PeerId], list[tuple[FrameHeader, bytes]]] = field(default_factory=dict)
    """Payloads that wait for a lane, from whom to whom; only of pairs that are in here."""

    def __post_init__(self) -> None:
        for node in self.nodes:
            node.traffic = PlanTraffic(post=self.poster(node.peer), waiting=partial(self.waits_for, node.peer))

    def poster(self, sender: PeerId) -> Callable[[PeerId, FrameHeader, memoryview | bytes], None]:
        def post(to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
            if (sender, to) in self.cut:
                raise NetworkError(f"there is no lane to {to}")
            sent = self.alter(header, bytes(payload))
            if (sender, to) in self.queued and header.kind in BULK_KINDS:
                self.queued[sender, to].append((header, sent))
                return
            self.frames.append((sender, to, header, sent))
            if not self.lose(header):
                thread = threading.Thread(target=self.deliver, args=(sender, to, header, sent))
                thread.start()
                self.threads.append(thread)

        return post

    def waits_for(self, sender: PeerId, to: PeerId, scope: bytes) -> set[tuple[FrameKind, int]]:
        frames = self.queued.get((sender, to), [])
        return {(header.kind, header.chunk) for header, _ in frames if header.scope == scope and not header.offset}

    def send_queued(self, sender: PeerId, to: PeerId) -> None:
        """A lane takes what waits."""
        for header, payload in self.queued.pop((sender, to)):
            self.frames.append((sender, to, header, payload))
            self.deliver(sender, to, header, payload)

    def deliver(self, sender: PeerId, to: PeerId, header: FrameHeader, payload: bytes) -> None:
        (node,) = (node for node in self.nodes if node.peer == to)
        try:
            if header.kind not in BULK_KINDS:
                node.traffic.received(sender, header, memoryview(payload))
                return
            region = node.traffic.region(sender, header)
            if region is not None:
                region[:] = payload
                node.traffic.received(sender, header, region)
        except RemoteError as error:
            node.errors.append(error)

    def begin(self, node: Node, plan: Plan, mine: EncodedContribution) -> Reduction:
        (who,) = (identity(n) for n in range(8) if peer(n) == node.peer)
        node.reduction = Reduction(
            plan=plan,
            identity=who,
            contribution=mine,
            post=partial(node.traffic.post, plan.lineage[:SCOPE_BYTES]),
            on_progress=node.on_progress,
        )
        node.traffic.begin(node.reduction, Routes(plan, node.peer))
        return node.reduction

    def revise(self, node: Node, plan: Plan) -> None:
        """As a node goes over to a revision: its tables first, then its frames, then the work."""
        assert node.reduction is not None
        node.done.clear()
        node.reduction.follow(plan)
        node.traffic.revise(plan, Routes(plan, node.peer))
        node.reduction.repair(plan, {})

    def join(self) -> None:
        while self.threads:
            self.threads.pop().join(WAIT_S)


def net_of(count: int) -> Net:
    return Net([Node(peer(n)) for n in range(count)])


def begin_all(net: Net, plan: Plan, contributions: Sequence[EncodedContribution]) -> None:
    """Everyone adopts `plan` and starts."""
    reductions = [net.begin(node, plan, mine) for node, mine in zip(net.nodes, contributions, strict=True)]
    for reduction in reductions:
        reduction.start()


def results(nodes: Sequence[Node]) -> list[Finals]:
    """What these nodes end with."""
    for node in nodes:
        assert node.done.wait(WAIT_S)
    return [node.reduction.result() for node in nodes if node.reduction is not None]


def assert_exact(net: Net, plan: Plan, contributions: Sequence[EncodedContribution]) -> None:
    """Those who remain have the same finals, of all who remain, and they are those of the plain formula."""
    remaining = [node for node in net.nodes if node.peer not in plan.evicted]
    finals = results(remaining)
    net.join()
    assert len({one.concatenated() for one in finals}) == 1
    given = {peer(n): c.concatenated() for n, c in enumerate(contributions)}
    want = reference(plan, given, finals[0].bitmaps)
    assert all(wrong_values(one.decoded(), want.update) == 0 for one in finals)
    living = sum(1 << place for place, p in enumerate(plan.participants) if p.peer not in plan.evicted)
    assert finals[0].bitmaps == (bytes([living]),) * plan.chunks
    assert [node.errors for node in remaining] == [[]] * len(remaining)


def header_of(plan: Plan, kind: FrameKind, chunk: int) -> FrameHeader:
    scope = plan.lineage[:SCOPE_BYTES]
    return FrameHeader(
        kind=kind, round=plan.round, view=plan.view, attempt=plan.attempt, chunk=chunk, scope=scope, total=10, length=10
    )
