"""Values that a reduction returned, told apart by whose mean they are.

Each peer contributes random numbers of its own, so the mean over any set of peers is recognised in every element. Means
are computed here, in float64, for all sets; an element is one's where it is no farther from it than float32 sums are.
Two means come that near each other in a few elements of a million, which then count for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import msgspec
import numpy as np

from shoal.collectives.codecs import F32

TOLERANCE: Final = 2e-6
"""Contributions are less than 1: some additions, a division and a difference of such float32 are off by less."""
BLOCK_VALUES: Final = 1 << 18
SHOWN_SHARE: Final = 1e-4
"""Of what fewer elements are, nothing is told: they may be so by chance."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Contributors whose mean some values are.

    contributors: how many there are in the set whose mean the most elements are. wrong_share: of elements that are not.
    shares: of elements that are the mean over a set, by the set, like "0+2".
    """

    contributors: int
    wrong_share: float
    shares: dict[str, float]

    @property
    def exact(self) -> bool:
        """True if every element is the mean over one and the same set."""
        return self.wrong_share == 0.0


def sets_of(peers: int) -> list[tuple[int, ...]]:
    """All sets of contributors but the empty one, the largest first."""
    return [one for count in range(peers, 0, -1) for one in combinations(range(peers), count)]


def origin_of(values: F32, vectors: Sequence[F32]) -> Origin:
    """Find out whose mean `values` are, of contributors with these `vectors`, each (numel,) float32.

    Of another number of values than they contributed all are wrong.
    """
    numel, sets = vectors[0].size, sets_of(len(vectors))
    if values.shape != vectors[0].shape:
        return Origin(contributors=0, wrong_share=1.0, shares={})
    found = np.zeros(len(sets), np.int64)
    for at in range(0, numel, BLOCK_VALUES):
        block = slice(at, at + BLOCK_VALUES)
        own = [vector[block].astype(np.float64) for vector in vectors]
        for number, one in enumerate(sets):
            mean = np.sum([own[peer] for peer in one], axis=0) / len(one)
            found[number] += np.count_nonzero(np.abs(values[block] - mean) <= TOLERANCE)
    best = int(found.argmax())
    shares = {"+".join(map(str, one)): int(count) / numel for one, count in zip(sets, found, strict=True)}
    return Origin(
        contributors=len(sets[best]) if found[best] else 0,
        wrong_share=(numel - int(found[best])) / numel,
        shares={name: share for name, share in shares.items() if share >= SHOWN_SHARE},
    )
