"""Reductions joined in memory: what they post waits until a test delivers it, in any order, in pieces, some twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shoal.collectives.codecs import DENSE, F32
from shoal.collectives.commitment import MerkleTree, bitmap, chunk_hash
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Post, Reduction
from shoal.collectives.reference import reference, wrong_values
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, Participant, Plan
from shoal.swarm.lanes.frame import FrameKind
from tests.round_messages import plan_with

GRID = Grid(23_457, 5_000)  # five chunks, the last ragged; two int8 blocks in each
CODECS = (*DENSE, "topk64-256")
WAIT_S = 60.0


@lru_cache
def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32)


def peer(n: int) -> PeerId:
    return identity(n).peer_id


def values(n: int, grid: Grid = GRID) -> F32:
    """Of very different magnitudes per node, so that the order of additions shows."""
    return (np.random.default_rng(n).standard_normal(grid.numel) * 10.0 ** (n % 4)).astype(np.float32)


@lru_cache(maxsize=256)
def encode(n: int, name: str, grid: Grid = GRID) -> EncodedContribution:
    dither = Dither(NO_HASH, "contribution", peer(n))
    return EncodedContribution.encode(values(n, grid), grid, name, dither=dither)


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
    return replace(changed, root=tree.root, top=tree.top)


def make_plan(
    contributions: Sequence[EncodedContribution | None],
    weights: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    base: bytes = NO_HASH,
    attempt: int = 0,
) -> Plan:
    """The plan over `nodes` (numbers of identities), in that order."""
    nodes = range(len(weights)) if nodes is None else nodes
    grid, name = next((c.grid, c.codec) for c in contributions if c)
    peers = [peer(node) for node in nodes]
    return plan_with(
        (
            Participant(peer, weight, 10 * weight, contribution.root if contribution and weight else NO_HASH)
            for peer, weight, contribution in zip(peers, weights, contributions, strict=True)
        ),
        grid,
        base=base,
        attempt=attempt,
        codec=name,
    )


@dataclass(frozen=True)
class Parcel:
    """One posted payload. `plan_order`: (view, attempt) of the revision under which it was sent."""

    to: PeerId
    sender: PeerId
    kind: FrameKind
    chunk: int
    payload: bytes
    plan_order: tuple[int, int] = (0, 0)


Piece = tuple[Parcel, int, int]
"""The bytes from start to stop, exclusive, of a parcel."""


def cut(parcel: Parcel, rng: random.Random) -> list[Piece]:
    """Pieces that cover a parcel, sometimes one too many."""
    size = len(parcel.payload)
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(rng.randrange(3)))})
    spans = list(pairwise(cuts))
    if rng.random() < 0.3:  # sent again after a broken lane, with other borders
        start, stop = sorted((rng.randrange(size), rng.randrange(size)))
        spans.append((start, stop + 1))
    return [(parcel, start, stop) for start, stop in spans]


def deliver(reductions: Mapping[PeerId, Reduction], parcel: Parcel, start: int = 0, stop: int | None = None) -> None:
    """What a lane does with a frame."""
    reduction = reductions[parcel.to]
    stop = len(parcel.payload) if stop is None else stop
    contribution = parcel.kind is FrameKind.CONTRIBUTION
    where = reduction.contribution_region if contribution else reduction.final_region
    region = where(parcel.sender, parcel.chunk, start, stop - start)
    if region is not None:
        region[:] = parcel.payload[start:stop]
        done = reduction.contribution_received if contribution else reduction.final_received
        done(parcel.sender, parcel.chunk, start, region)


@dataclass
class Mesh:
    """Reductions of one plan in one process; what they post waits in `parcels` until it is delivered."""

    plan: Plan
    contributions: Sequence[EncodedContribution | None]
    parcels: list[Parcel] = field(default_factory=list)
    events: dict[PeerId, list[ReduceProgress]] = field(default_factory=dict)
    reductions: dict[PeerId, Reduction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for n in range(8):
            if self.plan.number(peer(n)) is not None:
                self.events[peer(n)] = []
                self.place(n, self.poster(peer(n)), self.events[peer(n)].append)

    def place(self, n: int, post: Post, on_progress: Callable[[ReduceProgress], None]) -> None:
        """Give node `n` a fresh reduction."""
        place = self.plan.number(peer(n))
        assert place is not None
        self.reductions[peer(n)] = Reduction(
            plan=self.plan,
            identity=identity(n),
            contribution=self.contributions[place],
            post=post,
            on_progress=on_progress,
        )

    def poster(self, sender: PeerId) -> Post:
        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            self.parcels.append(Parcel(to, sender, kind, chunk, bytes(payload)))

        return post

    def start(self) -> None:
        for reduction in self.reductions.values():
            reduction.start()

    def run(self, seed: int, *, drop: Callable[[Parcel], bool] = lambda parcel: False) -> None:
        """Deliver everything in an order drawn from `seed`: late, interleaved, in pieces, some of it twice."""
        rng = random.Random(seed)
        pieces: list[Piece] = []
        while self.parcels or pieces:
            while self.parcels:
                parcel = self.parcels.pop()
                if not drop(parcel):
                    pieces += cut(parcel, rng)
            if pieces:
                deliver(self.reductions, *pieces.pop(rng.randrange(len(pieces))))

    def finals(self) -> list[Finals]:
        return [reduction.result() for reduction in self.reductions.values()]


def by_peer(plan: Plan, contributions: Sequence[EncodedContribution | None]) -> dict[PeerId, bytes]:
    """What an audit is given of everyone's contribution."""
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
        assert wrong_values(finals.decoded(), want.update) == 0
    return mesh.finals()[0]
