"""Copies, as far as they can be seen: how many of its largest values a contribution shares with another.

Members that drew different batches agree on some of them, for it is one model that they train; a copy, or a copy with a
little noise, agrees on nearly all. That is no proof, and of two that look alike nobody can tell from this which one
copied: so it is for local scores only, never for electorates. (A root that was copied is another matter: its seal
proves it, see `protocol.commitments`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.collectives.codecs import F32, U8, Undecodable, codec
from shoal.collectives.grid import Grid
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan

OVERLAP_SHARE: Final = 1 / 64
"""The share of the values that count as largest."""
COPY_OVERLAP: Final = 0.9
"""From so much overlap on a contribution looks copied."""
LEAST_VALUES: Final = 4096
"""Of fewer values the overlap says too little."""

Places: TypeAlias = npt.NDArray[np.int64]


def overlap(one: F32, other: F32, share: float = OVERLAP_SHARE) -> float:
    """How many of the largest values of both, (n,) float32, are the same in place and sign: 0 to 1.

    Values of zero are no largest ones. Raises LocalError if the sizes differ.
    """
    if one.shape != other.shape:
        raise LocalError(f"{one.shape} and {other.shape} values to compare")
    count = _count(one, share)
    return _shared(_largest(one, count), _largest(other, count)) / count


def _count(values: F32, share: float) -> int:
    """How many of so many values count as largest."""
    return max(1, int(values.size * share))


def _largest(values: F32, count: int) -> Places:
    """Places and signs of the largest magnitudes, (count,) or fewer: place i as i + 1 where positive, else −(i + 1)."""
    places = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
    signs = np.sign(values[places]).astype(np.int64)
    signed: Places = ((places + 1) * signs)[signs != 0]
    return signed


def _shared(one: Places, other: Places) -> int:
    """How many are the same in place and sign."""
    return int(np.intersect1d(one, other, assume_unique=True).size)


def lookalikes(contributions: Mapping[PeerId, F32], least: float = COPY_OVERLAP) -> dict[tuple[PeerId, PeerId], float]:
    """The pairs that overlap by `least` or more, the lower PeerId first, and by how much.

    Raises LocalError if the sizes differ.
    """
    sizes = {values.size for values in contributions.values()}
    if len(sizes) > 1:
        raise LocalError(f"{sorted(sizes)} values to compare")
    counts = {peer: _count(values, OVERLAP_SHARE) for peer, values in contributions.items()}
    largest = {peer: _largest(values, counts[peer]) for peer, values in contributions.items()}
    pairs = combinations(sorted(contributions), 2)
    shared = {(one, other): _shared(largest[one], largest[other]) / counts[one] for one, other in pairs}
    return {pair: share for pair, share in shared.items() if share >= least}


def lookalikes_in_chunk(plan: Plan, chunk: int, payloads: Mapping[int, U8]) -> dict[tuple[PeerId, PeerId], float]:
    """`lookalikes` among the contributions to one chunk, by place, encoded, with what follows in a payload or without.

    None where there are too few values.
    """
    how, length = codec(plan.codec), Grid.of(plan).length(chunk)
    if length < LEAST_VALUES:
        return {}
    decoded: dict[PeerId, F32] = {}
    for place, payload in payloads.items():
        values = np.empty(length, np.float32)
        try:
            how.decode_into(payload[: how.encoded_bytes(length)], values)
        except Undecodable:
            continue
        decoded[plan.participants[place].peer] = values
    return lookalikes(decoded)
