"""Reductions that lose participants: whatever is lost and whenever, survivors end with the same exact finals."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import Encoded
from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.collectives.partition import owner_by_chunk
from shoal.collectives.progress import ReduceProgress
from shoal.protocol.certificate import lead
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Held, OwnedRange, Plan
from shoal.protocol.planning import Deal, PlanSeat
from shoal.protocol.repair import reroute_plan
from shoal.swarm.frame import FrameKind
from tests.collectives.reduce_lab import CODECS, WAIT_S, Parcel, deliver, identity, peer
from tests.collectives.repair_lab import START, Swarm, swarm_of

SEEDS, BATCH = 300, 20
SOME_PIECES = 12


class Disaster:
    """A swarm that loses up to three, at any point, also while it is being repaired, and changes leads over it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        count = rng.randint(3, 6)
        weights = [rng.choice((1, 1, 2, 5, 1000)) for _ in range(count)]
        if rng.random() < 0.3:
            weights[rng.randrange(1, count)] = 0
        self.swarm: Swarm = swarm_of(weights, CODECS[seed % len(CODECS)], seed=seed)
        self.to_die = rng.randint(1, min(4, count - 2))
        self.view = self.swarm.living_view(0)

    def run(self) -> Swarm:
        swarm, rng = self.swarm, self.rng
        swarm.start(*(n for n in range(len(swarm.nodes)) if rng.random() < 0.8))
        swarm.deliver(rng.randrange(3 * SOME_PIECES * len(swarm.nodes)))
        self._kill()
        if self.to_die and rng.random() < 0.3:
            self._kill()
        while not self._repair():
            pass
        swarm.start()
        swarm.deliver()
        return swarm

    def _kill(self) -> None:
        victim = self.rng.choice(self.swarm.survivors())
        self.swarm.kill(victim.number, loss=self.rng.choice((0.0, 0.5, 1.0)))
        self.to_die -= 1

    def _trouble(self) -> bool:
        """Time passes; whether the lead has to begin anew."""
        swarm, rng = self.swarm, self.rng
        swarm.deliver(rng.randrange(SOME_PIECES))
        if self.to_die and rng.random() < 0.2:
            self._kill()
            return True
        if rng.random() < 0.15:
            self.view += 1
            return True
        return False

    def _repair(self) -> bool:
        """Whether everyone who lives followed the plan."""
        swarm = self.swarm
        self.view = view = swarm.living_view(self.view)
        evicted, helds = swarm.evicted(swarm.plans[0]), dict[PeerId, Held]()
        for node in swarm.shuffled():
            if self._trouble():
                return False
            helds[node.peer] = swarm.close_off(node, evicted)
        plan = swarm.revise(helds, evicted, view=view)
        lead = swarm.node_of(plan.planner)
        for node in [lead, *(node for node in swarm.shuffled() if node is not lead)]:
            swarm.adopt(node, plan, self._heard(helds))
            if self._trouble():
                return False
        return True

    def _heard(self, helds: Mapping[PeerId, Held]) -> dict[PeerId, Held]:
        return {who: held for who, held in helds.items() if self.rng.random() < 0.9}


