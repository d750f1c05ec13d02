"""A workload of the size that one wants: the model of `text` on random bytes.

Nothing can be learnt of random bytes, and nothing is read from a disk: what a step takes is the model's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shoal.node.workload import Assignment
from shoal.node.workloads.text import SYMBOLS, TextWorkload


@dataclass(frozen=True)
class RandomTokensWorkload(TextWorkload):
    """Predict the next of random bytes."""

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Yield ``(B, T + 1) uint8``, drawn from this member's seed of the round."""
        generator = torch.Generator().manual_seed(assignment.stream_seed)
        while True:
            yield torch.randint(SYMBOLS, (self.batch, self.context + 1), dtype=torch.uint8, generator=generator)

    def evaluate(self, model: nn.Module) -> float:
        """The entropy of a random byte: no model does better, and none is run for it."""
        return 8.0
