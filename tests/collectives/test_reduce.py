"""Reductions joined in memory: every delivery order, loss, tampering, and the reference to the bit."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.commitment import MerkleTree, bitmap, chunk_hash
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, apply_finals, nesterov_step
from shoal.collectives.partition import deal
from shoal.collectives.reduce import Exclusion, Reason, ReduceProgress, Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.collectives.state import CertifiedState, frozen, header_of
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, ChunkStatement, Participant, Plan, Term
from shoal.swarm.frame import FrameKind

GRID = Grid(23_457, 5_000)  # five chunks, the last ragged; two int8 blocks in each
CODECS = ("fp32", "bf16", "int8")
WAIT_S = 20.0


def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32)


def values(n: int, grid: Grid = GRID) -> F32:
    """Of very different magnitudes per node, so that the order of additions shows."""
    return (np.random.default_rng(n).standard_normal(grid.numel) * 10.0 ** (n % 4)).astype(np.float32)


def crafted(good: EncodedContribution, changes: Mapping[int, bytes], *, commit: bool) -> EncodedContribution:
    """`good` with the bytes of some chunks replaced; `commit` says whether the root is of the new bytes."""
    buffer = np.array(good.buffer)
    for chunk, data in changes.items():
        buffer[good.offsets[chunk] : good.offsets[chunk] + len(data)] = np.frombuffer(data, np.uint8)
    changed = replace(good, buffer=buffer)
    if not commit:
        return changed
    tree = MerkleTree([chunk_hash(changed.encoded(chunk).tobytes()) for chunk in range(good.grid.chunks)])
    for chunk in range(good.grid.chunks):
        path = tree.path(chunk)
        buffer[good.offsets[chunk + 1] - len(path) : good.offsets[chunk + 1]] = np.frombuffer(path, np.uint8)
    return replace(changed, root=tree.root)


def make_plan(
    contributions: Sequence[EncodedContribution | None],
    weights: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    attempt: int = 0,
) -> Plan:
    """The plan over `nodes` (numbers of identities), in that order."""
    nodes = range(len(weights)) if nodes is None else nodes
    grid, name = next((c.grid, c.codec.name) for c in contributions if c)
    peers = [identity(node).peer_id for node in nodes]
    return Plan(
        term=Term(),
        round=1,
        base=NO_HASH,
        view=0,
        attempt=attempt,
        planner=peers[0],
        participants=tuple(
            Participant(peer, weight, 10 * weight, contribution.root if contribution else NO_HASH)
            for peer, weight, contribution in zip(peers, weights, contributions, strict=True)
        ),
        owners=deal([(0, 0)] * len(peers), grid.chunks),
        codec=name,
        numel=grid.numel,
        chunk_values=grid.chunk_values,
    )


@dataclass(frozen=True)
class Parcel:
    to: PeerId
    sender: PeerId
    kind: FrameKind
    chunk: int
    payload: bytes


@dataclass
class Mesh:
    """Reductions of one plan in one process; what they post waits in `parcels` until it is delivered."""

    plan: Plan
    contributions: Sequence[EncodedContribution | None]
    parcels: list[Parcel] = field(default_factory=list)
    events: dict[PeerId, list[ReduceProgress]] = field(default_factory=dict)
    reductions: dict[PeerId, Reduction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_peer = {identity(n).peer_id: identity(n) for n in range(8)}
        for participant, contribution in zip(self.plan.participants, self.contributions, strict=True):
            peer = participant.peer
            self.events[peer] = []
            self.reductions[peer] = Reduction(
                plan=self.plan,
                identity=by_peer[peer],
                contribution=contribution,
                post=self.poster(peer),
                on_progress=self.events[peer].append,
                clock=lambda: 5.0,
            )

    def poster(self, sender: PeerId) -> Callable[[PeerId, FrameKind, int, memoryview], None]:
        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            self.parcels.append(Parcel(to, sender, kind, chunk, bytes(payload)))

        return post

    def start(self) -> None:
        for reduction in self.reductions.values():
            reduction.start()

    def run(self, seed: int, *, drop: Callable[[Parcel], bool] = lambda parcel: False) -> None:
        """Deliver everything in an order drawn from `seed`: late, interleaved, in pieces, some of it twice."""
        rng = random.Random(seed)
        pieces: list[tuple[Parcel, int, int]] = []
        while self.parcels or pieces:
            while self.parcels:
                parcel = self.parcels.pop()
                if not drop(parcel):
                    pieces += cut(parcel, rng)
            if pieces:
                deliver(self.reductions, *pieces.pop(rng.randrange(len(pieces))))

    def finals(self) -> list[Finals]:
        return [reduction.result() for reduction in self.reductions.values()]


def cut(parcel: Parcel, rng: random.Random) -> list[tuple[Parcel, int, int]]:
    size = len(parcel.payload)
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(rng.randrange(3)))})
    spans = list(pairwise(cuts))
    if rng.random() < 0.3:  # sent again after a broken lane, with other borders
        start, stop = sorted((rng.randrange(size), rng.randrange(size)))
        spans.append((start, stop + 1))
    return [(parcel, start, stop) for start, stop in spans]


def deliver(reductions: Mapping[PeerId, Reduction], parcel: Parcel, start: int, stop: int) -> None:
    reduction = reductions[parcel.to]
    contribution = parcel.kind is FrameKind.CONTRIBUTION
    where = reduction.contribution_region if contribution else reduction.final_region
    region = where(parcel.sender, parcel.chunk, start, stop - start)
    if region is not None:
        region[:] = parcel.payload[start:stop]
        done = reduction.contribution_received if contribution else reduction.final_received
        done(parcel.sender, parcel.chunk, start, region)


def encode(n: int, name: str, grid: Grid = GRID) -> EncodedContribution:
    return EncodedContribution.encode(values(n, grid), grid, name)


def by_peer(plan: Plan, contributions: Sequence[EncodedContribution | None]) -> dict[PeerId, bytes]:
    return {p.peer: c.concatenated() for p, c in zip(plan.participants, contributions, strict=True) if c}


def check_exact(mesh: Mesh, included: Sequence[Sequence[int]] | None = None) -> Finals:
    """All nodes hold the reference's finals and update, bit for bit, and who is in them is who should be."""
    plan = mesh.plan
    names = [plan.contributors()] * plan.chunks if included is None else included
    bitmaps = [bitmap(who, len(plan.participants)) for who in names]
    want = reference(plan, by_peer(plan, mesh.contributions), bitmaps)
    for events in mesh.events.values():
        assert [event.final for event in events] == list(range(1, plan.chunks + 1))
    for finals in mesh.finals():
        assert finals.bitmaps == tuple(bitmaps)
        assert finals.concatenated() == want.finals
        assert wrong_values(finals.update, want.update) == 0
    return mesh.finals()[0]


