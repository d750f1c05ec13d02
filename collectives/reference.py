"""The plain way to compute a round, for audits: slow, short, and sharing no arithmetic with the reduce.

Given what every contributor committed to and who was included in which chunk, it says what the finals and the applied
update must be, to the bit: decode(encode(plan-order weighted mean of the decoded contributions)), each multiplied by
weight and clip, and counted with its weight; or what another aggregate of the plan makes of them (`aggregate`). Of
buffers nothing is clipped, and their mean is worked out in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import msgspec
import numpy as np

from shoal.collectives.adamw import NORM_SPAN_VALUES
from shoal.collectives.aggregate import Aggregate
from shoal.collectives.codecs import F32, Encoded, chunk_codec, final_chunk_codec
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import CLIP_UNIT, Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """finals: all encoded chunks, joined in order. update: (numel,) float32, decoded from them."""

    finals: bytes
    update: F32


def reference(plan: Plan, contributions: Mapping[PeerId, Encoded], bitmaps: Sequence[bytes]) -> Reference:
    """Compute the result that `plan` must lead to.

    contributions: per contributor all its encoded chunks, joined in order (`EncodedContribution.concatenated`).
    bitmaps: per chunk, bit i set for participant i; a participant of weight zero does not count even if named.

    Raises LocalError if they do not fit the plan, Undecodable if an included contribution does not decode.
    """
    if len(bitmaps) != plan.chunks:
        raise LocalError(f"{len(bitmaps)} bitmaps for {plan.chunks} chunks")
    grid = Grid.of(plan)
    finals, updates, at = [], [], 0
    for chunk in range(plan.chunks):
        how, how_final = chunk_codec(plan.codec, grid, chunk), final_chunk_codec(plan.codec, grid, chunk)
        length = grid.length(chunk)
        size = how.encoded_bytes(length)
        present: list[tuple[int, int, F32]] = []  # weight, clip, values
        for place, participant in enumerate(plan.participants):
            named = int.from_bytes(bitmaps[chunk], "little") >> place & 1
            if not named or participant.weight == 0:
                continue
            values = np.empty(length, np.float32)
            how.decode_into(contributions[participant.peer][at : at + size], values)
            present.append((participant.weight, plan.clip(place), values))
        mean = _mean_of_buffers(plan, present, length) if how.plain else _aggregate(plan, present, length)
        owner = next(owned.owner for owned in plan.owners if owned.start <= chunk < owned.stop)
        dither = Dither(plan.base, "final", plan.participants[owner].peer)
        encoded = how_final.encode(mean, dither=dither.chunk(chunk))
        update = np.empty(length, np.float32)
        how_final.decode_into(encoded, update)
        finals.append(encoded.tobytes())
        updates.append(update)
        at += size
    return Reference(finals=b"".join(finals), update=np.concatenate(updates))


def _aggregate(plan: Plan, present: Sequence[tuple[int, int, F32]], length: int) -> F32:
    """Combine the (weight, clip, values) that are present, in plan order, by the plan's rule: (length,) float32."""
    if not present:
        return np.zeros(length, np.float32)
    if not isinstance(plan.clips, msgspec.UnsetType):
        norms = [_square_sum(values) for _, _, values in present]
        counted = sorted(norm for norm in norms if norm) or [0.0]
        median = counted[(len(counted) - 1) // 2]
        clips = [int(CLIP_UNIT * sqrt(median / norm)) if norm > median else CLIP_UNIT for norm in norms]
        present = [(w, min(clip, own), values) for (w, clip, values), own in zip(present, clips, strict=True)]
    return _combined(Aggregate.of(plan), present, length)


def _combined(aggregate: Aggregate, present: Sequence[tuple[int, int, F32]], length: int) -> F32:
    if aggregate.rule == "mean":
        total = np.zeros(length, np.float32)
        for weight, clip, values in present:
            total = total + np.float32(weight * clip / CLIP_UNIT) * values
        return total / np.float32(sum(weight for weight, _, _ in present))
    clipped = [np.float32(clip / CLIP_UNIT) * values + np.float32(0) for _, clip, values in present]
    ascending = np.sort(np.stack(clipped), axis=0)
    count = len(clipped)
    if aggregate.rule == "trimmed":
        least = min(-(-count * aggregate.parameter // CLIP_UNIT), (count - 1) // 2)
    else:
        least = (count - 1) // 2
    return _mean(ascending[least : count - least])


def _mean_of_buffers(plan: Plan, present: Sequence[tuple[int, int, F32]], length: int) -> F32:
    """Combine buffers by the plan's rule, in float64 where that is the mean: (length,) float32."""
    if not present:
        return np.zeros(length, np.float32)
    aggregate = Aggregate.of(plan)
    if aggregate.rule != "mean":
        return _combined(aggregate, [(weight, CLIP_UNIT, values) for weight, _, values in present], length)
    wide = sum(values.astype(np.float64) * weight for weight, _, values in present)
    mean: F32 = np.asarray(wide / sum(weight for weight, _, _ in present)).astype(np.float32)
    return mean


def _mean(rows: F32) -> F32:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    mean: F32 = total / np.float32(len(rows))
    return mean


def _square_sum(values: F32) -> float:
    """Sum up the squares by halves, in the spans of the norm of `adamw`."""
    total = 0.0
    for start in range(0, values.size, NORM_SPAN_VALUES):
        squares = values[start : start + NORM_SPAN_VALUES].astype(np.float64) ** 2
        squares = np.pad(squares, (0, (1 << (squares.size - 1).bit_length()) - squares.size))
        while squares.size > 1:
            squares = squares[: squares.size // 2] + squares[squares.size // 2 :]
        total += float(squares[0])
    return total


def wrong_values(applied: F32, reference: F32) -> int:
    """Number of values in which an applied update differs from the reference, by bits: −0 is not +0 here."""
    if applied.shape != reference.shape:
        raise LocalError(f"{applied.shape} values to compare with {reference.shape}")
    return int(np.count_nonzero(applied.view(np.uint32) != reference.view(np.uint32)))
