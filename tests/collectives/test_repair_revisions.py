"""One revision after another: further losses, leads that do not know of each other, and what goes on meanwhile."""

from __future__ import annotations

import threading

import msgspec
import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.planning import PlanOrder, reroute_plan
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import WAIT_S, deliver, peer
from tests.collectives.repair_lab import chunks_of, running, running_without, sums, swarm_of, to_place

# --- more losses, and leads that do not know of each other ---


def test_chunk_whose_only_holder_dies_during_the_repair_is_summed_again() -> None:
    swarm = running((1, 2, 3, 4, 5))
    swarm.deliver(only=lambda p: p.sender != peer(4) or p.kind is FrameKind.CONTRIBUTION or p.to == peer(1))
    swarm.kill(4, loss=1.0)
    owned = chunks_of(swarm.plan, 4)
    plan = swarm.repair()
    assert [(results.place, set(results.by_chunk())) for results in plan.standing] == [(1, owned)]
    swarm.kill(1, loss=1.0)
    swarm.repair()
    swarm.deliver()
    finals = swarm.check()
    assert {chunk for chunk, count in sums(swarm).items() if count == 2} == owned
    assert all(finals.chunks[chunk].statement.owner not in (peer(1), peer(4)) for chunk in owned)
    assert all(finals.bitmaps[chunk] == b"\x0d" for chunk in owned)  # not of 1 and 4: they cannot be asked again


def test_copy_that_arrived_outlives_its_source() -> None:
    swarm = running((1, 2, 3, 4, 5))
    swarm.deliver(only=lambda p: p.sender != peer(4) or p.kind is FrameKind.CONTRIBUTION or p.to == peer(1))
    swarm.kill(4, loss=1.0)
    owned = chunks_of(swarm.plan, 4)
    swarm.repair()
    swarm.deliver(only=lambda p: p.to == peer(2))
    swarm.kill(1, loss=1.0)
    plan = swarm.repair()
    assert owned <= {chunk for results in plan.standing if results.place == 2 for chunk in results.by_chunk()}
    swarm.deliver()
    finals = swarm.check()
    assert {finals.chunks[chunk].statement.owner for chunk in owned} == {peer(4)}
    assert all(count == 1 for count in sums(swarm).values())


def test_owner_that_gets_a_chunk_back_posts_the_same_bytes() -> None:
    swarm, first, lost = running_without((1, 2, 3, 4), 3)
    swarm.repair(deal=to_place(0))
    swarm.deliver(only=lambda p: p.to == peer(0))
    assert {chunk for chunk, _, _ in swarm.nodes[0].identity.stated} == lost | chunks_of(first, 0)
    # The next lead knows the first plan alone, and nobody tells it of these finals.
    helds = {who: msgspec.structs.replace(held, chunks=()) for who, held in swarm.ask().items()}
    view = swarm.next_view(swarm.plan.view + 1, knows=first)
    between = swarm.revise(helds, (peer(3),), view=view, deal=to_place(1))
    for node in swarm.nodes[:2]:  # the third does not hear of it
        swarm.adopt(node, between)
    assert swarm.nodes[0].reduction.final_chunks == 10 - len(lost)
    swarm.deliver(only=lambda p: p.chunk not in lost)
    swarm.kill(1, loss=1.0)
    swarm.repair(deal=to_place(0))
    swarm.deliver()
    finals = swarm.check()
    assert {finals.chunks[chunk].statement.owner for chunk in lost} == {peer(0)}
    assert all(finals.bitmaps[chunk] == b"\x07" for chunk in lost)


def test_contribution_that_its_receiver_dropped_under_another_revision_is_sent_again() -> None:
    swarm, first, lost = running_without((1, 2, 3, 4), 3)
    one = swarm.revise(swarm.ask(), (peer(3),), view=swarm.living_view(0), deal=to_place(0))
    swarm.adopt(swarm.nodes[2], one)  # and node 2 sends to node 0, which does not hear of this plan
    helds, view = swarm.ask(), swarm.next_view(one.view + 1, knows=first)
    two = swarm.revise(helds, (peer(3),), view=view, deal=to_place(1))
    swarm.adopt(swarm.nodes[0], two)
    swarm.deliver()  # in vain: node 0 does not own these
    swarm.kill(1, loss=1.0)
    view = swarm.next_view(view + 1, knows=two)
    three = swarm.revise(swarm.ask(), (peer(1), peer(3)), view=view, deal=to_place(0))
    assert chunks_of(three, 0) >= lost
    for node in swarm.survivors():
        swarm.adopt(node, three)
    swarm.deliver()
    swarm.check()