# --- exactness ---


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("seed", range(4))
def test_finals_equal_the_reference_in_any_delivery_order(name: str, seed: int) -> None:
    contributions = [encode(n, name) for n in range(4)]
    mesh = Mesh(make_plan(contributions, [3, 1, 1000, 7]), contributions)
    mesh.start()
    mesh.run(seed)
    check_exact(mesh)


@pytest.mark.parametrize("name", CODECS)
def test_finals_are_the_same_bits_in_all_delivery_orders(name: str) -> None:
    contributions = [encode(n, name) for n in range(5)]
    plan = make_plan(contributions, [5, 11, 2, 900, 77])
    results = set()
    for seed in range(6):
        mesh = Mesh(plan, contributions)
        mesh.start()
        mesh.run(seed)
        results |= {(f.concatenated(), f.update.tobytes(), f.bitmaps_root) for f in mesh.finals()}
    assert len(results) == 1


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
    np.testing.assert_allclose(check_exact(mesh).update, mean, rtol=1e-6, atol=1e-4)


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
    assert sent == {identity(0).peer_id}
    mesh.run(3)
    finals = check_exact(mesh, [[0]] * GRID.chunks)
    assert finals.update.tobytes() == values(0).tobytes()  # (2·x)/2, exact
    assert (finals.tokens, finals.coverage) == (20, 1.0)


