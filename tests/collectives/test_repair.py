"""Reductions that lose participants: what is lost, what stands, and what is taken from whom."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import Encoded
from shoal.collectives.finals import FinalChunk, FinalFormat, UnsoundFinal
from shoal.collectives.partition import owner_by_chunk
from shoal.collectives.progress import ReduceProgress, Waiting
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import ChunkResults
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import CODECS, WAIT_S, Parcel, deliver, identity, peer
from tests.collectives.repair_lab import Node, Swarm, chunks_of, running, sums, swarm_of

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
    swarm.deliver(only=lambda p: p.sender == peer(3) and p.chunk in half)
    swarm.kill(3, loss=1.0)
    assert sums(swarm) == {}
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


def test_final_that_is_being_read_while_its_owner_is_closed_off_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = running((1, 1, 1))
    swarm.deliver(only=lambda p: p.kind is FrameKind.CONTRIBUTION)
    node = swarm.nodes[0]
    final = next(p for p in swarm.posted if (p.to, p.sender, p.kind) == (peer(0), peer(2), FrameKind.FINAL))
    read, closed, read_final = threading.Event(), threading.Event(), FinalFormat.read

    def read_and_wait(final_format: FinalFormat, chunk: int, data: Encoded) -> FinalChunk:
        found = read_final(final_format, chunk, data)
        read.set()
        assert closed.wait(WAIT_S)
        return found

    monkeypatch.setattr(FinalFormat, "read", read_and_wait)
    before = node.reduction.final_chunks
    lane = threading.Thread(target=deliver, args=({node.peer: node.reduction}, final))
    lane.start()
    assert read.wait(WAIT_S)
    assert swarm.close_off(node, (peer(2),)).chunks == ()
    closed.set()
    lane.join(WAIT_S)
    assert node.reduction.final_chunks == before
    assert swarm.close_off(node, (peer(2),)).chunks == ()


# --- what is copied from others than its owner ---


def lacking_finals_of(number: int, *, at: int) -> tuple[Swarm, list[FinalChunk]]:
    """Everyone has all finals but one node, which lacks those of this owner; and these, as the others have them."""
    swarm = running((1, 2, 3, 4))
    swarm.deliver(only=lambda p: (p.sender, p.to, p.kind) != (peer(number), peer(at), FrameKind.FINAL))
    lacking = sorted(swarm.nodes[at].reduction.lacking(peer(number))[1])
    assert lacking == sorted(chunks_of(swarm.plan, number))
    assert swarm.nodes[at].reduction.waiting_for().finals == {peer(number)}
    other = next(node for node in swarm.nodes if node.number not in (number, at)).reduction.result()
    final_format = swarm.nodes[at].reduction.final_format
    return swarm, [final_format.open(chunk, other.chunks[chunk].payload.copy()) for chunk in lacking]


def completions(node: Node) -> int:
    return sum(progress.final == progress.total for progress in node.events)


def test_copies_of_finals_count_as_if_their_owner_had_sent_them() -> None:
    swarm, copies = lacking_finals_of(2, at=1)
    node = swarm.nodes[1]
    swarm.kill(2, loss=1.0)
    for final in copies:
        assert completions(node) == 0
        node.reduction.take_copy(final)
    assert completions(node) == 1
    assert node.reduction.verify() == []
    assert node.reduction.waiting_for() == Waiting(contributions=frozenset(), finals=frozenset())
    finals = swarm.check()
    assert {final.owner for final in copies} == {peer(2)}
    assert node.reduction.result().concatenated() == finals.concatenated()


def test_copy_of_a_final_that_came_meanwhile_changes_nothing() -> None:
    swarm, copies = lacking_finals_of(2, at=1)
    swarm.deliver()
    before = swarm.nodes[1].reduction.result()
    for final in copies:
        swarm.nodes[1].reduction.take_copy(final)
    after = swarm.nodes[1].reduction.result()
    assert all(ours is theirs for ours, theirs in zip(after.chunks, before.chunks, strict=True))
    assert completions(swarm.nodes[1]) == 1
    swarm.check()


def test_copy_of_what_the_evicted_owned_is_not_taken_after_the_close_off() -> None:
    """Who said that it does not hold a final may not have it counted later, wherever it comes from."""
    swarm, copies = lacking_finals_of(2, at=1)
    reduction = swarm.nodes[1].reduction
    swarm.kill(2, loss=1.0)
    assert swarm.close_off(swarm.nodes[1], (peer(2),)).chunks == ()
    before = reduction.final_chunks
    for final in copies:
        reduction.take_copy(final)
    assert reduction.final_chunks == before


def test_copy_from_another_lineage_is_not_taken() -> None:
    swarm, copies = lacking_finals_of(2, at=1)
    before = swarm.nodes[1].reduction.final_chunks
    for final in copies:
        swarm.nodes[1].reduction.take_copy(replace(final, lineage=bytes(32)))
    assert swarm.nodes[1].reduction.final_chunks == before


def test_copy_that_comes_while_another_final_of_the_chunk_is_refused_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner sends and what others have may differ; nothing is waited for that is there."""
    swarm, copies = lacking_finals_of(2, at=1)
    reduction, final = swarm.nodes[1].reduction, copies[0]
    read = FinalFormat.read

    def read_and_refuse(final_format: FinalFormat, chunk: int, data: Encoded) -> FinalChunk:
        reduction.take_copy(final)
        raise UnsoundFinal("is nonsense", chunk=chunk, owner=read(final_format, chunk, data).owner)

    monkeypatch.setattr(FinalFormat, "read", read_and_refuse)
    of_owner = next(p for p in swarm.posted if (p.sender, p.to, p.chunk) == (peer(2), peer(1), final.chunk))
    with pytest.raises(UnsoundFinal):
        deliver({peer(1): reduction}, of_owner)
    assert final.chunk not in reduction.lacking(peer(2))[1]
    assert reduction._finals[final.chunk] is final


