"""The smallest workload: fit a noisy linear map. A model for writing your own.

Every method of the interface is here and nothing else. The data come from a generator seeded by the
assignment, so no two members of a round see the same samples, and nothing has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from shoal.node.workload import BATCH_LIMIT, Assignment, check_whole
from shoal.protocol.errors import ConfigError

SIZE = 1, 1 << 20
NOISE_LIMIT = 1000
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RegressionWorkload:
    """Learn ``y = W x + noise``; the options of the manifest are the fields below."""

    inputs: int = 16
    outputs: int = 4
    batch: int = 32
    noise: float = 0.05
    metric = "mean squared error"
    metric_per_loss = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_whole("workload 'regression'", self, {"inputs": SIZE, "outputs": SIZE, "batch": (1, BATCH_LIMIT)})
        if not 0 <= self.noise <= NOISE_LIMIT:
            raise ConfigError(
                f"workload 'regression': noise is {self.noise!r}, expected a number from 0 to {NOISE_LIMIT}"
            )

    def build(self) -> torch.nn.Module:
        """A linear layer: ``inputs × outputs`` weights and a bias."""
        return torch.nn.Linear(self.inputs, self.outputs)

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        """Endless samples, drawn under a seed that no other member or round shares."""
        generator = torch.Generator().manual_seed(assignment.stream_seed)
        while True:
            yield self._sample(generator, self.batch)

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        """Mean squared error, weighed by the number of samples."""
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y), len(x)

    def evaluate(self, model: torch.nn.Module) -> float:
        """Mean squared error on 256 samples that are never trained on."""
        x, y = self._sample(torch.Generator().manual_seed(-1), 256)
        device = next(model.parameters()).device
        return float(torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)))

    @cached_property
    def _truth(self) -> torch.Tensor:
        """Matrix to be learnt, the same everywhere: ``(inputs, outputs)``."""
        return torch.randn(self.inputs, self.outputs, generator=torch.Generator().manual_seed(1))

    def _sample(self, generator: torch.Generator, count: int) -> Batch:
        """Draw `count` pairs: x ``(count, inputs)``, y ``(count, outputs)``."""
        x = torch.randn(count, self.inputs, generator=generator)
        return x, x @ self._truth + self.noise * torch.randn(count, self.outputs, generator=generator)