@pytest.mark.parametrize("name", CODECS)
def test_threads_reduce_to_the_same_bits(name: str) -> None:
    contributions = [encode(n, name) for n in range(4)]
    mesh = Mesh(make_plan(contributions, [4, 3, 2, 1]), contributions)
    inboxes: dict[PeerId, queue.SimpleQueue[tuple[Parcel, int, int] | None]] = {}
    finished = {peer: threading.Event() for peer in mesh.reductions}
    rng = random.Random(9)

    def post_from(sender: PeerId) -> Callable[[PeerId, FrameKind, int, memoryview], None]:
        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            for piece in cut(Parcel(to, sender, kind, chunk, bytes(payload)), rng):
                inboxes[to].put(piece)

        return post

    def progress_of(peer: PeerId) -> Callable[[ReduceProgress], None]:
        def on_progress(event: ReduceProgress) -> None:
            mesh.events[peer].append(event)
            if event.final == event.total:
                finished[peer].set()

        return on_progress

    def lane(peer: PeerId) -> None:
        while (piece := inboxes[peer].get()) is not None:
            deliver(mesh.reductions, *piece)

    threads = []
    for n, contribution in enumerate(contributions):
        peer = identity(n).peer_id
        inboxes[peer] = queue.SimpleQueue()
        mesh.reductions[peer] = Reduction(
            plan=mesh.plan,
            identity=identity(n),
            contribution=contribution,
            post=post_from(peer),
            on_progress=progress_of(peer),
        )
        threads += [threading.Thread(target=lane, args=(peer,)) for _ in range(3)]
        threads.append(threading.Thread(target=mesh.reductions[peer].start))
    for thread in threads:
        thread.start()
    arrived = all(event.wait(WAIT_S) for event in finished.values())
    for inbox in inboxes.values():
        for _ in range(3):
            inbox.put(None)
    for thread in threads:
        thread.join(WAIT_S)
    assert arrived
    check_exact(mesh)


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
    owner = mesh.reductions[identity(0).peer_id].form.owner(1)
    told = [event.excluded for event in mesh.events[owner] if event.chunk == 1]
    assert told == [(Exclusion(identity(1).peer_id, Reason.UNDECODABLE),)]


def test_contribution_that_differs_from_its_root_is_left_out() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    contributions[2] = crafted(contributions[2], {0: encode(5, "int8").encoded(0).tobytes()}, commit=False)
    mesh = Mesh(make_plan(contributions, [1, 5, 2]), contributions)
    mesh.start()
    mesh.run(4)
    check_exact(mesh, [[0, 1], *[[0, 1, 2]] * 4])
    owner = mesh.reductions[identity(0).peer_id].form.owner(0)
    excluded = [e for event in mesh.events[owner] for e in event.excluded]
    assert excluded == [Exclusion(identity(2).peer_id, Reason.MISCOMMITTED)]


def test_chunk_nobody_contributed_to_is_a_zero_update() -> None:
    scale_nan = b"\x00\x00\xc0\x7f"
    contributions = [None, crafted(encode(1, "int8"), {0: scale_nan, 4: scale_nan}, commit=True), None]
    mesh = Mesh(make_plan(contributions, [0, 5, 0]), contributions)
    mesh.start()
    mesh.run(4)
    finals = check_exact(mesh, [[], [1], [1], [1], []])
    assert not finals.update[:5_000].any()
    assert not finals.update[20_000:].any()
    assert finals.tokens == 50


# --- finals ---


def one_final() -> tuple[Mesh, Parcel]:
    """A mesh of two where everything has arrived but node 0's finals at node 1; and the first of these."""
    contributions = [encode(n, "fp32") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    held: list[Parcel] = []

    def hold(parcel: Parcel) -> bool:
        keep = parcel.kind is FrameKind.FINAL and parcel.sender == identity(0).peer_id
        held.extend([parcel] * keep)
        return keep

    mesh.run(1, drop=hold)
    mesh.parcels += held[1:]
    return mesh, held[0]


@pytest.mark.parametrize("at", [0, 100, -1, -64, -65])  # value, value, signature twice, bitmap
def test_final_that_was_tampered_with_is_refused_and_still_wanted(at: int) -> None:
    mesh, parcel = one_final()
    changed = bytearray(parcel.payload)
    changed[at] ^= 1
    with pytest.raises(RemoteError, match="signed") as caught:
        deliver(mesh.reductions, replace(parcel, payload=bytes(changed)), 0, len(changed))
    assert caught.value.peer == identity(0).peer_id
    receiver = mesh.reductions[parcel.to]
    assert identity(0).peer_id in receiver.waiting_for().finals
    deliver(mesh.reductions, parcel, 0, len(parcel.payload))
    mesh.run(2)
    check_exact(mesh)


def test_final_signed_over_nan_is_refused() -> None:
    mesh, parcel = one_final()
    encoded, bits = bytearray(parcel.payload[:-65]), parcel.payload[-65:-64]
    encoded[:4] = b"\x00\x00\x80\x7f"
    statement = ChunkStatement.sign(
        identity(0), plan=mesh.plan.hash, chunk=parcel.chunk, bitmap=bits, result=chunk_hash(encoded)
    )
    data = bytes(encoded) + bits + statement.signature
    with pytest.raises(RemoteError, match="NaN, infinity") as caught:
        deliver(mesh.reductions, replace(parcel, payload=data), 0, len(data))
    assert caught.value.peer == identity(0).peer_id


def test_final_that_includes_who_does_not_contribute_is_refused() -> None:
    contributions = [encode(0, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 0]), contributions)
    form = mesh.reductions[identity(1).peer_id].form
    for included in ([1], [0, 1]):
        final = form.sign(identity(0), 0, np.zeros(5_000, np.float32), included)
        parcel = Parcel(identity(1).peer_id, identity(0).peer_id, FrameKind.FINAL, 0, final.payload.tobytes())
        with pytest.raises(RemoteError, match="does not contribute"):
            deliver(mesh.reductions, parcel, 0, len(parcel.payload))


