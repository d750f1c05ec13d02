"""A node that encodes values that are not finite in round 2, and commits to them; for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shoal.cli.main import main
from shoal.collectives.codecs import F32
from shoal.collectives.commitment import MerkleTree, chunk_hash
from shoal.collectives.contribution import EncodedContribution
from shoal.node.state.contributions import Contributions, Made

ROUND = 2
honest_make = Contributions.make


def make(self: Contributions, round: int, number: int, tokens: int, pseudo_gradient: F32, **more: Any) -> Made:
    """As if nothing were wrong with it."""
    made = honest_make(self, round, number, tokens, pseudo_gradient, **more)
    if round == ROUND:
        self.made = made = replace(made, encoded=infinite(made.encoded))
    return made


def infinite(good: EncodedContribution) -> EncodedContribution:
    """A contribution in fp32 with an infinite value in every chunk, committed to as it is."""
    buffer = np.array(good.buffer)
    for start in good.offsets[:-1]:
        buffer[start : start + 4] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    changed = replace(good, buffer=buffer)
    tree = MerkleTree([chunk_hash(changed.encoded(chunk).tobytes()) for chunk in range(good.grid.chunks)])
    for chunk in range(good.grid.chunks):
        path = tree.path(chunk)
        buffer[good.offsets[chunk + 1] - len(path) : good.offsets[chunk + 1]] = np.frombuffer(path, np.uint8)
    return replace(changed, root=tree.root, top=tree.top)


if __name__ == "__main__":
    Contributions.make = make  # type: ignore[method-assign]
    main()