@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_survivors_of_any_disaster_end_with_the_same_exact_finals(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        Disaster(seed).run().check()


def running(weights: tuple[int, ...]) -> Swarm:
    """A swarm where everyone has posted its contribution and nothing has arrived."""
    swarm = swarm_of(weights)
    swarm.start()
    return swarm


def chunks_of(plan: Plan, place: int) -> set[int]:
    return {chunk for chunk, owner in enumerate(owner_by_chunk(plan)) if owner == place}


def sums(swarm: Swarm) -> dict[int, int]:
    """How often each chunk was summed, by anybody."""
    return dict(Counter(chunk for node in swarm.nodes for chunk, _, _ in node.identity.stated))


# --- who is lost ---


def test_only_the_chunks_of_a_dead_owner_are_summed_again() -> None:
    swarm = running((3, 1, 1000, 7))
    swarm.deliver(only=lambda parcel: peer(2) not in (parcel.sender, parcel.to))
    swarm.kill(2, loss=1.0)
    before = swarm.plan
    plan = swarm.repair()
    swarm.deliver()
    finals = swarm.check()
    lost = chunks_of(before, 2)
    assert lost
    assert plan.standing == ()
    assert {chunk for chunk in range(10) if owner_by_chunk(before)[chunk] != owner_by_chunk(plan)[chunk]} == lost
    assert sums(swarm) == dict.fromkeys(range(10), 1)
    assert all(bits == b"\x0b" for bits in finals.bitmaps)
    assert (finals.coverage, finals.tokens) == (0.75, 110)


def test_contributions_of_the_dead_that_had_arrived_stay_in() -> None:
    swarm = running((3, 1, 1000, 7))
    half = {chunk for chunk in range(10) if chunk % 2}
    swarm.deliver(only=lambda p: peer(3) not in (p.sender, p.to) or (p.sender == peer(3) and p.chunk in half))
    swarm.kill(3, loss=1.0)
    swarm.repair()
    swarm.deliver()
    finals = swarm.check()
    own = chunks_of(swarm.plans[0], 3)
    assert own & half
    assert [bits[0] for bits in finals.bitmaps] == [15 if chunk in half - own else 7 for chunk in range(10)]
    assert sums(swarm) == dict.fromkeys(range(10), 1)


def test_contribution_of_which_the_dead_sent_only_a_part_is_left_out() -> None:
    swarm = running((1, 2, 3))
    swarm.pieces.clear()
    swarm.kill(2)
    parcel = next(p for p in swarm.posted if p.sender == peer(2) and p.to == peer(0))
    reductions = {node.peer: node.reduction for node in swarm.nodes}
    deliver(reductions, parcel, 0, len(parcel.payload) - 1)
    region = swarm.nodes[0].reduction.contribution_region(peer(2), parcel.chunk, len(parcel.payload) - 1, 1)
    assert region is not None
    swarm.pieces += [(p, 0, len(p.payload)) for p in swarm.posted if p.sender != peer(2)]
    swarm.repair()
    region[:] = parcel.payload[-1:]
    swarm.nodes[0].reduction.contribution_received(peer(2), parcel.chunk, len(parcel.payload) - 1, region)
    swarm.deliver()
    finals = swarm.check()
    assert all(bits == b"\x03" for bits in finals.bitmaps)


@pytest.mark.parametrize("name", CODECS)
def test_two_that_die_at_once_the_lead_among_them_cost_one_repair(name: str) -> None:
    swarm = swarm_of((5, 1, 2, 900, 77), name)
    swarm.start()
    swarm.deliver(60)
    lead = swarm.node_of(swarm.plan.planner).number
    swarm.kill(lead, loss=0.5)
    swarm.kill((lead + 2) % 5, loss=0.5)
    plan = swarm.repair()
    assert plan.view > swarm.plans[0].view
    assert len(plan.evicted) == 2
    swarm.deliver()
    swarm.check()


def test_two_survivors_of_which_one_contributes_nothing_are_enough() -> None:
    swarm = running((0, 4, 2))
    swarm.kill(2, loss=1.0)
    swarm.repair()
    swarm.deliver()
    finals = swarm.check()
    assert all(bits == b"\x02" for bits in finals.bitmaps)


# --- what stands ---


def test_finals_that_stand_are_copied_to_those_who_lack_them_and_to_nobody_else() -> None:
    swarm = running((1, 2, 3, 4, 5))
    swarm.deliver(only=lambda p: p.kind is FrameKind.CONTRIBUTION or p.sender != peer(4))
    owned = chunks_of(swarm.plan, 4)
    first, *_ = sorted(owned)
    # All of the dead owner's finals are with node 1, the first is with node 2 as well.
    swarm.deliver(only=lambda p: p.to == peer(1) or (p.to == peer(2) and p.chunk == first))
    swarm.kill(4, loss=1.0)
    stated = {node.number: list(node.identity.stated) for node in swarm.nodes}
    swarm.posted.clear()
    plan = swarm.repair()
    copies = {(p.sender, p.to, p.chunk) for p in swarm.posted}
    assert {chunk for results in plan.standing for chunk in results.by_chunk()} == owned
    sources = {swarm.nodes[results.place].peer for results in plan.standing}
    assert sources <= {peer(1), peer(2)}
    assert {(to, chunk) for _, to, chunk in copies} == {
        (peer(to), chunk) for to in (0, 2, 3) for chunk in owned if (to, chunk) != (2, first)
    }
    assert len(swarm.posted) == len(copies)
    swarm.deliver()
    finals = swarm.check()
    assert {node.number: node.identity.stated for node in swarm.nodes} == stated
    assert {finals.chunks[chunk].statement.owner for chunk in owned} == {peer(4)}


def test_what_everyone_holds_is_sent_to_nobody() -> None:
    swarm = running((1, 2, 3))
    swarm.deliver()
    complete = [node.events[-1] for node in swarm.nodes]
    swarm.kill(1)
    swarm.posted.clear()
    swarm.repair()
    assert swarm.posted == []
    finals = swarm.check()
    assert all(bits == b"\x07" for bits in finals.bitmaps)
    # Each says of the new plan too, once, that all is final.
    for node, before in zip(swarm.nodes, complete, strict=True):
        assert [e for e in node.events if e.final == e.total] == [before] + [complete_event()] * node.up


def complete_event() -> ReduceProgress:
    return ReduceProgress(final=10, total=10)


def test_final_of_the_evicted_that_arrives_after_the_close_off_is_not_taken() -> None:
    swarm = running((1, 2, 3, 4))
    dead = peer(3)
    swarm.deliver(only=lambda p: p.sender != dead or p.kind is FrameKind.CONTRIBUTION)
    swarm.kill(3)
    assert any(parcel.sender == dead for parcel, _, _ in swarm.pieces)
    before = {node.peer: node.reduction.final_chunks for node in swarm.survivors()}
    helds = swarm.ask()
    assert all(held.chunks == () for held in helds.values())
    late = [parcel for parcel, _, _ in swarm.pieces if parcel.sender == dead]
    swarm.deliver(only=lambda p: p.sender == dead)
    assert {node.peer: node.reduction.final_chunks for node in swarm.survivors()} == before
    plan = swarm.revise(helds, swarm.evicted(swarm.plan), view=swarm.living_view(0))
    for node in swarm.survivors():
        swarm.adopt(node, plan, helds)
    swarm.pieces += [(parcel, 0, len(parcel.payload)) for parcel in late]  # and once more
    swarm.deliver()
    finals = swarm.check()
    assert dead not in {chunk.statement.owner for chunk in finals.chunks}


def test_final_that_is_being_checked_while_its_owner_is_closed_off_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = running((1, 1, 1))
    swarm.deliver(only=lambda p: p.kind is FrameKind.CONTRIBUTION)
    node = swarm.nodes[0]
    final = next(p for p in swarm.posted if (p.to, p.sender, p.kind) == (peer(0), peer(2), FrameKind.FINAL))
    opened, closed, open_final = threading.Event(), threading.Event(), FinalFormat.open

    def open_and_wait(form: FinalFormat, chunk: int, data: Encoded) -> FinalChunk:
        found = open_final(form, chunk, data)
        opened.set()
        assert closed.wait(WAIT_S)
        return found

    monkeypatch.setattr(FinalFormat, "open", open_and_wait)
    before = node.reduction.final_chunks
    lane = threading.Thread(target=deliver, args=({node.peer: node.reduction}, final))
    lane.start()
    assert opened.wait(WAIT_S)
    assert swarm.close_off(node, (peer(2),)).chunks == ()
    closed.set()
    lane.join(WAIT_S)
    assert node.reduction.final_chunks == before
    assert swarm.close_off(node, (peer(2),)).chunks == ()


def test_final_of_the_owner_that_differs_from_the_one_that_stands_is_refused() -> None:
    swarm = running((1, 1, 1))
    swarm.deliver(only=lambda p: p.to != peer(1) or p.kind is FrameKind.CONTRIBUTION)
    swarm.kill(2, loss=1.0)
    plan = swarm.repair()
    assert {results.place for results in plan.standing} == {0}
    chunk = min(chunks_of(plan, 2))
    form = swarm.nodes[1].reduction.form
    other = form.sign(identity(2), chunk, np.zeros(form.grid.length(chunk), np.float32), [0, 1, 2])
    parcel = Parcel(peer(1), peer(0), FrameKind.FINAL, chunk, other.payload.tobytes())
    with pytest.raises(RemoteError, match="stands"):
        deliver({peer(1): swarm.nodes[1].reduction}, parcel)
    swarm.deliver()
    swarm.check()


def test_final_of_which_another_result_stands_is_given_up() -> None:
    swarm = running((1, 1, 1))
    swarm.deliver()
    swarm.kill(2)
    chunk = min(chunks_of(swarm.plan, 2))
    form = swarm.nodes[0].reduction.form
    zeros = np.zeros(form.grid.length(chunk), np.float32)
    other = form.sign(identity(2), chunk, zeros, [0, 1]).statement.result
    helds = swarm.ask()
    first = helds[peer(0)].chunks[0].by_chunk()
    for who in helds:
        changed = ChunkResults.of(2, first | {chunk: other})
        helds[who] = msgspec.structs.replace(helds[who], chunks=(changed,))
    plan = swarm.revise(helds, (peer(2),), view=swarm.living_view(0))
    for node in swarm.survivors():
        swarm.adopt(node, plan, helds)
        assert node.reduction.final_chunks == 9
        assert node.reduction.waiting_for().finals == {swarm.nodes[0].reduction.form.source(chunk)}
        with pytest.raises(LocalError, match="1 chunks are not final"):
            node.reduction.result()


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


def to_place(place: int) -> Deal:
    """Deals everything to one of those who remain."""
    return lambda rates, chunks: (OwnedRange(place, 0, chunks),)


def test_owner_that_gets_a_chunk_back_posts_the_same_bytes() -> None:
    swarm = running((1, 2, 3, 4))
    first = swarm.plan
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    lost = chunks_of(first, 3)
    swarm.repair(deal=to_place(0))
    swarm.deliver(only=lambda p: p.to == peer(0))
    assert {chunk for chunk, _, _ in swarm.nodes[0].identity.stated} == lost | chunks_of(first, 0)
    # The next lead knows the first plan alone, and nobody tells it of these finals.
    helds = {who: msgspec.structs.replace(held, chunks=()) for who, held in swarm.ask().items()}
    view = swarm.living_view(swarm.plan.view + 1)
    swarm.node_of(lead(START, view)).plan = first
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
    swarm = running((1, 2, 3, 4))
    first = swarm.plan
    swarm.deliver(only=lambda p: p.sender != peer(3))
    swarm.kill(3, loss=1.0)
    lost = chunks_of(first, 3)
    one = swarm.revise(swarm.ask(), (peer(3),), view=swarm.living_view(0), deal=to_place(0))
    swarm.adopt(swarm.nodes[2], one)  # and node 2 sends to node 0, which does not hear of this plan
    helds, view = swarm.ask(), swarm.living_view(one.view + 1)
    swarm.node_of(lead(START, view)).plan = first
    two = swarm.revise(helds, (peer(3),), view=view, deal=to_place(1))
    swarm.adopt(swarm.nodes[0], two)
    swarm.deliver()  # in vain: node 0 does not own these
    swarm.kill(1, loss=1.0)
    view = swarm.living_view(view + 1)
    swarm.node_of(lead(START, view)).plan = two
    three = swarm.revise(swarm.ask(), (peer(1), peer(3)), view=view, deal=to_place(0))
    assert chunks_of(three, 0) >= lost
    for node in swarm.survivors():
        swarm.adopt(node, three)
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
    view = swarm.living_view(swarm.plan.view + 1)
    swarm.node_of(lead(START, view)).plan = first
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
    plan = reroute_plan(swarm.plan, PlanSeat(view=9, attempt=0, planner=peer(0), evicted=()), ())
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
    swarm.deliver(only=lambda p: p.to != peer(0))
    node = swarm.nodes[0]
    chunk = min(chunks_of(swarm.plan, 0))
    at_sum, go_on = node.identity.hold()
    for piece in [piece for piece in swarm.pieces if piece[0].to == node.peer and piece[0].chunk != chunk]:
        swarm.pieces.remove(piece)
    work = [p for p in swarm.posted if (p.to, p.kind, p.chunk) == (node.peer, FrameKind.CONTRIBUTION, chunk)]
    swarm.pieces.clear()
    deliver({node.peer: node.reduction}, work[0])
    lane = threading.Thread(target=deliver, args=({node.peer: node.reduction}, work[1]))
    lane.start()
    assert at_sum.wait(WAIT_S)
    swarm.kill(2)
    swarm.repair()
    missing = [p for p in swarm.posted if p.to == node.peer and p.kind is FrameKind.CONTRIBUTION and p not in work]
    swarm.pieces += [(p, 0, len(p.payload)) for p in missing if p.sender == peer(1)]
    deliver({node.peer: node.reduction}, work[0])  # a lane was mended: it comes again
    deliver({node.peer: node.reduction}, work[1])
    assert node.reduction.final_chunks == 0
    go_on.set()
    lane.join(WAIT_S)
    swarm.pieces += [(p, 0, len(p.payload)) for p in swarm.posted if p.kind is FrameKind.FINAL and p.sender != peer(2)]
    swarm.deliver()
    finals = swarm.check()
    assert finals.bitmaps[chunk] == b"\x07"
