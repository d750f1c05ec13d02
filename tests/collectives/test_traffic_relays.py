"""Frames of two that cannot reach each other: passed on by a third as the plan says, and by nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.collectives.traffic import PASS_ON, PASSED_ON, PAYLOADS, Routes
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Relay
from shoal.protocol.planning import PlanOrder, reroute_plan
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameKind
from tests.collectives.reduce_lab import peer
from tests.collectives.traffic_lab import (
    Net,
    Node,
    assert_exact,
    begin_all,
    contribution,
    header_of,
    net_of,
    plan_of,
    results,
)


def apart(net: Net, *pairs: tuple[int, int]) -> None:
    """No lane joins these."""
    net.cut |= {(peer(a), peer(b)) for a, b in pairs} | {(peer(b), peer(a)) for a, b in pairs}


def rerouted(plan: Plan, *relays: Relay) -> Plan:
    plan_order = PlanOrder(view=plan.view, attempt=plan.attempt + 1, planner=plan.planner, evicted=())
    return reroute_plan(plan, plan_order, relays)


def hops(net: Net) -> set[tuple[PeerId, PeerId, int]]:
    """(sender, receiver, flags) of all frames."""
    return {(sender, to, header.flags) for sender, to, header, _ in net.frames}


def four(*relays: Relay, grid: Grid | None = None) -> tuple[Net, list[EncodedContribution], Plan]:
    """Four nodes, each the owner of a chunk, and their plan."""
    given = [contribution(n, grid or Grid(4 * 1000, 1000)) for n in range(4)]
    return net_of(4), given, plan_of(given, relays=relays)


def mend(nodes: Sequence[Node]) -> None:
    """Send what is owed, as far as there are lanes."""
    for node in nodes:
        for owed in node.traffic.owed():
            node.traffic.post_again(owed)


# -- as the plan says ----------------------------------------------------------------------------------------


def test_contributions_and_finals_of_a_pair_go_through_its_relay() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1))
    begin_all(net, plan, given)
    assert_exact(net, plan, given)
    relayed = {(s, to, f) for s, to, f in hops(net) if f}
    assert relayed == {
        (peer(0), peer(2), PASS_ON | 1),
        (peer(2), peer(1), PASSED_ON | 0),
        (peer(1), peer(2), PASS_ON | 0),
        (peer(2), peer(0), PASSED_ON | 1),
    }
    for flags in (PASS_ON | 1, PASSED_ON | 0, PASS_ON | 0, PASSED_ON | 1):
        assert {header.kind for _, _, header, _ in net.frames if header.flags == flags} == PAYLOADS
    assert [node.traffic.owed() for node in net.nodes] == [frozenset()] * 4


def test_payload_of_many_frames_is_passed_on_frame_by_frame() -> None:
    values = FRAME_LIMIT_BYTES + 10_000  # of a byte each
    net, given, plan = four(Relay(0, 1, 3), grid=Grid(4 * values, values))
    apart(net, (0, 1))
    begin_all(net, plan, given)
    assert_exact(net, plan, given)
    offsets = {header.offset for _, _, header, _ in net.frames if header.flags == PASSED_ON | 0}
    assert offsets == {0, FRAME_LIMIT_BYTES}


def test_two_pairs_can_be_relays_for_each_other() -> None:
    net, given, plan = four(Relay(0, 1, 2), Relay(2, 3, 1))
    apart(net, (0, 1), (2, 3))
    begin_all(net, plan, given)
    assert_exact(net, plan, given)
    assert {(peer(2), peer(1), PASS_ON | 3), (peer(2), peer(1), PASSED_ON | 0)} <= hops(net)


def test_contribution_that_a_relay_altered_is_left_out() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1))
    net.alter = lambda header, data: (
        bytes(len(data)) if (header.flags, header.kind) == (PASSED_ON | 0, FrameKind.CONTRIBUTION) else data
    )
    begin_all(net, plan, given)
    finals = results(net.nodes)
    net.join()
    assert len({one.concatenated() for one in finals}) == 1
    assert [bits[0] for bits in finals[0].bitmaps] == [15, 14, 15, 15]


# -- what no plan provides for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "sender", "flags"),
    [
        (2, 0, PASS_ON | 3),  # 2 passes frames of 0 on, but to 1 alone
        (2, 3, PASS_ON | 1),  # and to 1 those of 0 alone
        (2, 0, PASS_ON | 2),  # not to itself
        (2, 0, PASS_ON | 0),  # nor back
        (2, 0, PASS_ON | 63),
        (3, 0, PASS_ON | 1),  # 3 is nobody's relay
        (1, 3, PASSED_ON | 0),  # what comes from 0 comes through 2
        (1, 2, PASSED_ON | 3),  # and from 0 alone
        (1, 2, PASSED_ON | 2),
        (1, 2, PASSED_ON | 1),
        (1, 2, PASSED_ON | 9),
        (3, 2, PASSED_ON | 0),
    ],
)
def test_relayed_frame_that_the_plan_does_not_provide_for_is_the_senders_fault(
    at: int, sender: int, flags: int
) -> None:
    net, given, plan = four(Relay(0, 1, 2))
    net.begin(net.nodes[at], plan, given[at])
    traffic = net.nodes[at].traffic
    for kind in PAYLOADS:
        header = replace(header_of(plan, kind, at), flags=flags)
        with pytest.raises(RemoteError, match="does not provide") as caught:
            traffic.region(peer(sender), header)
        assert caught.value.peer == peer(sender)
        with pytest.raises(RemoteError, match="does not provide") as caught:
            traffic.received(peer(sender), header, memoryview(bytearray(header.length)))
        assert caught.value.peer == peer(sender)
    assert net.frames == []


def test_relay_of_an_earlier_revision_is_none_any_more() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    node = net.nodes[2]
    size = net.begin(node, plan, given[2]).final_format.payload_bytes(0)
    header = replace(header_of(plan, FrameKind.FINAL, 0), flags=PASS_ON | 1, total=size, length=size)
    assert node.traffic.region(peer(0), header) is not None
    net.revise(node, rerouted(plan, Relay(0, 1, 3)))
    # On its way when the revision came: nobody's fault. Sent under the new one: the sender's.
    assert node.traffic.region(peer(0), header) is None
    sent = len(net.frames)
    node.traffic.received(peer(0), header, memoryview(bytearray(header.length)))
    assert len(net.frames) == sent
    with pytest.raises(RemoteError, match="does not provide"):
        node.traffic.region(peer(0), replace(header, attempt=1))


# -- relays that fail ----------------------------------------------------------------------------------------


def test_what_went_through_a_relay_is_owed_again_when_its_lane_fails() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1))
    lost: list[int] = []
    net.lose = lambda header: header.flags == PASS_ON | 1 and len(lost) < 1 and lost.append(header.chunk) is None
    begin_all(net, plan, given)
    net.join()
    assert len(lost) == 1
    assert not net.nodes[1].done.is_set()
    node = net.nodes[0]
    node.traffic.lane_failed(peer(1))  # there is none
    assert node.traffic.owed() == frozenset()
    node.traffic.lane_failed(peer(2))
    assert node.traffic.owed() == {peer(1), peer(2)}
    assert {node.traffic.next_hop(peer(n)) for n in (1, 2)} == {peer(2)}
    mend(net.nodes)
    assert_exact(net, plan, given)


def test_relay_whose_lane_comes_late_passes_on_what_came_before_it() -> None:
    """Nobody else sends it again, and where three are all there are, there is no other relay."""
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1), (1, 2))
    net.cut.discard((peer(1), peer(2)))
    begin_all(net, plan, given)
    net.join()
    relay = net.nodes[2].traffic
    assert peer(1) in relay.owed()
    held = relay.holding.held_bytes
    assert held > 0
    relay.post_again(peer(1))
    assert (peer(1) in relay.owed(), relay.holding.held_bytes) == (True, held), "there is none yet"
    net.cut.discard((peer(2), peer(1)))
    while any(node.traffic.owed() for node in net.nodes):
        mend(net.nodes)
        net.join()
    assert_exact(net, plan, given)
    assert relay.holding.held_bytes == 0


@pytest.mark.parametrize("end", ["over", "evicted"])
def test_what_waits_for_a_lane_to_pass_it_on_is_forgotten_with_its_purpose(end: str) -> None:
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1), (1, 2))
    begin_all(net, plan, given)
    net.join()
    relay = net.nodes[2].traffic
    assert relay.holding.held_bytes > 0
    if end == "over":
        relay.end()
    else:
        revised = msgspec.structs.replace(plan, attempt=1, origin=plan.hash, evicted=(peer(1),))
        relay.revise(revised, Routes(revised, peer(2)))
    assert peer(1) not in relay.owed()
    assert relay.holding.held_bytes == 0


def test_relay_that_cannot_pass_on_is_replaced_and_everything_is_sent_again() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    apart(net, (0, 1), (1, 2))
    net.cut.discard((peer(1), peer(2)))
    begin_all(net, plan, given)
    net.join()
    assert not net.nodes[1].done.is_set()
    assert net.nodes[2].errors == []
    revised = rerouted(plan, Relay(0, 1, 3), Relay(1, 2, 3))
    net.cut.add((peer(1), peer(2)))
    for node in net.nodes:
        net.revise(node, revised)
    assert net.nodes[0].traffic.owed() == {peer(1)}
    assert net.nodes[1].traffic.owed() == {peer(0), peer(2)}
    assert net.nodes[2].traffic.owed() == {peer(1)}
    assert net.nodes[3].traffic.owed() == frozenset()
    net.frames.clear()
    mend(net.nodes)
    assert_exact(net, revised, given)
    assert {header.attempt for _, _, header, _ in net.frames} == {1}


def test_relay_that_a_revision_gives_to_who_were_cut_off_carries_what_they_lack() -> None:
    net, given, plan = four()
    apart(net, (0, 1))
    begin_all(net, plan, given)
    net.join()
    assert net.nodes[0].traffic.owed() == {peer(1)}
    revised = rerouted(plan, Relay(0, 1, 3))
    for node in net.nodes:
        net.revise(node, revised)
    mend(net.nodes)
    assert_exact(net, revised, given)
    assert [node.traffic.owed() for node in net.nodes] == [frozenset()] * 4


def test_pair_that_reaches_each_other_again_needs_no_relay() -> None:
    net, given, plan = four(Relay(0, 1, 2))
    net.lose = lambda header: bool(header.flags)
    begin_all(net, plan, given)
    net.join()
    revised = rerouted(plan)
    for node in net.nodes:
        net.revise(node, revised)
    net.frames.clear()
    assert net.nodes[0].traffic.owed() == {peer(1)}
    mend(net.nodes)
    assert_exact(net, revised, given)
    assert {header.flags for _, _, header, _ in net.frames} == {0}
    assert {(sender, to) for sender, to, _, _ in net.frames} >= {(peer(0), peer(1)), (peer(1), peer(0))}
