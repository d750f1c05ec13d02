"""The optimizers of policies, as optimizers of torch, which loops and files of agents know how to handle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, overload

import torch

from shoal.node.sapo.policy import Policy, module_of, trained_parameters
from shoal.node.training import adamw, muon

BETAS: Final = (0.9, 0.95)
ADAMW: Final = "adamw"
MUON: Final = "muon"

MOMENTS: Final = {
    ADAMW: frozenset({"exp_avg", "exp_avg_sq", "step"}),
    MUON: frozenset({"momentum", "first", "second", "steps"}),
}
"""Kept of a parameter, by the optimizer's name."""


def has_moments(optimizer: torch.optim.Optimizer, names: Collection[str]) -> bool:
    """True if moments of these names are such an optimizer's."""
    return MOMENTS[MUON if isinstance(optimizer, PolicyMuon) else ADAMW].issuperset(names)


def policy_optimizer(policy: Policy, learning_rate: float, name: str = ADAMW) -> torch.optim.Optimizer:
    """The optimizer of that name, of the parameters that training changes; without decay.

    "adamw8bit" is AdamW here: policies are small beside what generates.
    """
    if name == MUON:
        return PolicyMuon(policy, learning_rate)
    parameters = trained_parameters(policy).values()
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=BETAS, weight_decay=0.0)


class PolicyMuon(torch.optim.Optimizer):
    """Muon of the policy's matrices, and AdamW of what else it trains: `shoal.node.training.muon`.

    State: of a matrix its `momentum`; of any other parameter `first` and `second`, and `steps`, float32.
    """

    def __init__(self, policy: Policy, learning_rate: float) -> None:
        parameters = list(trained_parameters(policy).values())
        super().__init__(parameters, {"lr": learning_rate})
        self._is_matrix = muon.matrices(module_of(policy), parameters)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient. closure: makes gradients first, and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        for parameter, is_matrix in zip(group["params"], self._is_matrix, strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if is_matrix:
                momentum = _kept(state, "momentum", parameter)
                muon.move(parameter, parameter.grad, momentum, lr=group["lr"], weight_decay=0.0)
            else:
                self._move_other(parameter, state, group["lr"])
        return loss

    def _move_other(self, parameter: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        assert parameter.grad is not None
        steps = state.setdefault("steps", torch.tensor(0.0))
        steps += 1
        adamw.move(
            parameter,
            parameter.grad,
            _kept(state, "first", parameter),
            _kept(state, "second", parameter),
            lr=lr,
            betas=BETAS,
            weight_decay=0.0,
            steps=int(steps),
        )


def _kept(state: dict[str, Any], name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return what is kept of a parameter, zeros at first."""
    if name not in state:
        state[name] = torch.zeros_like(parameter)
    found: torch.Tensor = state[name]
    return found
