"""AdamW with both moments in 8 bits: two bytes a parameter in place of eight.

What a step reads of the moments was rounded by the step before; what it makes of them is float32, moves the parameters
so, and is rounded then. Roundings are at random (`rounding`), so that a moment forgets as slowly as its beta says.

Embeddings and matrices are kept so whose rows have ROW_VALUES_MIN values and more, where they have VALUES_MIN in all.
All else, such as vectors, keeps float32: it is little, and what norms do is sensitive.

A step takes some rows at a time, so that float32 moments of a large matrix are never there as a whole.

Source: 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, sections 2 and 3; the formats are our own, see
`block_floats`. `torchao.optim.AdamW8bit` has its step compiled for every shape, which takes a compiler and seconds, has
blocks that do not end with rows, and rounds to the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.node.training.adamw import BesideAdamW, move
from shoal.node.training.block_floats import BlockFloats
from shoal.node.training.cut_tensors import first_row, own_rows
from shoal.node.training.rounding import hashed, random_words

VALUES_MIN = 4096
ROW_VALUES_MIN = 32
"""Blocks of a row are so long, and two bytes of exponents for each so little beside them."""
_AT_A_TIME = {"cpu": 1 << 18}
_AT_A_TIME_ELSEWHERE = 1 << 24
"""Values that a step takes at a time: on a processor what its caches hold, elsewhere what is worth a launch."""
_TWENTY_BITS = 0xF_FFFF


def is_kept_in_8_bits(parameter: torch.Tensor) -> bool:
    """True if moments of a parameter of this shape are; the same in every process that has a part of it."""
    values = parameter.numel()
    return parameter.dim() > 1 and values >= VALUES_MIN and values // len(parameter) >= ROW_VALUES_MIN


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Those of one parameter."""

    first: BlockFloats
    second: BlockFloats

    def state(self, name: str) -> list[tuple[str, torch.Tensor]]:
        kept = (("first", self.first), ("second", self.second))
        codes = [(f"{moment}.{name}", blocks.codes) for moment, blocks in kept]
        return [*codes, *((f"{moment}_exponent.{name}", blocks.exponents) for moment, blocks in kept)]


class AdamW8bit(BesideAdamW):
    """First and second moments of each parameter's gradient, on the parameter's device."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        is_large = [is_kept_in_8_bits(parameter) for parameter in parameters]
        super().__init__(parameters, is_large, betas=betas, weight_decay=weight_decay)
        self._moments = [
            _Moments(BlockFloats(parameter, signed=True), BlockFloats(parameter, signed=False))
            for parameter in self._parameters
        ]
        self._steps = torch.zeros(len(self._parameters), dtype=torch.int64)
        self._betas = betas

    def _own_state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        kept = [pair for name, moments in zip(names, self._moments, strict=True) for pair in moments.state(name)]
        return [*kept, ("steps_8bit", self._steps)]

    def move(self, device: torch.device) -> None:
        """Take the moments to where the parameters went."""
        for moments in self._moments:
            moments.first.to(device)
            moments.second.to(device)
        self._others.move(device)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient. No collective."""
        for place, (parameter, moments) in enumerate(zip(self._parameters, self._moments, strict=True)):
            if parameter.grad is not None:
                self._steps[place] += 1
                self._move(parameter, parameter.grad, moments, lr=lr, place=place, steps=int(self._steps[place]))
        self._others.step(lr)

    def _move(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        moments: _Moments,
        *,
        lr: float,
        place: int,
        steps: int,
    ) -> None:
        """Move one parameter, number `place` of those in 8 bits, some of its rows at a time."""
        values, change = own_rows(parameter), own_rows(gradient)
        width = parameter.numel() // len(parameter)
        key, first = hashed(hashed(place) + steps), first_row(parameter)
        at_a_time = max(1, _AT_A_TIME.get(values.device.type, _AT_A_TIME_ELSEWHERE) // width)
        for start in range(0, len(values), at_a_time):
            rows = slice(start, min(len(values), start + at_a_time))
            shape = values[rows].shape
            mean, square = (kept.read(rows).reshape(shape) for kept in (moments.first, moments.second))
            move(
                values[rows],
                change[rows],
                mean,
                square,
                lr=lr,
                betas=self._betas,
                weight_decay=self._weight_decay,
                steps=steps,
            )
            words = random_words(key, (first + start) * width, mean.numel(), mean.device).view(len(mean), width)
            moments.first.write(rows, mean.reshape(len(mean), width), words & _TWENTY_BITS)
            moments.second.write(rows, square.reshape(len(mean), width), (words >> 12) & _TWENTY_BITS)