def test_final_of_another_plan_or_chunk_is_refused() -> None:
    mesh, parcel = one_final()
    other = make_plan(mesh.contributions, [1, 2], attempt=1)
    stale = Mesh(other, mesh.contributions)
    with pytest.raises(RemoteError, match="signed"):
        deliver(stale.reductions, parcel, 0, len(parcel.payload))
    with pytest.raises(RemoteError, match="signed"):
        deliver(mesh.reductions, replace(parcel, chunk=(parcel.chunk + 1) % 3), 0, len(parcel.payload))


def test_finals_can_be_opened_again_from_kept_payloads() -> None:
    contributions = [encode(n, "bf16") for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 2, 3]), contributions)
    mesh.start()
    mesh.run(1)
    finals = mesh.finals()[0]
    payloads = [chunk.payload.tobytes() for chunk in finals.chunks]
    again = Finals.open(mesh.plan, payloads)
    assert again.update.tobytes() == finals.update.tobytes()
    assert again.bitmaps_root == finals.bitmaps_root
    with pytest.raises(RemoteError):
        Finals.open(mesh.plan, [payloads[1], payloads[0], *payloads[2:]])
    with pytest.raises(RemoteError):
        Finals.open(mesh.plan, payloads[:-1])


# --- loss and repair ---


def test_replan_without_a_lost_member_is_exact_from_the_same_encodings() -> None:
    contributions = [encode(n, "int8") for n in range(4)]
    first = Mesh(make_plan(contributions, [1, 2, 3, 4]), contributions)
    first.start()
    dead = identity(2).peer_id
    first.run(1, drop=lambda parcel: parcel.sender == dead and parcel.chunk > 0)
    survivors = [n for n in range(4) if n != 2]
    for n in survivors:
        waiting = first.reductions[identity(n).peer_id].waiting_for()
        assert dead in waiting.contributions | waiting.finals
        with pytest.raises(LocalError):
            first.reductions[identity(n).peer_id].result()
        first.reductions[identity(n).peer_id].close()
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
    parcel = next(p for p in mesh.parcels if p.sender == identity(0).peer_id)
    receiver = mesh.reductions[parcel.to]
    deliver(mesh.reductions, parcel, 0, 1000)
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 200, 800) is None
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 200, 801) is not None
    progress = receiver.progress_by_peer[parcel.sender]
    assert (progress.received_bytes, progress.last_s) == (1000, 5.0)
    mesh.run(1)
    assert receiver.contribution_region(parcel.sender, parcel.chunk, 0, 1000) is None
    check_exact(mesh)
    progress = receiver.progress_by_peer[parcel.sender]
    assert progress.received_bytes >= progress.expected_bytes  # a piece with other borders counts whole


