"""Useful work: what a contribution does to the loss on the very batches that its member was assigned.

Whoever trained on them made that loss smaller. Noise, a turned sign and turned labels do not. It is no proof: a batch
may be hard, a learning rate too large, and a contribution that carries a residual is not of this round alone; and who
makes another's progress its own passes. So it is for local scores only, never for electorates, and one finding says
little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from shoal.collectives.codecs import F32
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.micro_batches import to_device
from shoal.node.workload import Assignment, Workload, loss_of
from shoal.protocol.errors import LocalError

BATCHES = 2
"""Of the member's share, from the first on."""


@dataclass(frozen=True, slots=True)
class Work:
    """The mean loss on a member's first batches, at the anchor and after its contribution."""

    before: float
    after: float

    @property
    def useful(self) -> bool:
        """True if the contribution made the loss smaller."""
        return self.after < self.before


class WorkMeter:
    """Weighs contributions on a model of its own, built once. Not thread-safe; takes forward passes and blocks."""

    def __init__(self, workload: Workload, device: torch.device, *, chunk_values: int = 1) -> None:
        """chunk_values: of the swarm."""
        self._workload = workload
        self._model = workload.build().to(device)
        self._model.eval()
        self._flat = FlatParameters(self._model, chunk_values=chunk_values)
        self._device = device

    def weigh(self, anchor: F32, contribution: F32, assignment: Assignment) -> Work:
        """The work in `contribution`, base − local as decoded, to the round of `assignment`: both (numel,) float32.

        Buffers are in it as they are. Raises LocalError if the vectors are of another model, or the share has no batch.
        """
        numel = self._flat.layout.numel
        if anchor.shape != (numel,) or contribution.shape != (numel,):
            raise LocalError(f"{anchor.shape} and {contribution.shape} values of a model of {numel}")
        drawn = list(islice(self._workload.batches(assignment), BATCHES))
        if not drawn:
            raise LocalError("a share of the data without a batch")
        after, buffers = np.subtract(anchor, contribution), slice(self._flat.layout.buffers_begin, None)
        after[buffers] = contribution[buffers]
        return Work(self._loss(anchor, drawn), self._loss(after, drawn))

    @torch.no_grad()
    def _loss(self, parameters: F32, batches: list[Any]) -> float:
        self._flat.scatter(torch.from_numpy(np.array(parameters)))
        losses = [loss_of(self._workload, self._model, to_device(batch, self._device)) for batch in batches]
        return sum(float(loss) * count for loss, count in losses) / sum(count for _, count in losses)
