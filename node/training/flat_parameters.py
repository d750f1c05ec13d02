"""A model's parameters as one flat vector, in the order all members agree on.

Floating parameters sorted by name, tied ones once under their first name, each in row-major order. Buffers
do not travel: running means belong to the node whose batches made them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from shoal.node.training.device_copies import DeviceCopies, HostCopy, page_locked
from shoal.node.training.trainer_messages import PARAMETERS_LIMIT, Layout
from shoal.protocol.errors import ConfigError


class FlatParameters:
    """Copies between a model, on any device, and host vectors ``(numel,) float32``.

    Spans are slices of such a vector, ascending. What is read of them is one vector of their values, in that order.
    """

    def __init__(self, model: torch.nn.Module, *, frozen: bool = True) -> None:
        """Read the layout; without `frozen`, of what needs a gradient alone.

        Raises `ConfigError` on what cannot travel (say, parameters in bfloat16).
        """
        named = dict(model.named_parameters())  # torch lists a tied parameter once
        travelling = sorted(
            name for name, value in named.items() if value.is_floating_point() and (frozen or value.requires_grad)
        )
        for name in travelling:
            if named[name].dtype != torch.float32:
                raise ConfigError(
                    f"parameter {name!r} is {named[name].dtype}; keep parameters in float32 and use "
                    "torch.autocast inside loss() for lower precision"
                )
        if not 0 < len(travelling) <= PARAMETERS_LIMIT:
            raise ConfigError(f"the model has {len(travelling)} parameters, expected 1 to {PARAMETERS_LIMIT}")
        self._parameters = [named[name] for name in travelling]
        self.layout = Layout(
            names=tuple(travelling),
            shapes=tuple(tuple(parameter.shape) for parameter in self._parameters),
            numel=sum(parameter.numel() for parameter in self._parameters),
        )
        self._starts = [0, *accumulate(parameter.numel() for parameter in self._parameters)]
        self._copies = DeviceCopies()

    @property
    def _device(self) -> torch.device:
        """Where the model is now."""
        return self._parameters[0].device

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory, from which a GPU can copy by itself."""
        if self._device.type == "cuda":
            return page_locked(self.layout.numel).zero_()
        return torch.zeros(self.layout.numel, dtype=torch.float32)

    @torch.no_grad()
    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the model's parameters into `out` and return it."""
        for parameter, piece in zip(self._parameters, self._cut(out), strict=True):
            piece.copy_(parameter.reshape(-1))
        return out

    @torch.no_grad()
    def scatter(self, vector: torch.Tensor) -> None:
        """Copy `vector` into the model's parameters."""
        for parameter, piece in zip(self._parameters, self._cut(vector), strict=True):
            parameter.copy_(piece.view(parameter.shape))

    @torch.no_grad()
    def read(self, spans: Sequence[slice]) -> torch.Tensor:
        """A copy of the parameters there, ``(values,) float32``, on the model's device."""
        return torch.cat(
            [self._parameters[number].reshape(-1)[part] for span in spans for number, part in self._pieces(span)]
        )

    @torch.no_grad()
    def update(self, spans: Sequence[slice], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the parameters there by what `change` makes of a copy of them, on the model's device."""
        values, at = change(self.read(spans)), 0
        for span in spans:
            for number, part in self._pieces(span):
                parameter, end = self._parameters[number], at + part.stop - part.start
                if parameter.is_contiguous():
                    parameter.view(-1)[part].copy_(values[at:end])
                else:
                    (whole := parameter.reshape(-1))[part] = values[at:end]
                    parameter.copy_(whole.view(parameter.shape))
                at = end

    def to_host(self, values: torch.Tensor) -> HostCopy:
        """Begin to copy what `read` returned to host memory; nobody changes it from here on."""
        return self._copies.to_host(values)

    def to_device(self, vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
        """The values of a host vector there, on the model's device, not to be changed; maybe a part of it."""
        return self._copies.to_device(vector, spans, self._device)

    def _pieces(self, span: slice) -> Iterator[tuple[int, slice]]:
        """The parameters that the span touches, by number, and which of their values."""
        number = bisect_right(self._starts, span.start) - 1
        while number < len(self._parameters) and (start := self._starts[number]) < span.stop:
            stop = min(span.stop, self._starts[number + 1])
            if (begin := max(span.start, start)) < stop:
                yield number, slice(begin - start, stop - start)
            number += 1

    @torch.no_grad()
    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the parameters' gradients into `out`; zeros for those that have none."""
        for parameter, piece in zip(self._parameters, self._cut(out), strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.reshape(-1))

    def _cut(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(vector, [parameter.numel() for parameter in self._parameters])
