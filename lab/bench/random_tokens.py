"""A workload of the size that one wants: the model of `text` on random bytes, in bf16 on a GPU.

Nothing can be learnt of random bytes, and nothing is read from a disk: what a step takes is the model's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from shoal.lab.bench.throughput_spec import DTYPES
from shoal.node.workload import Assignment
from shoal.node.workloads.text import SYMBOLS, TextWorkload
from shoal.protocol.errors import ConfigError


@dataclass(frozen=True)
class RandomTokensWorkload(TextWorkload):
    """Predict the next of random bytes. dtype: what products are computed in; auto is bf16 on CUDA, else float32."""

    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Yield ``(B, T + 1) uint8``, drawn from this member's seed of the round."""
        generator = torch.Generator().manual_seed(assignment.stream_seed)
        while True:
            yield torch.randint(SYMBOLS, (self.batch, self.context + 1), dtype=torch.uint8, generator=generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Loss as of `text`; parameters, their gradients and the sums over them stay float32."""
        with self._precision(batch.device.type):
            return super().loss(model, batch)

    def evaluate(self, model: nn.Module) -> float:
        """The entropy of a random byte: no model does better, and none is run for it."""
        return 8.0

    def _precision(self, device: str) -> AbstractContextManager[object]:
        if self.dtype == "bf16" or (self.dtype == "auto" and device == "cuda"):
            return torch.autocast(device, torch.bfloat16)
        return nullcontext()
