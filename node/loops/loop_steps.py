"""Steps of a user's own training loop between two calls: those that its optimizer made, and its speed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from shoal.node.single_number import single_number, tokens_of_step
from shoal.protocol.errors import ConfigError

NOT_ENTERED = "step() comes after joining: call it within `with join(...) as swarm:`"


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside the wrappers that give its parameters other names: torch.compile's and DataParallel's."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, wrappers):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def check_trainable(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if the optimizer moves none of the model, or is none."""
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"join() takes one optimizer, not a {type(optimizer).__name__}; of several give the one that steps last: "
            "its steps are counted"
        )
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not trained:
        raise ConfigError("no parameter of the model needs a gradient: there is nothing to train")
    if not trained & moved:
        raise ConfigError(
            "the optimizer holds none of the model's parameters; make it from model.parameters() after the model is "
            "wrapped, adapted and moved to its device"
        )


class TrainedParameters:
    """The parameters of a model that need a gradient as a loop joins: those that travel."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._there = {id(value): value for value in model.parameters() if value.requires_grad}

    def newer(self) -> str | None:
        """The first that needs a gradient now and was none of them, by name; None without one."""
        named = self._model.named_parameters()
        return next((name for name, value in named if value.requires_grad and id(value) not in self._there), None)


class OptimizerSteps:
    """Counts the steps that an optimizer really made.

    A GradScaler that finds an infinite gradient does not call the optimizer; a fused one it does call, and has skip the
    update by itself. Neither is a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = _innermost(optimizer)
        self._hook: Any = None
        self._made = 0

    def begin(self) -> None:
        """Count from here on."""
        self.end()
        self._hook = self._optimizer.register_step_post_hook(self._stepped)

    def end(self) -> None:
        """Leave the optimizer as it was."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._made = None, 0

    def made(self) -> int:
        """Return the number of steps since the last call."""
        made, self._made = self._made, 0
        return made

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = getattr(optimizer, "found_inf", None)  # a GradScaler puts it there for the time of a fused step
        if found is None or not float(found):
            self._made += 1


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that moves the parameters, inside wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def number_of(found: object) -> float:
    """The held-out loss that a user's evaluation returned. Raises ConfigError for what is no number."""
    number = single_number(found)
    if number is not None:
        return number
    raise ConfigError(f"evaluate= returned {type(found).__name__}, not a number; have it return the held-out loss")


def tokens_of_told(told: object) -> int:
    """The tokens or samples that `step` was told of. Raises ConfigError for what can be no number of these."""
    tokens = tokens_of_step(told)
    if tokens is not None:
        return tokens
    raise ConfigError(f"step(tokens={told!r}): give the number of tokens or samples of the step")


def mean_of(total: float, count: int) -> float:
    """The mean of `count` losses; not a number without any."""
    return total / count if count else math.nan


class Tally:
    """Measurements since the newest contribution was written; times in seconds.

    Losses are summed where they are, so that a step on a GPU is not waited for.
    """

    def __init__(self) -> None:
        self.began = self._resumed_at = time.monotonic()
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.blocked_s = 0.0
        self._loss: torch.Tensor | float = 0.0
        self._losses = 0
        self._reported_s = 0.0
        self._reported_tokens = 0

    def resumed(self) -> None:
        """Note that the loop goes on."""
        self._resumed_at = time.monotonic()

    def trained(self) -> None:
        """Note that the loop has trained since `resumed`."""
        now = time.monotonic()
        self.seconds += now - self._resumed_at
        self._resumed_at = now

    def add(self, steps: int, tokens: int, loss: torch.Tensor | float | None) -> None:
        """Count steps that were made. Raises ConfigError for a loss of several values.

        The loss of a step on no tokens, as on a rank's part of a batch that is all masked, counts where it is a number.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ConfigError(f"step(loss=) was given {loss.numel()} values; give it the mean loss of the step")
        self.steps += steps
        self.tokens += tokens
        if loss is not None and (tokens or not math.isnan(loss)):
            self._loss = self._loss + (loss.detach().float() if isinstance(loss, torch.Tensor) else float(loss))
            self._losses += 1

    def losses(self) -> tuple[float, int]:
        """Sum of the losses, and how many steps told one."""
        return float(self._loss), self._losses

    def mean_loss(self) -> float:
        """Mean loss over the steps that told one; not a number without any."""
        return mean_of(*self.losses())

    def tokens_per_s(self) -> float:
        """Rate while it trained."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def since_report_s(self) -> float:
        """Seconds of training since the last report of progress."""
        return self.seconds - self._reported_s

    def rate_since_report(self) -> float:
        """Tokens per second since then; the next report counts from here."""
        rate = (self.tokens - self._reported_tokens) / self.since_report_s
        self._reported_s, self._reported_tokens = self.seconds, self.tokens
        return rate


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients; then every module in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
