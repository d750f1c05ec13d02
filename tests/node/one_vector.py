"""A model whose parameters are one vector, for tests of what a replica owes its swarm."""

from __future__ import annotations

import torch

from shoal.node.training.flat_parameters import FlatParameters


class OneVector:
    """Its only parameter has `numel` values, zero at first; `values` may be changed in place."""

    def __init__(self, numel: int) -> None:
        self.model = torch.nn.Module()
        parameter = torch.nn.Parameter(torch.zeros(numel))
        self.model.register_parameter("vector", parameter)
        self.values = parameter.detach()

    def flat(self) -> FlatParameters:
        return FlatParameters(self.model)
