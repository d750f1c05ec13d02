"""A workload whose model has running means and a counter: its loss depends on buffers, which differ by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.node.workload import Assignment
from shoal.node.workloads.regression import Batch, RegressionWorkload

HIDDEN = 300


class Counting(torch.nn.Module):
    """Passes on what it is given, and counts how often it was trained on."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x


def model_of(inputs: int, outputs: int) -> torch.nn.Sequential:
    """More parameters than a chunk of 4096 has, and buffers of which the counters alone are whole numbers."""
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(inputs),
        torch.nn.Linear(inputs, HIDDEN),
        Counting(),
        torch.nn.ReLU(),
        torch.nn.BatchNorm1d(HIDDEN),
        torch.nn.Linear(HIDDEN, outputs),
    )


@dataclass(frozen=True)
class Normed(RegressionWorkload):
    """Inputs far from 0 and 1, further away for each member: as built the running means are of no use."""

    def build(self) -> torch.nn.Module:
        return model_of(self.inputs, self.outputs)

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        for x, y in super().batches(assignment):
            yield self._moved(x * (1 + 0.1 * (assignment.member % 7)), y)

    def evaluate(self, model: torch.nn.Module) -> float:
        x, y = self._moved(*self._sample(torch.Generator().manual_seed(-1), 256))
        return float(torch.nn.functional.mse_loss(model(x), y))

    def _moved(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        return x * 100 + 1000, y
