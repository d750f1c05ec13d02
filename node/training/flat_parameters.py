"""A model's parameters as one flat vector, in the order all members agree on.

Floating parameters sorted by name, tied ones once under their first name, each in row-major order. Buffers
do not travel: running means belong to the node whose batches made them.
"""

from __future__ import annotations

import torch

from shoal.node.training.trainer_messages import PARAMETERS_LIMIT, Layout
from shoal.protocol.errors import ConfigError


class FlatParameters:
    """Copies between a model, on any device, and host vectors ``(numel,) float32``."""

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

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory."""
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
    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the parameters' gradients into `out`; zeros for those that have none."""
        for parameter, piece in zip(self._parameters, self._cut(out), strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.reshape(-1))

    def _cut(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(vector, [parameter.numel() for parameter in self._parameters])