# --- what is not what its owner signed ---


def test_final_that_its_owner_did_not_sign_is_not_told() -> None:
    swarm = running((1, 1, 1))
    swarm.deliver(only=lambda p: p.kind is FrameKind.CONTRIBUTION)
    swarm.kill(2, loss=1.0)
    good, *_ = (p for p in swarm.posted if (p.to, p.sender, p.kind) == (peer(0), peer(2), FrameKind.FINAL))
    altered = bytes([good.payload[0] ^ 1]) + good.payload[1:]
    deliver({peer(0): swarm.nodes[0].reduction}, replace(good, payload=altered))
    taken = swarm.nodes[0].reduction.final_chunks
    helds = swarm.ask()
    assert helds[peer(0)].chunks == ()
    assert swarm.nodes[0].reduction.final_chunks == taken - 1
    swarm.repair()
    swarm.deliver()
    finals = swarm.check()
    assert finals.chunks[good.chunk].statement.owner != peer(2)


def test_final_of_the_owner_that_differs_from_the_one_that_stands_is_refused() -> None:
    swarm = running((1, 1, 1))
    swarm.deliver(only=lambda p: p.to != peer(1) or p.kind is FrameKind.CONTRIBUTION)
    swarm.kill(2, loss=1.0)
    plan = swarm.repair()
    assert {results.place for results in plan.standing} == {0}
    chunk = min(chunks_of(plan, 2))
    final_format = swarm.nodes[1].reduction.final_format
    other = final_format.sign(identity(2), chunk, np.zeros(final_format.grid.length(chunk), np.float32), [0, 1, 2])
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
    final_format = swarm.nodes[0].reduction.final_format
    zeros = np.zeros(final_format.grid.length(chunk), np.float32)
    other = final_format.sign(identity(2), chunk, zeros, [0, 1]).statement.result
    helds = swarm.ask()
    first = helds[peer(0)].chunks[0].by_chunk()
    for who in helds:
        changed = ChunkResults.of(2, first | {chunk: other})
        helds[who] = msgspec.structs.replace(helds[who], chunks=(changed,))
    plan = swarm.revise(helds, (peer(2),), view=swarm.living_view(0))
    for node in swarm.survivors():
        swarm.adopt(node, plan, helds)
        assert node.reduction.final_chunks == 9
        assert node.reduction.waiting_for().finals == {swarm.nodes[0].reduction.final_format.source(chunk)}
        with pytest.raises(LocalError, match="1 chunks are not final"):
            node.reduction.result()