def test_final_that_its_receiver_dropped_under_another_revision_is_sent_again() -> None:
    swarm, first, lost = running_without((1, 2, 3, 4), 3)
    one = swarm.repair(deal=to_place(0))
    swarm.deliver(only=lambda p: p.to == peer(0))
    assert swarm.nodes[0].reduction.final_chunks == 10
    view = swarm.next_view(one.view + 1, knows=first)
    two = swarm.revise({}, (peer(3),), view=view, deal=to_place(1))
    swarm.adopt(swarm.nodes[2], two)
    swarm.deliver(only=lambda p: p.to == peer(2))  # in vain: it looks to node 1 for these
    assert swarm.nodes[2].reduction.waiting_for().finals == {peer(1)}
    swarm.kill(1, loss=1.0)
    view = swarm.next_view(view + 1, knows=one)
    helds = swarm.ask()
    three = swarm.revise(helds, (peer(1), peer(3)), view=view)
    assert chunks_of(three, 0) >= lost
    assert not {chunk for results in three.standing for chunk in results.by_chunk()} & lost
    swarm.posted.clear()
    for number in (0, 2):
        swarm.adopt(swarm.nodes[number], three, helds)
    again = [p.chunk for p in swarm.posted if p.kind is FrameKind.FINAL and p.sender == peer(0) and p.chunk in lost]
    assert sorted(again) == sorted(lost)
    swarm.deliver()
    swarm.check()


# --- the order of things at one node ---


def test_repair_before_the_start_is_as_good() -> None:
    swarm = swarm_of((1, 2, 3, 4))
    swarm.start(0, 1)
    swarm.kill(3, loss=1.0)
    swarm.repair()
    swarm.start()
    swarm.deliver()
    finals = swarm.check()
    assert all(bits == b"\x07" for bits in finals.bitmaps)


def test_reduction_that_begins_with_a_revised_plan_gets_what_stands() -> None:
    swarm = swarm_of((1, 2, 0, 4))
    swarm.start(0, 1, 3)
    swarm.deliver(only=lambda p: p.to != peer(2))  # whose lanes wait for a plan
    swarm.kill(3, loss=1.0)
    helds = swarm.ask()
    plan = swarm.revise(helds, (peer(3),), view=swarm.living_view(0))
    assert {chunk for results in plan.standing for chunk in results.by_chunk()} == chunks_of(swarm.plans[0], 3)
    swarm.nodes[2] = swarm.fresh(2, plan)
    swarm.start(2)
    for node in swarm.survivors():
        swarm.adopt(node, plan, helds)
    swarm.deliver()
    swarm.check()


def test_signer_that_lost_its_memory_takes_its_own_final_back_and_does_not_sum_again() -> None:
    swarm = running((1, 2, 3, 4))
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    lost = chunks_of(swarm.plan, 3)
    first = swarm.plan
    swarm.repair(deal=to_place(1))
    swarm.deliver()
    # Node 1 lost everything, and the next lead knows the first plan alone.
    helds = {who: held for who, held in swarm.ask().items() if who != peer(1)}
    view = swarm.next_view(swarm.plan.view + 1, knows=first)
    plan = swarm.revise(helds, (peer(3),), view=view)
    assert {chunk for results in plan.standing for chunk in results.by_chunk()} == lost
    assert chunks_of(plan, 1) >= lost
    swarm.nodes[1] = back = swarm.fresh(1, plan)
    swarm.start(1)
    for node in (swarm.nodes[0], swarm.nodes[2]):
        swarm.adopt(node, plan, helds)
    # Its lanes failed under everyone, so it is sent everything again.
    swarm.pieces += [(p, 0, len(p.payload)) for p in swarm.posted if p.to == back.peer]
    swarm.deliver()
    finals = swarm.check()
    assert {finals.chunks[chunk].statement.owner for chunk in lost} == {back.peer}
    assert not {chunk for chunk, _, _ in back.identity.stated} & lost


@pytest.mark.parametrize("wrong", ["lineage", "evicted"])
def test_plan_that_does_not_revise_this_reduction_is_our_bug(wrong: str) -> None:
    swarm = running((1, 2, 3))
    plan = reroute_plan(swarm.plan, PlanOrder(view=9, attempt=0, planner=peer(0), evicted=()), ())
    if wrong == "lineage":
        plan = msgspec.structs.replace(plan, origin=bytes(31) + b"\x01")
    else:
        plan = msgspec.structs.replace(plan, evicted=(peer(0),))
    reduction = swarm.nodes[0].reduction
    for use in (reduction.follow, lambda plan: reduction.repair(plan, {})):
        with pytest.raises(LocalError, match="does not revise"):
            use(plan)
    assert reduction.plan == swarm.plan
    swarm.deliver()
    swarm.check()


