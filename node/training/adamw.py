"""AdamW as the inner loop uses it.

`torch.optim.AdamW` is the same arithmetic, but making one imports `torch._dynamo`, which doubles the time a
trainer takes to start (measured 3.0 s on top of 2.7 s for torch itself); a trainer that died should be back
soon. The test compares the two.

Source: Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from shoal.node.training.cut_tensors import own_rows

EPSILON = 1e-8

T = TypeVar("T")


def move(
    values: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    steps: int,
) -> None:
    """Take one step in place: moments first, then the values. steps: of these values, this one among them."""
    beta1, beta2 = betas
    values.mul_(1 - lr * weight_decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    spread = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(EPSILON)
    values.addcdiv_(first, spread, value=-lr / (1 - beta1**steps))


class AdamW:
    """First and second moments of each parameter's gradient, on the parameter's device."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._parameters = list(parameters)
        self._betas = betas
        self._weight_decay = weight_decay
        self._first = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._steps = torch.zeros(len(self._parameters), dtype=torch.int64)

    def state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """All that it knows, as live tensors: writing to them changes it. names: of the parameters, in their order."""
        first = [(f"first.{name}", moment) for name, moment in zip(names, self._first, strict=True)]
        second = [(f"second.{name}", moment) for name, moment in zip(names, self._second, strict=True)]
        return [*first, *second, ("steps", self._steps)]

    def move(self, device: torch.device) -> None:
        """Take the moments to where the parameters went."""
        self._first = [moment.to(device) for moment in self._first]
        self._second = [moment.to(device) for moment in self._second]

    def decay(self, weight_decay: float) -> None:
        """Decay by this from the next step on."""
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient. No collective."""
        moments = zip(self._first, self._second, strict=True)
        for index, (parameter, (first, second)) in enumerate(zip(self._parameters, moments, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._steps[index] += 1
            rows, mean, square, change = (own_rows(tensor) for tensor in (parameter, first, second, gradient))
            move(
                rows,
                change,
                mean,
                square,
                lr=lr,
                betas=self._betas,
                weight_decay=self._weight_decay,
                steps=int(self._steps[index]),
            )


class BesideAdamW(ABC):
    """An optimizer that moves the chosen ones of its parameters in a way of its own, and all others as AdamW does.

    A subclass sets up what it keeps of `_parameters`, the chosen ones, and has its own `step` and `move` call those of
    `_others` too.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        chosen: Sequence[bool],
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._chosen = chosen
        self._parameters, others = _parted(parameters, chosen)
        self._weight_decay = weight_decay
        self._others = AdamW(others, betas=betas, weight_decay=weight_decay)

    def state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """All that it knows, as live tensors: writing to them changes it. names: of the parameters, in their order."""
        own, others = _parted(names, self._chosen)
        return [*self._own_state(own), *self._others.state(others)]

    @abstractmethod
    def _own_state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """State that it keeps of the chosen parameters, which have these names."""

    def decay(self, weight_decay: float) -> None:
        """Decay by this from the next step on."""
        self._weight_decay = weight_decay
        self._others.decay(weight_decay)


def _parted(items: Sequence[T], chosen: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Those that are chosen, and the others."""
    pairs = list(zip(items, chosen, strict=True))
    return [item for item, is_chosen in pairs if is_chosen], [item for item, is_chosen in pairs if not is_chosen]