def test_lane_that_hangs_while_writing_cannot_touch_what_another_delivered() -> None:
    contributions = [encode(n, "fp32") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    parcel = next(p for p in mesh.parcels if p.sender == identity(0).peer_id)
    hanging = mesh.reductions[parcel.to].contribution_region(parcel.sender, parcel.chunk, 0, 4000)
    assert hanging is not None
    deliver(mesh.reductions, parcel, 0, 4000)
    hanging[:] = b"\xff" * 4000  # plaintext that will fail authentication
    mesh.run(1)
    check_exact(mesh)


def test_frames_that_the_plan_does_not_foresee_name_their_sender() -> None:
    contributions = [encode(0, "fp32"), encode(1, "fp32"), None]
    mesh = Mesh(make_plan(contributions, [1, 2, 0]), contributions)
    me, other, joiner, stranger = (identity(n).peer_id for n in range(4))
    reduction = mesh.reductions[me]
    mine = reduction.form.owners.index(0)
    theirs = reduction.form.owners.index(1)
    size = len(contributions[0].payload(mine)) if contributions[0] else 0
    for sender, chunk, offset, length in (
        (stranger, mine, 0, 1),
        (joiner, mine, 0, 1),
        (me, mine, 0, 1),
        (other, theirs, 0, 1),
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
    size = reduction.form.payload_bytes(theirs)
    for sender, chunk, offset, length in (
        (stranger, theirs, 0, 1),
        (joiner, theirs, 0, 1),
        (me, mine, 0, 1),
        (other, 5, 0, 1),
        (other, theirs, 0, size + 1),
        (other, theirs, -1, 1),
        (other, theirs, 0, 0),
    ):
        with pytest.raises(RemoteError) as caught:
            reduction.final_region(sender, chunk, offset, length)
        assert caught.value.peer == sender


# --- progress ---


def test_progress_counts_each_chunk_once_and_ends_after_all_was_posted() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    plan = make_plan(contributions, [1, 2, 3])
    mesh = Mesh(plan, contributions)
    mesh.start()
    assert mesh.reductions[identity(0).peer_id].waiting_for().contributions == {
        identity(1).peer_id,
        identity(2).peer_id,
    }
    mesh.run(8)
    for peer, events in mesh.events.items():
        assert [event.final for event in events] == [1, 2, 3, 4, 5]
        assert sorted(event.chunk for event in events) == [0, 1, 2, 3, 4]
        assert all(event.total == 5 and not event.excluded for event in events)
        waiting = mesh.reductions[peer].waiting_for()
        assert not waiting.contributions
        assert not waiting.finals


def test_sending_order_takes_the_owners_in_turn_from_the_next_one_on() -> None:
    grid = Grid(60, 10)
    contributions = [encode(n, "fp32", grid) for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 1, 1]), contributions)
    mesh.reductions[identity(1).peer_id].start()
    assert [p.chunk for p in mesh.parcels] == [4, 0, 5, 1]


def test_blocking_in_on_progress_holds_all_that_a_node_sends() -> None:
    contributions = [encode(n, "int8") for n in range(2)]
    plan = make_plan(contributions, [1, 2])
    mesh = Mesh(plan, contributions)
    holder, sender = identity(0).peer_id, identity(1).peer_id
    held, release = threading.Event(), threading.Event()

    def hold(event: ReduceProgress) -> None:
        if event.final == 1:
            held.set()
            assert release.wait(WAIT_S)
        mesh.events[holder].append(event)

    mesh.reductions[holder] = Reduction(
        plan=plan,
        identity=identity(0),
        contribution=contributions[0],
        post=mesh.poster(holder),
        on_progress=hold,
    )
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


# --- applying ---


def start_state(round_: int = 0) -> CertifiedState:
    rng = np.random.default_rng(99)
    anchor, momentum = (frozen(rng.standard_normal(GRID.numel).astype(np.float32)) for _ in range(2))
    return CertifiedState(term=Term(), round=round_, tokens=70, layout_hash=bytes(32), anchor=anchor, momentum=momentum)


def test_apply_finals_gives_all_nodes_one_digest_and_the_plain_step() -> None:
    contributions = [encode(n, "int8") for n in range(3)]
    mesh = Mesh(make_plan(contributions, [1, 2, 3]), contributions)
    mesh.start()
    mesh.run(5)
    settings, before = OuterSettings(lr=0.7, momentum=0.9), start_state()
    applied = [apply_finals(before, finals, settings) for finals in mesh.finals()]
    assert len({header_of(state, GRID).digest for state, _ in applied}) == 1
    after, update = applied[0]
    anchor, momentum = np.empty(GRID.numel, np.float32), np.empty(GRID.numel, np.float32)
    nesterov_step(before.anchor, before.momentum, update, settings, anchor, momentum)
    assert after.anchor.tobytes() == anchor.tobytes()
    assert after.momentum.tobytes() == momentum.tobytes()
    assert (after.round, after.tokens) == (1, 70 + 60)
    assert before.anchor.tobytes() == start_state().anchor.tobytes()


def test_apply_finals_of_another_round_is_our_bug() -> None:
    contributions = [encode(0, "fp32")]
    mesh = Mesh(make_plan(contributions, [1]), contributions)
    mesh.start()
    with pytest.raises(LocalError):
        apply_finals(start_state(1), mesh.finals()[0], OuterSettings())


def test_reference_refuses_what_does_not_fit_the_plan() -> None:
    plan = make_plan([encode(0, "fp32")], [1])
    with pytest.raises(LocalError):
        reference(plan, {}, [b"\1"])
    with pytest.raises(LocalError):
        wrong_values(np.zeros(2, np.float32), np.zeros(3, np.float32))
    assert wrong_values(np.zeros(2, np.float32), -np.zeros(2, np.float32)) == 2
