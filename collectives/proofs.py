"""Proofs by arithmetic, and the evidence made of them: sums that are wrong, bytes that no encoder makes.

Decoding, aggregating and encoding are bit for bit the same on every machine, the bytes under a root are the only ones
there can be, and dither follows from the plan. So a result either is what its owner's statement says, everywhere, or it
is nowhere. Sums of squares are no part of that arithmetic: they may be off by SQUARES_TOLERANCE of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from shoal.collectives.aggregate import Aggregate, Term, chunk_scratch, combine
from shoal.collectives.codecs import U8, Codec, Undecodable, chunk_codec, final_chunk_codec
from shoal.collectives.commitment import bitmap_indices, chunk_hash, path_proves, path_top, root_over
from shoal.collectives.contribution import encoded_part, payload_bytes, sum_of_squares
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.protocol.commitments import Commitment, seal_of, squares_hash
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.evidence import (
    CopiedCommitment,
    UnsoundContribution,
    Verdict,
    WrongSum,
    digest_of,
    unpack,
)
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkStatement, Plan

SQUARES_TOLERANCE = 1e-6
"""Relative. Adding 2^24 squares in float64, in any order, is off by less than 2e-9."""


def verify_evidence(data: bytes, swarm: bytes) -> Verdict:
    """Check evidence and return what it proves about a peer of the swarm with this SwarmId.

    Raises RemoteError, saying why, if it proves nothing.
    """
    evidence, attachment = unpack(data)
    if evidence.base.swarm != swarm:
        raise RemoteError("evidence about another swarm")
    evidence.check_words()
    payload = np.frombuffer(attachment, np.uint8)
    if payload.size and not isinstance(evidence, UnsoundContribution | WrongSum):
        raise RemoteError("evidence with something attached that it does not need")
    try:
        if isinstance(evidence, CopiedCommitment):
            _check_copied(evidence)
        elif isinstance(evidence, UnsoundContribution):
            _check_unsound(evidence, payload)
        elif isinstance(evidence, WrongSum):
            _check_wrong_sum(evidence, payload)
    except (ConfigError, LocalError) as error:
        raise RemoteError(f"evidence that cannot be checked: {error}") from None
    kind = type(evidence).__name__.lower()
    return Verdict(digest=digest_of(data), kind=kind, accused=evidence.accused, done=evidence.done)


# --- sums ---


def split_payloads(plan: Plan, statement: ChunkStatement, payload: U8) -> dict[int, U8]:
    """The payloads of those whom the statement's bitmap names, by place. Raises RemoteError if lengths do not fit."""
    places = bitmap_indices(statement.bitmap, len(plan.participants))
    grid = Grid.of(plan)
    size = payload_bytes(grid, chunk_codec(plan.codec, grid, statement.chunk), statement.chunk)
    if payload.size != size * len(places):
        raise RemoteError("evidence with payloads of another size")
    edges = range(0, payload.size + 1, size)
    return {place: payload[start:stop] for place, (start, stop) in zip(places, pairwise(edges), strict=True)}


def recomputed(plan: Plan, chunk: int, owner: PeerId, encoded: Mapping[int, U8]) -> bytes | None:
    """The hash of what `owner` must have signed of a chunk made of these, by place; None if one does not decode."""
    grid = Grid.of(plan)
    terms = [
        Term(place, plan.participants[place].weight, encoded[place], plan.clip(place)) for place in sorted(encoded)
    ]
    mean = chunk_scratch(grid.length(chunk))
    _, undecodable = combine(chunk_codec(plan.codec, grid, chunk), terms, Aggregate.of(plan), mean)
    if undecodable:
        return None
    dither = Dither(plan.base, "final", owner).chunk(chunk)
    return chunk_hash(final_chunk_codec(plan.codec, grid, chunk).encode(mean, dither=dither).data)


