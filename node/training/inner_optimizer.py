"""The optimizer of a node's own steps: what the inner loop asks of one, and which there are.

An optimizer knows its parameters from when it is made, and is given the learning rate with each step. It takes
parameters that this process has whole and those of which it holds some rows alike (`cut_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from shoal.node.training.adamw import AdamW
from shoal.node.training.adamw8bit import AdamW8bit
from shoal.node.training.muon import Muon
from shoal.node.training.trainer_messages import InnerSettings


class InnerOptimizer(Protocol):
    """Optimizer that moves the parameters."""

    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient. A collective where parameters are cut."""

    def state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """All that it knows, by name. names: of the parameters, in their order."""

    def move(self, device: torch.device) -> None:
        """Take what it knows to where the parameters went."""

    def decay(self, weight_decay: float) -> None:
        """Decay by this from the next step on."""


OPTIMIZERS: Mapping[str, Callable[[torch.nn.Module, Sequence[torch.nn.Parameter], InnerSettings], InnerOptimizer]] = {
    "adamw": lambda _, parameters, inner: AdamW(parameters, betas=inner.betas, weight_decay=inner.weight_decay),
    "adamw8bit": lambda _, parameters, inner: AdamW8bit(parameters, betas=inner.betas, weight_decay=inner.weight_decay),
    "muon": lambda model, parameters, inner: Muon(
        model, parameters, betas=inner.betas, weight_decay=inner.weight_decay
    ),
}
"""By the name that a manifest gives it."""


def inner_optimizer(
    model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], inner: InnerSettings
) -> InnerOptimizer:
    """The optimizer that `inner` names, for these parameters of `model`."""
    return OPTIMIZERS[inner.optimizer](model, parameters, inner)
