"""Frames between lanes and reductions: cut, routed, early, late, lost and sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from shoal.collectives import traffic as traffic_module
from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.collectives.reduce import Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.collectives.traffic import KINDS, PlanTraffic
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, Participant, Plan, Term
from shoal.swarm.frame import FRAME_LIMIT_BYTES, SCOPE_BYTES, FrameHeader, FrameKind

GRID = Grid(10_000, 4096)
WAIT_S = 10.0


def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32)


def contribution(n: int, grid: Grid = GRID) -> EncodedContribution:
    values: F32 = np.random.default_rng(n).standard_normal(grid.numel).astype(np.float32)
    return EncodedContribution.encode(values, grid, "int8")


def plan_of(contributions: Sequence[EncodedContribution], *, round: int = 1, view: int = 0, attempt: int = 0) -> Plan:
    peers = [identity(n).peer_id for n in range(len(contributions))]
    grid = contributions[0].grid
    return Plan(
        term=Term(),
        round=round,
        base=NO_HASH,
        view=view,
        attempt=attempt,
        planner=peers[0],
        participants=tuple(Participant(p, n + 1, 10, contributions[n].root) for n, p in enumerate(peers)),
        owners=deal([(0, 0)] * len(peers), grid.chunks),
        codec="int8",
        numel=grid.numel,
        chunk_values=grid.chunk_values,
    )


@dataclass
class Node:
    peer: PeerId
    traffic: PlanTraffic = field(init=False)
    done: threading.Event = field(default_factory=threading.Event)
    reduction: Reduction | None = None
    errors: list[RemoteError] = field(default_factory=list)


@dataclass
class Net:
    """Traffics joined by lanes: each pair of nodes has a thread per direction, as it has with real lanes."""

    nodes: list[Node]
    cut: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    lose: Callable[[FrameHeader], bool] = lambda header: False
    frames: list[tuple[PeerId, PeerId, FrameHeader, bytes]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in self.nodes:
            node.traffic = PlanTraffic(post=self.poster(node.peer))

    def poster(self, sender: PeerId) -> Callable[[PeerId, FrameHeader, memoryview | bytes], None]:
        def post(to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
            if (sender, to) in self.cut:
                raise NetworkError(f"there is no lane to {to}")
            self.frames.append((sender, to, header, bytes(payload)))
            if not self.lose(header):
                thread = threading.Thread(target=self.deliver, args=(sender, to, header, bytes(payload)))
                thread.start()
                self.threads.append(thread)

        return post

    def deliver(self, sender: PeerId, to: PeerId, header: FrameHeader, payload: bytes) -> None:
        (node,) = (node for node in self.nodes if node.peer == to)
        try:
            region = node.traffic.region(sender, header)
            if region is not None:
                region[:] = payload
                node.traffic.received(sender, header, region)
        except RemoteError as error:
            node.errors.append(error)

    def begin(self, node: Node, plan: Plan, mine: EncodedContribution) -> Reduction:
        (who,) = (identity(n) for n in range(8) if identity(n).peer_id == node.peer)
        scope = plan.hash[:SCOPE_BYTES]

        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            node.traffic.post(plan, scope, to, kind, chunk, payload)

        def on_progress(progress: object) -> None:
            assert node.reduction is not None
            if node.reduction.final_chunks == plan.chunks:
                node.done.set()

        node.reduction = Reduction(plan=plan, identity=who, contribution=mine, post=post, on_progress=on_progress)
        node.traffic.begin(node.reduction)
        return node.reduction

    def join(self) -> None:
        while self.threads:
            self.threads.pop().join(WAIT_S)


def net_of(count: int) -> Net:
    return Net([Node(identity(n).peer_id) for n in range(count)])


def results(net: Net) -> list[Finals]:
    for node in net.nodes:
        assert node.done.wait(WAIT_S)
    net.join()
    return [node.reduction.result() for node in net.nodes if node.reduction is not None]


def assert_exact(net: Net, plan: Plan, contributions: Sequence[EncodedContribution]) -> None:
    """All nodes have the same finals, and they are those of the plain formula."""
    finals = results(net)
    assert len({one.concatenated() for one in finals}) == 1
    given = {identity(n).peer_id: c.concatenated() for n, c in enumerate(contributions)}
    want = reference(plan, given, finals[0].bitmaps)
    assert all(wrong_values(one.decoded(), want.update) == 0 for one in finals)
    assert finals[0].bitmaps == (bytes([2 ** len(contributions) - 1]),) * plan.chunks
    assert [node.errors for node in net.nodes] == [[]] * len(net.nodes)


# -- frames out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES + 1, 3 * FRAME_LIMIT_BYTES])
def test_payload_is_cut_into_frames_that_say_where_they_belong(size: int) -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.lose = lambda header: True
    plan = plan_of(given, round=7, view=3, attempt=2)
    net.begin(net.nodes[0], plan, given[0])
    payload = bytes(range(251)) * (size // 251 + 1)
    scope, to = plan.hash[:SCOPE_BYTES], net.nodes[1].peer
    net.nodes[0].traffic.post(plan, scope, to, FrameKind.CONTRIBUTION, 1, memoryview(payload)[:size])
    assert b"".join(data for _, _, _, data in net.frames) == payload[:size]
    for _, receiver, header, data in net.frames:
        assert receiver == to
        want = FrameHeader(
            kind=FrameKind.CONTRIBUTION,
            round=7,
            view=3,
            attempt=2,
            chunk=1,
            scope=scope,
            offset=header.offset,
            total=size,
            length=len(data),
        )
        assert header == want
    assert [header.offset for _, _, header, _ in net.frames] == list(range(0, size, FRAME_LIMIT_BYTES))


def test_frames_of_a_replaced_reduction_are_not_posted() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    first, second = plan_of(given), plan_of(given, attempt=1)
    old = net.begin(net.nodes[0], first, given[0])
    net.begin(net.nodes[0], second, given[0])
    old.start()
    net.nodes[0].traffic.post(first, first.hash[:SCOPE_BYTES], net.nodes[1].peer, FrameKind.FINAL, 0, memoryview(b"x"))
    assert net.frames == []
    assert net.nodes[0].traffic.owed() == frozenset()


# -- frames in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
def test_reductions_over_traffic_are_exact(count: int) -> None:
    net, given = net_of(count), [contribution(n) for n in range(count)]
    plan = plan_of(given)
    reductions = [net.begin(node, plan, mine) for node, mine in zip(net.nodes, given, strict=True)]
    for reduction in reductions:
        reduction.start()
    assert_exact(net, plan, given)
    assert {header.kind for _, _, header, _ in net.frames} == KINDS


def test_contribution_that_comes_before_its_plan_waits_for_it() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    early, late = net.nodes
    plan = plan_of(given)
    net.begin(early, plan, given[0]).start()
    assert any(thread.is_alive() for thread in net.threads)
    net.begin(late, plan, given[1]).start()
    assert_exact(net, plan, given)


def test_frame_of_a_newer_plan_is_dropped_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 0.05)
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.begin(net.nodes[0], plan_of(given), given[0])
    newer = plan_of(given, round=2)
    header = header_of(newer, FrameKind.CONTRIBUTION, 0)
    assert net.nodes[0].traffic.region(net.nodes[1].peer, header) is None


def header_of(plan: Plan, kind: FrameKind, chunk: int) -> FrameHeader:
    scope = plan.hash[:SCOPE_BYTES]
    return FrameHeader(
        kind=kind, round=plan.round, view=plan.view, attempt=plan.attempt, chunk=chunk, scope=scope, total=10, length=10
    )


def test_frames_of_older_plans_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(2), [contribution(0), contribution(1)]
    node, other = net.nodes
    net.begin(node, plan_of(given, round=5, view=3, attempt=2), given[0])
    for seat in ((4, 9, 9), (5, 2, 9), (5, 3, 1)):
        plan = plan_of(given, round=seat[0], view=seat[1], attempt=seat[2])
        for kind in KINDS:
            header = header_of(plan, kind, 0)
            assert node.traffic.region(other.peer, header) is None
            node.traffic.received(other.peer, header, memoryview(bytearray(10)))


def test_frames_after_the_end_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(2), [contribution(0), contribution(1)]
    plan = plan_of(given)
    net.begin(net.nodes[0], plan, given[0])
    header = header_of(plan, FrameKind.CONTRIBUTION, 0)
    assert net.nodes[0].traffic.region(net.nodes[1].peer, header) is not None
    net.nodes[0].traffic.end()
    assert net.nodes[0].traffic.region(net.nodes[1].peer, header) is None
    net.nodes[0].traffic.received(net.nodes[1].peer, header, memoryview(bytearray(10)))


def test_close_lets_waiting_lanes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.begin(net.nodes[0], plan_of(given), given[0]).start()
    waiting = list(net.threads)  # the other has no plan yet
    assert waiting
    net.nodes[1].traffic.close()
    for thread in waiting:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert net.nodes[1].errors == []


def test_frames_that_the_plan_does_not_provide_for_are_the_senders_fault() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    plan = plan_of(given)
    net.begin(net.nodes[0], plan, given[0])
    other = net.nodes[1].peer
    owner = {chunk: owned.owner for owned in plan.owners for chunk in range(owned.start, owned.stop)}
    mine = next(chunk for chunk in owner if owner[chunk] == 0)
    theirs = next(chunk for chunk in owner if owner[chunk] == 1)
    good = header_of(plan, FrameKind.CONTRIBUTION, mine)
    assert net.nodes[0].traffic.region(other, good) is not None
    bad = [
        (identity(7).peer_id, good),
        (other, replace(good, chunk=theirs)),
        (other, replace(good, chunk=99)),
        (other, replace(good, offset=1 << 20, total=1 << 21)),
        (other, replace(good, kind=FrameKind.FINAL)),
        (identity(7).peer_id, header_of(plan, FrameKind.FINAL, theirs)),
    ]
    for sender, header in bad:
        with pytest.raises(RemoteError) as caught:
            net.nodes[0].traffic.region(sender, header)
        assert caught.value.peer == sender


# -- lanes that fail -----------------------------------------------------------------------------------------


def test_what_no_lane_took_is_owed_and_sent_when_there_is_one() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    first, second, _ = net.nodes
    net.cut = {(first.peer, second.peer)}
    reductions = [net.begin(node, plan, mine) for node, mine in zip(net.nodes, given, strict=True)]
    for reduction in reductions:
        reduction.start()
    net.join()
    assert first.traffic.owed() == {second.peer}
    assert not second.done.is_set()
    first.traffic.post_again(second.peer)  # still no lane
    assert first.traffic.owed() == {second.peer}
    net.cut.clear()
    first.traffic.post_again(second.peer)
    assert first.traffic.owed() == frozenset()
    assert_exact(net, plan, given)


def test_what_a_failed_lane_lost_is_sent_again_and_counts_once() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    first, second, third = net.nodes
    lost: list[FrameHeader] = []

    def lose_some(header: FrameHeader) -> bool:
        if len(lost) < 2 and header.kind is FrameKind.CONTRIBUTION:
            lost.append(header)
            return True
        return False

    net.lose = lose_some
    reductions = [net.begin(node, plan, mine) for node, mine in zip(net.nodes, given, strict=True)]
    for reduction in reductions:
        reduction.start()
    net.join()
    assert len(lost) == 2
    assert not all(node.done.is_set() for node in net.nodes)
    for node in net.nodes:
        for peer in {n.peer for n in net.nodes} - {node.peer}:
            node.traffic.lane_failed(peer)
        assert node.traffic.owed() == {n.peer for n in net.nodes} - {node.peer}
        for peer in node.traffic.owed():
            node.traffic.post_again(peer)
        assert node.traffic.owed() == frozenset()
    assert_exact(net, plan, given)
    assert (first.peer, second.peer, third.peer) == plan_peers(plan)


def plan_peers(plan: Plan) -> tuple[PeerId, ...]:
    return tuple(participant.peer for participant in plan.participants)


def test_failed_lane_to_who_was_sent_nothing_owes_nothing() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.begin(net.nodes[0], plan_of(given), given[0])
    net.nodes[0].traffic.lane_failed(identity(7).peer_id)
    net.nodes[0].traffic.post_again(identity(7).peer_id)
    assert net.nodes[0].traffic.owed() == frozenset()
    assert net.frames == []


def test_debts_end_with_their_reduction() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    plan = plan_of(given)
    node, other = net.nodes
    net.cut = {(node.peer, other.peer)}
    net.begin(node, plan, given[0]).start()
    assert node.traffic.owed() == {other.peer}
    node.traffic.end()
    assert node.traffic.owed() == frozenset()
    net.cut.clear()
    node.traffic.post_again(other.peer)
    assert net.frames == []
