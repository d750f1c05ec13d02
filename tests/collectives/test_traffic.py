"""Frames of plans: cut, routed to the reduction they belong to, early, late, lost and sent again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from shoal.collectives import traffic as traffic_module
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal, owner_by_chunk
from shoal.collectives.traffic import PAYLOADS
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.planning import PlanOrder, revise_plan
from shoal.swarm.lanes.frame import LARGE_FRAME_BYTES, SCOPE_BYTES, FrameHeader, FrameKind
from tests.collectives.reduce_lab import peer
from tests.collectives.traffic_lab import (
    WAIT_S,
    Net,
    Node,
    assert_exact,
    begin_all,
    contribution,
    header_of,
    net_of,
    plan_of,
)

LONG = Grid(30_000, 2048)

# -- frames out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, LARGE_FRAME_BYTES, LARGE_FRAME_BYTES + 1, 3 * LARGE_FRAME_BYTES])
def test_payload_is_cut_into_frames_that_say_where_they_belong(size: int) -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.lose = lambda header: True
    plan = plan_of(given, round=7, view=3, attempt=2)
    net.begin(net.nodes[0], plan, given[0])
    payload = bytes(range(251)) * (size // 251 + 1)
    scope, to = plan.hash[:SCOPE_BYTES], net.nodes[1].peer
    net.nodes[0].traffic.post(scope, to, FrameKind.CONTRIBUTION, 1, memoryview(payload)[:size])
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
    assert [header.offset for _, _, header, _ in net.frames] == list(range(0, size, LARGE_FRAME_BYTES))


def test_frames_of_a_replaced_reduction_are_not_posted() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    first, second = plan_of(given), plan_of(given, attempt=1)
    old = net.begin(net.nodes[0], first, given[0])
    net.begin(net.nodes[0], second, given[0])
    old.start()
    net.nodes[0].traffic.post(first.hash[:SCOPE_BYTES], net.nodes[1].peer, FrameKind.FINAL, 0, memoryview(b"x"))
    assert net.frames == []
    assert net.nodes[0].traffic.owed() == frozenset()


# -- frames in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
def test_reductions_over_traffic_are_exact(count: int) -> None:
    net, given = net_of(count), [contribution(n) for n in range(count)]
    plan = plan_of(given)
    begin_all(net, plan, given)
    assert_exact(net, plan, given)
    assert {header.kind for _, _, header, _ in net.frames} == PAYLOADS


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


def assert_dropped_at_once(node: Node, sender: PeerId, header: FrameHeader) -> None:
    """No lane waits for a plan with this frame, nor does it reach a reduction."""
    regions: list[memoryview | None] = []

    def lane() -> None:
        regions.append(node.traffic.region(sender, header))
        node.traffic.received(sender, header, memoryview(bytearray(header.length)))

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert regions == [None]


def test_frames_of_older_plans_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(2), [contribution(0), contribution(1)]
    node, other = net.nodes
    net.begin(node, plan_of(given, round=5, view=3, attempt=2), given[0])
    for plan_order in ((4, 9, 9), (5, 2, 9), (5, 3, 1)):
        plan = plan_of(given, round=plan_order[0], view=plan_order[1], attempt=plan_order[2])
        for kind in PAYLOADS:
            assert_dropped_at_once(node, other.peer, header_of(plan, kind, 0))


def test_frames_after_the_end_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(2), [contribution(0), contribution(1)]
    plan = plan_of(given)
    net.begin(net.nodes[0], plan, given[0])
    header = header_of(plan, FrameKind.CONTRIBUTION, 0)
    assert net.nodes[0].traffic.region(net.nodes[1].peer, header) is not None
    net.nodes[0].traffic.end()
    assert_dropped_at_once(net.nodes[0], net.nodes[1].peer, header)


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
        (peer(7), good),
        (other, replace(good, chunk=99)),
        (other, replace(good, offset=1 << 20, total=1 << 21)),
        (peer(7), header_of(plan, FrameKind.FINAL, theirs)),
    ]
    for sender, header in bad:
        with pytest.raises(RemoteError) as caught:
            net.nodes[0].traffic.region(sender, header)
        assert caught.value.peer == sender


# -- revisions -----------------------------------------------------------------------------------------------


def without(plan: Plan, gone: int) -> Plan:
    """`plan` revised without participant number `gone`, of whose finals nobody holds any."""
    plan_order = PlanOrder(view=plan.view, attempt=plan.attempt + 1, planner=plan.planner, evicted=(peer(gone),))
    return revise_plan(plan, plan_order, {}, deal)


def test_frames_of_a_newer_revision_wait_for_it_and_are_taken_by_it() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    revised = without(plan, 2)
    late, early, dead = net.nodes
    net.lose = lambda header: True
    begin_all(net, plan, given)
    net.lose = lambda header: False
    net.frames.clear()
    net.revise(early, revised)
    waiting = list(net.threads)
    assert [(to, header.attempt) for _, to, header, _ in net.frames] == [(late.peer, 1)]
    again = net.frames[0][2].chunk
    assert (owner_by_chunk(plan)[again], owner_by_chunk(revised)[again]) == (2, 0)
    assert all(thread.is_alive() for thread in waiting)
    net.revise(late, revised)
    for node in (early, late):  # and what was lost at first comes again
        node.traffic.lane_failed(({early.peer, late.peer} - {node.peer}).pop())
        node.traffic.post_again(({early.peer, late.peer} - {node.peer}).pop())
    assert_exact(net, revised, given)
    assert dead.reduction is not None
    assert dead.reduction.final_chunks == 0


def test_frames_of_an_older_revision_are_good_still() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    revised = without(plan, 2)
    node, other, _ = net.nodes
    net.lose = lambda header: True
    begin_all(net, plan, given)
    posted = [frame for frame in net.frames if frame[0] == other.peer]
    net.revise(node, revised)
    net.lose = lambda header: False
    for sender, to, header, payload in posted:
        assert header.attempt == 0
        if to == node.peer:
            net.deliver(sender, to, header, payload)
    assert node.reduction is not None
    assert node.reduction.received_bytes[other.peer] == sum(len(p) for _, to, _, p in posted if to == node.peer)
    assert node.errors == []


def test_frames_of_a_past_lineage_are_dropped_at_once_even_of_a_newer_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "PLAN_WAIT_S", 1000.0)
    net, given = net_of(3), [contribution(n) for n in range(3)]
    node, other, _ = net.nodes
    first = plan_of(given, view=1)
    net.begin(node, first, given[0])
    net.begin(node, plan_of(given, view=2), given[0])
    straggler = msgspec.structs.replace(without(first, 2), view=3)  # a replaced lead still revises its plan
    assert straggler.lineage == first.hash
    for kind in PAYLOADS:
        assert_dropped_at_once(node, other.peer, header_of(straggler, kind, 0))


def test_frame_of_an_unknown_lineage_waits_at_the_same_seat_too() -> None:
    """Two plans can have one seat: that of a planner that died and forgot, and the one it made after that."""
    net, given = net_of(2), [contribution(0), contribution(1)]
    early, late = net.nodes
    plan = plan_of(given)
    forgotten = msgspec.structs.replace(plan, participants=plan.participants[::-1])
    late_first = net.begin(late, forgotten, given[1])
    net.begin(early, plan, given[0]).start()
    assert net.threads
    assert all(thread.is_alive() for thread in net.threads)
    net.begin(late, plan, given[1]).start()
    assert_exact(net, plan, given)
    assert late_first.received_bytes == {}


def test_revision_owes_the_evicted_nothing() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    node, other, dead = net.nodes
    net.cut = {(node.peer, dead.peer), (node.peer, other.peer)}
    net.begin(node, plan, given[0]).start()
    assert node.traffic.owed() == {other.peer, dead.peer}
    net.revise(node, without(plan, 2))
    assert node.traffic.owed() == {other.peer}
    node.traffic.lane_failed(dead.peer)
    assert node.traffic.owed() == {other.peer}


# -- lanes that fail -----------------------------------------------------------------------------------------


def test_what_no_lane_took_is_owed_and_sent_when_there_is_one() -> None:
    net, given = net_of(3), [contribution(n) for n in range(3)]
    plan = plan_of(given)
    first, second, _ = net.nodes
    net.cut = {(first.peer, second.peer)}
    begin_all(net, plan, given)
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
    lost: list[FrameHeader] = []

    def lose_some(header: FrameHeader) -> bool:
        if len(lost) < 2 and header.kind is FrameKind.CONTRIBUTION:
            lost.append(header)
            return True
        return False

    net.lose = lose_some
    begin_all(net, plan, given)
    net.join()
    assert len(lost) == 2
    assert not all(node.done.is_set() for node in net.nodes)
    for node in net.nodes:
        others = {n.peer for n in net.nodes} - {node.peer}
        for other in others:
            node.traffic.lane_failed(other)
        assert node.traffic.owed() == others
        for other in others:
            node.traffic.post_again(other)
        assert node.traffic.owed() == frozenset()
    assert_exact(net, plan, given)


def resume_all(net: Net, pairs: Sequence[tuple[int, int]], timeout_s: float = WAIT_S) -> None:
    """Each first of a pair has noticed that a lane to the second failed, and has a new one."""
    for one, other in pairs:
        net.nodes[one].traffic.lane_failed(net.nodes[other].peer)
    threads = [
        threading.Thread(target=net.nodes[one].traffic.resume, args=(net.nodes[other].peer, timeout_s))
        for one, other in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()


def lost_on_the_way(net: Net, plan: Plan, given: list[EncodedContribution]) -> list[tuple[FrameKind, int]]:
    """What the first of three sent to the second in vain: its contributions, and the last final that it owns."""
    sender, receiver = net.nodes[0].peer, net.nodes[1].peer
    lost: list[tuple[FrameKind, int]] = []
    mine = [chunk for chunk, owner in enumerate(owner_by_chunk(plan)) if owner == 0]
    original = net.deliver

    def deliver(source: PeerId, to: PeerId, header: FrameHeader, payload: bytes) -> None:
        wanted = header.kind is FrameKind.CONTRIBUTION or header.chunk == mine[-1]
        if (source, to) == (sender, receiver) and header.kind in PAYLOADS and wanted and not net.mended:
            lost.append((header.kind, header.chunk))
        else:
            original(source, to, header, payload)

    net.deliver = deliver  # type: ignore[method-assign]
    begin_all(net, plan, given)
    net.join()
    assert {kind for kind, _ in lost} == PAYLOADS
    net.mended = True
    net.frames.clear()
    return lost


@pytest.mark.parametrize("noticed", [[(0, 1), (1, 0)], [(0, 1)], [(1, 0)]], ids=["both", "sender", "receiver"])
def test_over_a_new_lane_only_what_lacks_is_sent_again(noticed: list[tuple[int, int]]) -> None:
    net, given = net_of(3), [contribution(n, LONG) for n in range(3)]
    plan = plan_of(given)
    lost = lost_on_the_way(net, plan, given)
    resume_all(net, noticed)
    assert_exact(net, plan, given)
    sender, receiver = net.nodes[0].peer, net.nodes[1].peer
    again = [(header.kind, header.chunk) for source, to, header, _ in net.frames if (source, to) == (sender, receiver)]
    again = [sent for sent in again if sent[0] in PAYLOADS]
    assert sorted(again) == sorted(lost)
    back = [header for source, to, header, _ in net.frames if (source, to) == (receiver, sender)]
    made = {chunk for kind, chunk in lost if kind is FrameKind.CONTRIBUTION}
    assert {h.chunk for h in back if h.kind in PAYLOADS} <= made, "of those chunks the finals come only now"
    assert net.nodes[0].traffic.owed() == net.nodes[1].traffic.owed() == frozenset()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_what_waits_for_a_lane_is_not_posted_again(told: bool) -> None:
    net, given = net_of(3), [contribution(n, LONG) for n in range(3)]
    plan = plan_of(given)
    sender, receiver = net.nodes[0].peer, net.nodes[1].peer
    net.queued[sender, receiver] = []
    begin_all(net, plan, given)
    net.join()
    posted = [header for header, _ in net.queued[sender, receiver]]
    assert {header.kind for header in posted} == PAYLOADS
    taken, net.queued[sender, receiver] = net.queued[sender, receiver][:2], net.queued[sender, receiver][2:]
    before = [(header.kind, header.chunk, header.offset) for header in posted]
    if not told:
        net.lose = lambda header: header.kind is FrameKind.LACKING
    resume_all(net, [(0, 1)], timeout_s=WAIT_S if told else 0.01)
    after = [(header.kind, header.chunk, header.offset) for header, _ in net.queued[sender, receiver]]
    lost = {(header.kind, header.chunk) for header, _ in taken}
    assert sorted(after) == sorted(
        [entry for entry in before[2:] if entry[:2] not in lost] + [entry for entry in before if entry[:2] in lost]
    )
    net.send_queued(sender, receiver)
    assert_exact(net, plan, given)


def test_who_does_not_tell_what_lacks_is_sent_everything() -> None:
    net, given = net_of(3), [contribution(n, LONG) for n in range(3)]
    plan = plan_of(given)
    lost = lost_on_the_way(net, plan, given)
    net.lose = lambda header: header.kind is FrameKind.LACKING
    resume_all(net, [(0, 1)], timeout_s=0.01)
    assert_exact(net, plan, given)
    sender, receiver = net.nodes[0].peer, net.nodes[1].peer
    again = {(header.kind, header.chunk) for source, to, header, _ in net.frames if (source, to) == (sender, receiver)}
    assert again > set(lost)


@pytest.mark.parametrize("size", [0, 1, 3, 1000])
def test_lacking_of_another_number_of_chunks_is_the_senders_fault(size: int) -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    plan = plan_of(given)
    net.begin(net.nodes[0], plan, given[0])
    header = replace(header_of(plan, FrameKind.LACKING, 0), length=size, total=0)
    with pytest.raises(RemoteError, match="what lacks"):
        net.nodes[0].traffic.received(net.nodes[1].peer, header, memoryview(bytes(size)))
    other = replace(header, scope=bytes(SCOPE_BYTES), round=0)
    net.nodes[0].traffic.received(net.nodes[1].peer, other, memoryview(bytes(size)))  # of the past: dropped


def test_failed_lane_to_who_was_sent_nothing_owes_nothing() -> None:
    net, given = net_of(2), [contribution(0), contribution(1)]
    net.begin(net.nodes[0], plan_of(given), given[0])
    net.nodes[0].traffic.lane_failed(peer(7))
    net.nodes[0].traffic.post_again(peer(7))
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
