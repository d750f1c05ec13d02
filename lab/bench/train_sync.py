"""Synchronous data parallel, exactly, in one process: what every strategy is compared with.

    gradient(step) = Σ tokensₘ · gradientₘ ÷ Σ tokensₘ      over the n members' batches of that step
    one AdamW step with it, on one model

That is one replica whose batch is the n members' batches and whose loss is their mean, weighted by tokens. So it is
run by the very `Replica` that a node trains with: schedule, clipping and optimizer cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.lab.bench.train_spec import Point, inner_settings, workload_of
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train, Trained
from shoal.node.workload import Workload
from shoal.protocol.manifest import Manifest
from shoal.testnet.reports.report import allreduce_bytes


class JoinedWorkload:
    """The workload of all members at once: each batch is the list of theirs, the loss their mean by tokens."""

    def __init__(self, workload: Workload, members: int) -> None:
        self._workload = workload
        self._members = members
        self.tokens = 0
        """Of all batches whose loss was computed."""

    @property
    def metric(self) -> str:
        """Metric of the workload itself."""
        return self._workload.metric

    def build(self) -> torch.nn.Module:
        """Make one model."""
        return self._workload.build()

    def batches(self, assignment: Assignment) -> Iterator[list[Any]]:
        """Yield for each step the batches that the members of `assignment`'s round draw, in their order."""
        shares = [
            self._workload.batches(msgspec.structs.replace(assignment, member=member, members=self._members))
            for member in range(self._members)
        ]
        for batches in zip(*shares, strict=False):
            yield list(batches)

    def loss(self, model: torch.nn.Module, batch: Sequence[Any]) -> tuple[torch.Tensor, int]:
        """The mean over all tokens of the batches, and how many these are."""
        parts = [self._workload.loss(model, part) for part in batch]
        tokens = sum(count for _, count in parts)
        self.tokens += tokens
        total = torch.stack([loss * count for loss, count in parts]).sum()
        return total / tokens, tokens

    def evaluate(self, model: torch.nn.Module) -> float:
        """Evaluate as the workload itself does."""
        return self._workload.evaluate(model)


class SynchronousTraining:
    """One model trained by the gradients of `members`, averaged at every step."""

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        inner: InnerSettings,
        members: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008  a name, not to be changed
    ) -> None:
        self._workload = JoinedWorkload(workload, members)
        self._seed = seed
        self._members = members
        self._replica = Replica(self._workload, seed=seed, inner=inner, device=device)
        self._nowhere = np.zeros(self.numel, np.float32)
        self._replica.write_initial(self._nowhere)
        self._replica.apply(self._nowhere)
        self.round = 0

    @property
    def tokens(self) -> int:
        """Number of tokens trained on so far."""
        return self._workload.tokens

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self._replica.layout.numel

    @property
    def model(self) -> torch.nn.Module:
        """The live model."""
        return self._replica.model

    def train_round(self, steps: int) -> None:
        """Make the steps of the next round. Raises FloatingPointError if the loss stays infinite."""
        self.round += 1
        share = Assignment(seed=self._seed, round=self.round, member=0, members=self._members)
        self._replica.begin(Train(round=self.round, steps=steps, assignment=share, contribute=False))
        report = None
        while not isinstance(report, Trained):
            report = self._replica.step(self._nowhere)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss of the model as it is."""
        self.model.eval()
        try:
            return float(self._workload.evaluate(self.model))
        finally:
            self.model.train()


def train_synchronously(
    manifest: Manifest, *, members: int, rounds: int, tell: Callable[[Point], None] = lambda _: None
) -> list[Point]:
    """The curve of `rounds` rounds, each of the manifest's steps: a point before the first and after each.

    Raises ConfigError, FloatingPointError. Takes as long as all nodes' steps one after the other.
    """
    steps = manifest.sync.round_steps
    training = SynchronousTraining(
        workload_of(manifest), seed=manifest.workload.seed, inner=inner_settings(manifest), members=members
    )
    points = []
    for number in range(rounds + 1):
        if number:
            training.train_round(steps)
        point = Point(
            round=number,
            tokens=training.tokens,
            wire_bytes=allreduce_bytes(nodes=members, steps=number * steps, numel=training.numel),
            val_loss=training.evaluate(),
        )
        points.append(point)
        tell(point)
    return points
