"""The plain way to compute a round, for audits: slow, short, and sharing no arithmetic with the reduce.

Given what every contributor committed to and who was included in which chunk, it says what the finals and the applied
update must be, to the bit: decode(encode(plan-order weighted mean of the decoded contributions)), each multiplied by
weight and clip, and counted with its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.collectives.codecs import F32, Encoded, codec, final_codec
from shoal.collectives.dither import Dither
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import CLIP_UNIT, Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """finals: all encoded chunks, joined in order. update: (numel,) float32, decoded from them."""

    finals: bytes
    update: F32


def reference(plan: Plan, contributions: Mapping[PeerId, Encoded], bitmaps: Sequence[bytes]) -> Reference:
    """What `plan` must lead to.

    contributions: per contributor all its encoded chunks, joined in order (`EncodedContribution.concatenated`).
    bitmaps: per chunk, bit i set for participant i; a participant of weight zero does not count even if named.

    Raises LocalError if they do not fit the plan, Undecodable if an included contribution does not decode.
    """
    if len(bitmaps) != plan.chunks:
        raise LocalError(f"{len(bitmaps)} bitmaps for {plan.chunks} chunks")
    how, how_final = codec(plan.codec), final_codec(plan.codec)
    finals, updates, at = [], [], 0
    for chunk in range(plan.chunks):
        length = min(plan.chunk_values, plan.numel - chunk * plan.chunk_values)
        size = how.encoded_bytes(length)
        total, divisor = np.zeros(length, np.float32), 0
        for place, participant in enumerate(plan.participants):
            named = int.from_bytes(bitmaps[chunk], "little") >> place & 1
            if not named or participant.weight == 0:
                continue
            values = np.empty(length, np.float32)
            how.decode_into(contributions[participant.peer][at : at + size], values)
            total = total + np.float32(participant.weight * plan.clip(place) / CLIP_UNIT) * values
            divisor = divisor + participant.weight
        mean = total / np.float32(divisor) if divisor else total
        owner = next(owned.owner for owned in plan.owners if owned.start <= chunk < owned.stop)
        dither = Dither(plan.base, "final", plan.participants[owner].peer)
        encoded = how_final.encode(mean, dither=dither.chunk(chunk))
        update = np.empty(length, np.float32)
        how_final.decode_into(encoded, update)
        finals.append(encoded.tobytes())
        updates.append(update)
        at += size
    return Reference(finals=b"".join(finals), update=np.concatenate(updates))


def wrong_values(applied: F32, reference: F32) -> int:
    """In how many places an applied update differs from the reference, by bits: −0 is not +0 here."""
    if applied.shape != reference.shape:
        raise LocalError(f"{applied.shape} values to compare with {reference.shape}")
    return int(np.count_nonzero(applied.view(np.uint32) != reference.view(np.uint32)))