def test_older_revision_changes_nothing() -> None:
    swarm = running((1, 2, 3, 4))
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    helds = swarm.ask()
    old = swarm.revise(helds, (peer(3),), view=swarm.living_view(0), deal=to_place(0))
    new = msgspec.structs.replace(swarm.revise(helds, (peer(3),), view=swarm.living_view(0)), attempt=old.attempt + 1)
    swarm.plans[-1] = new
    for node in swarm.survivors():
        swarm.adopt(node, new, helds)
        node.reduction.follow(old)
        node.reduction.repair(old, helds)
        assert node.reduction.plan == new
    swarm.deliver()
    swarm.check()


def test_closed_reduction_follows_nothing() -> None:
    swarm = running((1, 2, 3))
    swarm.kill(2, loss=1.0)
    reduction = swarm.nodes[0].reduction
    reduction.close()
    swarm.posted.clear()
    swarm.repair()
    assert [p for p in swarm.posted if p.sender == peer(0)] == []
    assert reduction.plan == swarm.plans[0]


def test_chunk_that_is_being_summed_when_the_plan_is_revised_is_summed_once() -> None:
    swarm = running((1, 1, 1))
    node, alone = swarm.nodes[0], {peer(0): swarm.nodes[0].reduction}
    chunk = min(chunks_of(swarm.plan, 0))
    given = [p for p in swarm.posted if (p.to, p.chunk) == (node.peer, chunk)]
    assert {p.sender for p in given} == {peer(1), peer(2)}
    deliver(alone, given[0])
    summing, go_on = node.identity.hold()
    lane = threading.Thread(target=deliver, args=(alone, given[1]))
    lane.start()
    assert summing.wait(WAIT_S)
    swarm.kill(2, loss=1.0)
    swarm.repair()
    for parcel in given:  # a lane was mended, and all of it comes again
        deliver(alone, parcel)
    assert node.reduction.final_chunks == 0
    go_on.set()
    lane.join(WAIT_S)
    swarm.deliver()
    finals = swarm.check()
    assert finals.bitmaps[chunk] == b"\x07"


def test_owner_that_lost_its_chunk_while_summing_it_keeps_the_sum_to_itself() -> None:
    swarm = running((1, 2, 3, 4))
    first = swarm.plan
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    chunk = min(chunks_of(first, 3))
    helds = swarm.ask()
    mine = swarm.revise(helds, (peer(3),), view=swarm.living_view(0), deal=to_place(0))
    for number in (1, 2):
        swarm.adopt(swarm.nodes[number], mine)
    node = swarm.nodes[0]
    summing, go_on = node.identity.hold()
    node.plan = mine
    node.reduction.follow(mine)
    given = [p for p in swarm.posted if (p.to, p.chunk, p.plan_order) == (node.peer, chunk, node.plan_order)]
    deliver({node.peer: node.reduction}, given[0])
    lane = threading.Thread(target=deliver, args=({node.peer: node.reduction}, given[1]))
    lane.start()
    assert summing.wait(WAIT_S)
    view = swarm.next_view(mine.view + 1, knows=first)
    theirs = swarm.revise(helds, (peer(3),), view=view, deal=to_place(1))
    swarm.posted.clear()
    swarm.adopt(node, theirs)
    go_on.set()
    lane.join(WAIT_S)
    assert [p for p in swarm.posted if p.kind is FrameKind.FINAL and p.chunk == chunk] == []
    for number in (1, 2):
        swarm.adopt(swarm.nodes[number], theirs)
    swarm.deliver()
    finals = swarm.check()
    assert finals.chunks[chunk].statement.owner == peer(1)
    assert chunk in {stated for stated, _, _ in node.identity.stated}


def test_owner_that_lost_its_chunk_while_posting_it_does_not_hold_it_final() -> None:
    swarm = running((1, 2, 3, 4))
    first, node = swarm.plan, swarm.nodes[0]
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    lost = chunks_of(first, 3)
    mine = swarm.repair(deal=to_place(0))
    view = swarm.next_view(mine.view + 1, knows=first)
    theirs = swarm.revise({}, (peer(3),), view=view, deal=to_place(1))
    swarm.on_post = lambda parcel: node.reduction.follow(theirs) if parcel.chunk in lost else None
    swarm.deliver(only=lambda p: p.to == node.peer)
    swarm.on_post = lambda parcel: None
    assert node.reduction.plan == theirs
    assert node.reduction.final_chunks == 10 - len(lost)
    for other in swarm.survivors():
        swarm.adopt(other, theirs)
    swarm.deliver()
    finals = swarm.check()
    assert {finals.chunks[chunk].statement.owner for chunk in lost} == {peer(1)}