def proves_itself(plan: Plan, place: int, chunk: int, payload: U8) -> U8 | None:
    """The encoded chunk in a participant's payload; None if that is not what the plan's root commits to."""
    grid = Grid.of(plan)
    how = chunk_codec(plan.codec, grid, chunk)
    if payload.size != payload_bytes(grid, how, chunk):
        return None
    return encoded_part(payload, grid=grid, codec=how, chunk=chunk, root=plan.participants[place].root)


def is_wrong(plan: Plan, statement: ChunkStatement, payloads: Mapping[int, U8]) -> bool:
    """True if the owner's statement differs from the result of these payloads, which are of all whom it names.

    Raises RemoteError if one of them is not the contribution that the plan names.
    """
    encoded: dict[int, U8] = {}
    for place, payload in payloads.items():
        if not plan.participants[place].weight:
            return True
        part = proves_itself(plan, place, statement.chunk, payload)
        if part is None:
            raise RemoteError(f"a payload that is not what participant {place} committed to")
        encoded[place] = part
    return recomputed(plan, statement.chunk, statement.owner, encoded) != statement.result


def _check_wrong_sum(evidence: WrongSum, payload: U8) -> None:
    plan, statement = evidence.plan, evidence.statement
    if not is_wrong(plan, statement, split_payloads(plan, statement, payload)):
        raise RemoteError("a sum that is right")


# --- contributions ---


def top_in(commitment: Commitment, chunk: int, payload: U8) -> bytes | None:
    """The hash right under a commitment's root, by one payload of its contribution; None if that is of another."""
    grid = Grid(commitment.numel, commitment.chunk_values)
    how = chunk_codec(commitment.codec, grid, chunk)
    if not 0 <= chunk < grid.chunks or payload.size != payload_bytes(grid, how, chunk):
        return None
    size = how.encoded_bytes(grid.length(chunk))
    top = path_top(chunk_hash(payload[:size].data), chunk, grid.chunks, payload[size:].tobytes())
    return top if top is not None and root_over(grid.chunks, top) == commitment.root else None


def is_unsound(commitment: Commitment, chunk: int, payload: U8, squares: Sequence[float]) -> bool:
    """True if a committed payload does not decode, or has another sum of squares than was committed to.

    Raises RemoteError if it is not what was committed to.
    """
    grid = Grid(commitment.numel, commitment.chunk_values)
    how = chunk_codec(commitment.codec, grid, chunk)
    if not 0 <= chunk < grid.chunks or payload.size != payload_bytes(grid, how, chunk):
        raise RemoteError("a payload of another size")
    size = how.encoded_bytes(grid.length(chunk))
    part, path = payload[:size], payload[size:].tobytes()
    if not path_proves(commitment.root, chunk_hash(part.data), chunk, grid.chunks, path):
        raise RemoteError("a payload that is not what was committed to")
    if squares and squares_hash(squares) != commitment.squares:
        raise RemoteError("sums of squares that were not committed to")
    try:
        how.check(part, grid.length(chunk))
    except Undecodable:
        return True
    return len(squares) == grid.chunks and not _is_close(squares[chunk], how, part, grid.length(chunk))


def _is_close(said: float, how: Codec, encoded: U8, n: int) -> bool:
    true = sum_of_squares(how, encoded, n)
    return abs(said - true) <= SQUARES_TOLERANCE * true


def _check_unsound(evidence: UnsoundContribution, payload: U8) -> None:
    if not is_unsound(evidence.commitment, evidence.chunk, payload, evidence.squares):
        raise RemoteError("a contribution that is sound")


def _check_copied(evidence: CopiedCommitment) -> None:
    commitment = evidence.commitment
    if root_over(Grid(commitment.numel, commitment.chunk_values).chunks, evidence.top) != commitment.root:
        raise RemoteError("a hash that is not the one under the root")
    if seal_of(evidence.top, commitment.peer) == commitment.seal:
        raise RemoteError("a commitment whose seal is right")
