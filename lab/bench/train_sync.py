"""Synchronous data parallel, exactly, in one process: what every strategy is compared with.

    gradient(step) = Σ tokensₘ · gradientₘ ÷ Σ tokensₘ      over the n members' batches of that step
    one AdamW step with it, on one model

That is one replica whose batch is the n members' batches and whose loss is their mean, weighted by tokens. So it is
run by the very `Replica` that a node trains with: schedule, clipping and optimizer cannot differ.

After each evaluation a checkpoint has the curve so far, the model and what the optimizer knows. Batches and dropout
follow from the round's number (`Assignment.stream_seed`), so a run that goes on from there is the uninterrupted one, to
the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from shoal.cli.logs import FOR_USER
from shoal.lab.bench.machine import device_name
from shoal.lab.bench.train_spec import CPU, Point, inner_settings, workload_of
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train, Trained
from shoal.node.workload import Workload
from shoal.protocol.manifest import Manifest
from shoal.testnet.reports.report import allreduce_bytes

CHECKPOINT: Final = "checkpoint"

log = logging.getLogger(FOR_USER)


class _Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures that a checkpoint holds beside its tensors.

    run: what its numbers follow from. scheduled: tokens that the learning rate goes by.
    """

    run: str
    scheduled: int
    points: tuple[Point, ...]


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
        device: torch.device = CPU,
    ) -> None:
        self._workload = JoinedWorkload(workload, members)
        self._seed = seed
        self._members = members
        self._replica = Replica(self._workload, seed=seed, inner=inner, device=device)
        self._nowhere = np.zeros(self.numel, np.float32)
        self._replica.write_initial(self._nowhere)
        self._replica.apply(self._nowhere)
        self.round = 0
        self._scheduled = 0  # tokens that the learning rate goes by, of rounds before a checkpoint

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
        order = Train(
            round=self.round, steps=steps, assignment=share, contribute=False, certified_tokens=self._scheduled
        )
        self._replica.begin(order)
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

    @property
    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All that later rounds depend on, by name; each is the live tensor."""
        model = [(f"model.{name}", value) for name, value in self.model.state_dict().items()]
        return [*model, *self._replica.inner_state_tensors()]

    def save(self, path: Path, run: str, points: Sequence[Point]) -> None:
        """Write a checkpoint between two rounds, atomically. Raises StorageError."""
        scheduled = self._scheduled + self._replica.accounts.tokens
        kept = _Checkpoint(run=run, scheduled=scheduled, points=tuple(points))
        tensors = [TensorBytes.of(name, _bytes_of(tensor).cpu().numpy()) for name, tensor in self._tensors]
        write_tensors(path, tensors, {CHECKPOINT: msgspec.json.encode(kept).decode()}, option="--out")

    def resume(self, path: Path, run: str) -> list[Point]:
        """Stand where a checkpoint of the same run was written, and return the curve up to there.

        Raises FileNotFoundError, DamagedFile; then nothing has changed.
        """
        file = TensorFile(path)
        file.check_whole()
        try:
            kept = msgspec.json.decode(file.metadata[CHECKPOINT], type=_Checkpoint)
        except (KeyError, msgspec.MsgspecError) as error:
            raise DamagedFile(f"{path} is no checkpoint of synchronous training ({error}); remove it") from None
        live = {name: _bytes_of(tensor) for name, tensor in self._tensors}
        shapes = {name: file.shape(name) for name in file.names}
        if kept.run != run or shapes != {name: tuple(memory.shape) for name, memory in live.items()}:
            raise DamagedFile(
                f"{path} is of other settings, or another number of threads; choose another --out to keep it"
            )
        for name, memory in live.items():
            memory.copy_(torch.from_numpy(file.array(name)))
        self.round, self._scheduled = kept.points[-1].round, kept.scheduled
        self._workload.tokens = kept.points[-1].tokens
        return list(kept.points)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def train_synchronously(
    manifest: Manifest,
    *,
    members: int,
    rounds: int,
    tell: Callable[[Sequence[Point]], None] = lambda _: None,
    checkpoint: Path | None = None,
    device: torch.device = CPU,
    text: Path | None = None,
) -> list[Point]:
    """The curve of `rounds` rounds, each of the manifest's steps: a point before the first and after each.

    checkpoint: a file to go on from, if it is of the same run, and to keep up to date. tell: takes the curve so far.
    text: a folder to read in place of the default one.
    Raises ConfigError, FloatingPointError, StorageError. Takes as long as all nodes' steps one after the other.
    """
    steps = manifest.sync.round_steps
    training = SynchronousTraining(
        workload_of(manifest, text),
        seed=manifest.workload.seed,
        inner=inner_settings(manifest),
        members=members,
        device=device,
    )
    settings = (members, steps, torch.get_num_threads(), manifest.workload, manifest.inner, device_name(device))
    run = msgspec.json.encode((*settings, str(text or "")), order="deterministic").decode()
    points = [] if checkpoint is None else _resumed(training, checkpoint, run)
    while len(points) <= rounds:
        if points:
            training.train_round(steps)
        point = Point(
            round=training.round,
            tokens=training.tokens,
            wire_bytes=allreduce_bytes(nodes=members, steps=training.round * steps, numel=training.numel),
            val_loss=training.evaluate(),
        )
        points.append(point)
        if checkpoint is not None:
            training.save(checkpoint, run, points)
        tell(points)
    return points


def _resumed(training: SynchronousTraining, checkpoint: Path, run: str) -> list[Point]:
    """The curve up to a checkpoint, or none; why one that is there is of no use is logged."""
    try:
        return training.resume(checkpoint, run)
    except FileNotFoundError:
        return []
    except DamagedFile as error:
        log.warning("%s: synchronous training begins anew", error)
        return []
