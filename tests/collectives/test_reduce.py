"""Reductions joined in memory: every delivery order, loss, tampering, and the reference to the bit."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.collectives.progress import Exclusion, Reason, ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.protocol.errors import LocalError, RemoteError
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import (
    CODECS,
    GRID,
    WAIT_S,
    Mesh,
    check_exact,
    crafted,
    deliver,
    encode,
    identity,
    make_plan,
    peer,
    values,
)

# --- exactness ---


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("seed", range(4))
def test_finals_equal_the_reference_in_any_delivery_order(name: str, seed: int) -> None:
    contributions = [encode(n, name) for n in range(4)]
    mesh = Mesh(make_plan(contributions, [3, 1, 1000, 7]), contributions)
    mesh.start()
    mesh.run(seed)
    check_exact(mesh)


@pytest.mark.parametrize("numel", [1, 4_999, 5_000, 5_001, 12_288])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_finals_are_exact_on_any_grid(numel: int, nodes: int) -> None:
    grid = Grid(numel, 5_000)  # with fewer chunks than nodes, too
    contributions = [encode(n, "int8", grid) for n in range(nodes)]
    mesh = Mesh(make_plan(contributions, [n + 1 for n in range(nodes)]), contributions)
    mesh.start()
    mesh.run(numel)
    check_exact(mesh)


def test_update_is_the_weighted_mean() -> None:
    weights = [3, 1, 0, 12]
    contributions = [encode(n, "fp32") for n in range(4)]
    mesh = Mesh(make_plan(contributions, weights), contributions)
    mesh.start()
    mesh.run(1)
    mean = sum(w * values(n).astype(np.float64) for n, w in enumerate(weights)) / sum(weights)
    np.testing.assert_allclose(check_exact(mesh).decoded(), mean, rtol=1e-6, atol=1e-4)


def test_start_in_the_middle_of_receiving_is_as_good() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 2, 3]), contributions)
    *early, late = mesh.reductions.values()
    for reduction in early:
        reduction.start()
    mesh.run(1)
    late.start()
    mesh.run(2)
    check_exact(mesh)


def test_weight_zero_counts_neither_in_the_sum_nor_in_the_divisor() -> None:
    contributions = [encode(0, "fp32"), encode(1, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [2, 0, 0]), contributions)
    mesh.start()
    sent = {p.sender for p in mesh.parcels if p.kind is FrameKind.CONTRIBUTION}
    assert sent == {peer(0)}
    mesh.run(3)
    finals = check_exact(mesh, [[0]] * GRID.chunks)
    assert finals.decoded().tobytes() == values(0).tobytes()  # (2·x)/2, exact
    assert (finals.tokens, finals.coverage) == (20, 1.0)


# --- bad contributions ---


def test_contribution_with_nan_is_left_out_of_that_chunk_only() -> None:
    contributions = [encode(n, "fp32") for n in range(3)]
    bad = values(1)[5_000:10_000].copy()
    bad[17] = np.nan
    contributions[1] = crafted(contributions[1], {1: bad.tobytes()}, commit=True)
    mesh = Mesh(make_plan(contributions, [1, 5, 2]), contributions)
    mesh.start()
    mesh.run(4)
    finals = check_exact(mesh, [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    assert finals.included(1) == (True, False, True, True, True)
    assert finals.coverage == 14 / 15
    owner = mesh.reductions[peer(0)].final_format.owner(1)
    told = [event.excluded for event in mesh.events[owner] if event.chunk == 1]
    assert told == [(Exclusion(peer(1), Reason.UNDECODABLE),)]


def test_contribution_that_differs_from_its_root_is_left_out() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    contributions[2] = crafted(contributions[2], {0: encode(5, "int8").encoded(0).tobytes()}, commit=False)
    mesh = Mesh(make_plan(contributions, [1, 5, 2]), contributions)
    mesh.start()
    mesh.run(4)
    check_exact(mesh, [[0, 1], *[[0, 1, 2]] * 4])
    owner = mesh.reductions[peer(0)].final_format.owner(0)
    excluded = [e for event in mesh.events[owner] for e in event.excluded]
    assert excluded == [Exclusion(peer(2), Reason.MISCOMMITTED)]


def test_chunk_nobody_contributed_to_is_a_zero_update() -> None:
    scale_nan = b"\x00\x00\xc0\x7f"
    contributions = [None, crafted(encode(1, "int8"), {0: scale_nan, 4: scale_nan}, commit=True), None]
    mesh = Mesh(make_plan(contributions, [0, 5, 0]), contributions)
    mesh.start()
    mesh.run(4)
    finals = check_exact(mesh, [[], [1], [1], [1], []])
    assert not finals.decoded()[:5_000].any()
    assert not finals.decoded()[20_000:].any()
    assert finals.tokens == 50


# --- loss ---


def test_replan_without_a_lost_member_is_exact_from_the_same_encodings() -> None:
    contributions = [encode(n, "int8") for n in range(4)]
    first = Mesh(make_plan(contributions, [1, 2, 3, 4]), contributions)
    first.start()
    dead = peer(2)
    first.run(1, drop=lambda parcel: parcel.sender == dead and parcel.chunk > 0)
    survivors = [n for n in range(4) if n != 2]
    for n in survivors:
        waiting = first.reductions[peer(n)].waiting_for()
        assert dead in waiting.contributions | waiting.finals
        with pytest.raises(LocalError):
            first.reductions[peer(n)].result()
        first.reductions[peer(n)].close()
    kept = [contributions[n] for n in survivors]
    second = Mesh(make_plan(kept, [1, 2, 4], nodes=survivors, attempt=1), kept)
    second.start()
    second.run(2)
    check_exact(second)


def test_closed_reduction_takes_and_posts_nothing() -> None:
    contributions = [encode(n, "int8") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    sender, receiver = mesh.reductions.values()
    sender.start()
    parcel = mesh.parcels[0]
    region = receiver.contribution_region(parcel.sender, parcel.chunk, 0, len(parcel.payload))
    assert region is not None
    receiver.close()
    receiver.close()
    region[:] = parcel.payload
    receiver.contribution_received(parcel.sender, parcel.chunk, 0, region)
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 0, 10) is None
    before = len(mesh.parcels)
    receiver.start()
    assert len(mesh.parcels) == before
    assert receiver.final_chunks == 0


# --- frames that should not be, or come twice ---


def test_region_of_bytes_that_are_there_already_is_refused() -> None:
    contributions = [encode(n, "fp32") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    parcel = next(p for p in mesh.parcels if p.sender == peer(0))
    receiver = mesh.reductions[parcel.to]
    deliver(mesh.reductions, parcel, 0, 1000)
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 200, 800) is None
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 200, 801) is not None
    assert receiver.received_bytes == {parcel.sender: 1000}
    mesh.run(1)
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 0, 1000) is None
    check_exact(mesh)
    sizes = [len(contributions[0].payload(chunk)) for chunk in range(3, 5)]
    sizes += [receiver.final_format.payload_bytes(chunk) for chunk in range(3)]
    assert receiver.received_bytes[parcel.sender] >= sum(sizes)  # a piece with other borders counts whole


def test_frames_that_no_revision_could_foresee_name_their_sender() -> None:
    contributions = [encode(0, "fp32"), encode(1, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 2, 0]), contributions)
    me, other, joiner, stranger = (peer(n) for n in range(4))
    reduction = mesh.reductions[me]
    mine = reduction.final_format.owners.index(0)
    theirs = reduction.final_format.owners.index(1)
    size = len(encode(0, "fp32").payload(mine))
    for sender, chunk, offset, length in (
        (stranger, mine, 0, 1),
        (joiner, mine, 0, 1),
        (me, mine, 0, 1),
        (other, 5, 0, 1),
        (other, -1, 0, 1),
        (other, mine, 0, size + 1),
        (other, mine, size, 1),
        (other, mine, -1, 2),
        (other, mine, 0, 0),
    ):
        with pytest.raises(RemoteError) as caught:
            reduction.contribution_region(sender, chunk, offset, length)
        assert caught.value.peer == sender
        if length > 0:
            with pytest.raises(RemoteError) as caught:
                reduction.contribution_received(sender, chunk, offset, memoryview(bytearray(length)))
            assert caught.value.peer == sender
    size = reduction.final_format.payload_bytes(theirs)
    for sender, chunk, offset, length in (
        (stranger, theirs, 0, 1),
        (me, mine, 0, 1),
        (other, 5, 0, 1),
        (other, -1, 0, 1),
        (other, theirs, 0, size + 1),
        (other, theirs, -1, 1),
        (other, theirs, 0, 0),
    ):
        with pytest.raises(RemoteError) as caught:
            reduction.final_region(sender, chunk, offset, length)
        assert caught.value.peer == sender
    assert reduction.received_bytes == {}


def test_frames_that_another_revision_may_foresee_are_dropped() -> None:
    contributions = [encode(0, "fp32"), encode(1, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 2, 0]), contributions)
    me, other, joiner = (peer(n) for n in range(3))
    reduction = mesh.reductions[me]
    mine = reduction.final_format.owners.index(0)
    theirs = reduction.final_format.owners.index(1)
    assert reduction.contribution_region(other, theirs, 0, 1) is None
    assert reduction.final_region(joiner, theirs, 0, 1) is None
    assert reduction.final_region(other, mine, 0, 1) is None
    reduction.contribution_received(other, theirs, 0, memoryview(b"x"))
    reduction.final_received(joiner, theirs, 0, memoryview(b"x"))
    assert reduction.received_bytes == {}


# --- progress ---


def test_progress_counts_each_chunk_once_and_ends_after_all_was_posted() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    plan = make_plan(contributions, [1, 2, 3])
    mesh = Mesh(plan, contributions)
    mesh.start()
    assert mesh.reductions[peer(0)].waiting_for().contributions == {peer(1), peer(2)}
    mesh.run(8)
    for node, events in mesh.events.items():
        assert [event.final for event in events] == [1, 2, 3, 4, 5]
        assert sorted(event.chunk for event in events) == [0, 1, 2, 3, 4]
        assert all(event.total == 5 and not event.excluded for event in events)
        waiting = mesh.reductions[node].waiting_for()
        assert not waiting.contributions
        assert not waiting.finals


def test_sending_order_takes_the_owners_in_turn_from_the_next_one_on() -> None:
    grid = Grid(60, 10)
    contributions = [encode(n, "fp32", grid) for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 1, 1]), contributions)
    mesh.reductions[peer(1)].start()
    assert [p.chunk for p in mesh.parcels] == [4, 0, 5, 1]


def test_blocking_in_on_progress_holds_all_that_a_node_sends() -> None:
    contributions = [encode(n, "int8") for n in range(2)]
    plan = make_plan(contributions, [1, 2])
    mesh = Mesh(plan, contributions)
    holder, sender = peer(0), peer(1)
    held, release = threading.Event(), threading.Event()

    def hold(event: ReduceProgress) -> None:
        if event.final == 1:
            held.set()
            assert release.wait(WAIT_S)
        mesh.events[holder].append(event)

    mesh.place(0, mesh.poster(holder), hold)
    mesh.start()
    work = [p for p in mesh.parcels if p.sender == sender]
    mesh.parcels = [p for p in mesh.parcels if p.sender != sender]
    assert len(work) == 3
    sent = len(mesh.parcels)
    threads = [threading.Thread(target=deliver, args=(mesh.reductions, p, 0, len(p.payload))) for p in work]
    threads[0].start()
    assert held.wait(WAIT_S)
    assert len(mesh.parcels) == sent + 1  # the final that made it hold is out, whole
    for thread in threads[1:]:
        thread.start()
    for thread in threads[1:]:
        thread.join(0.1)
        assert thread.is_alive()
    assert len(mesh.parcels) == sent + 1
    assert mesh.reductions[holder].final_chunks == 1
    release.set()
    for thread in threads:
        thread.join(WAIT_S)
    mesh.run(1)
    check_exact(mesh)
    assert [event.final for event in mesh.events[holder]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("wrong", ["root", "grid", "none", "stranger"])
def test_reduction_with_another_contribution_than_planned_is_our_bug(wrong: str) -> None:
    contributions = [encode(n, "int8") for n in range(2)]
    plan = make_plan(contributions, [1, 1])
    given: EncodedContribution | None = contributions[0]
    if wrong == "root":
        given = contributions[1]
    elif wrong == "grid":
        given = replace(contributions[0], grid=Grid(GRID.numel, 4_000))
    elif wrong == "none":
        given = None
    with pytest.raises(LocalError):
        Reduction(
            plan=plan,
            identity=identity(5 if wrong == "stranger" else 0),
            contribution=given,
            post=lambda to, kind, chunk, payload: None,
            on_progress=lambda event: None,
        )


def test_reference_refuses_what_does_not_fit_the_plan() -> None:
    plan = make_plan([encode(0, "fp32")], [1])
    with pytest.raises(LocalError):
        reference(plan, {}, [b"\1"])
    with pytest.raises(LocalError):
        wrong_values(np.zeros(2, np.float32), np.zeros(3, np.float32))
    assert wrong_values(np.zeros(2, np.float32), -np.zeros(2, np.float32)) == 2
