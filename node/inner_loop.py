"""The inner loop: AdamW steps on a replica, and the accounts of what it owes the swarm.

Plain torch, no pipes and no processes, so that it can be read, tested and timed by itself. The rules by which
progress is counted once stand at the top of `trainer_messages`; `Replica.apply` is where they are kept.

Source: DiLoCo, arXiv 2311.08105, algorithm 1, lines 4-9 (the outer step is the daemon's).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.node.adamw import AdamW
from shoal.node.flat_parameters import FlatParameters
from shoal.node.inner_state import InnerCounters, InnerState, SavedInner, keepable, room_bytes
from shoal.node.random_state import RandomState
from shoal.node.shared_tensors import Vector
from shoal.node.trainer_messages import (
    Assignment,
    Contribution,
    InnerSettings,
    Progress,
    Train,
    Trained,
)
from shoal.node.workload import Workload, batches_from
from shoal.protocol.errors import ConfigError, LocalError

PROGRESS_PERIOD_S = 1.0
NONFINITE_LIMIT_STEPS = 10
"""So many steps in a row with an infinite loss or gradient, and training has failed."""


def pick_device(wanted: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``mps`` into a device. Raises `ConfigError` if it is not there."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if wanted == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    if not present.get(wanted.partition(":")[0], False):
        there = ", ".join(name for name, there in present.items() if there)
        raise ConfigError(f"device {wanted!r} is not available here; use auto or one of: {there}")
    return torch.device(wanted)


def warmed_up(settings: InnerSettings, tokens: int) -> float:
    """Return the learning rate once the swarm has seen `tokens`: linear from near 0, then constant."""
    if tokens >= settings.warmup_tokens:
        return settings.lr
    return settings.lr * (tokens + 1) / settings.warmup_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The replica as it was when contribution `number` was written."""

    number: int
    local: torch.Tensor
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    """What was read back and waits for the anchor, or for the share of the data, that it belongs to."""

    kept: torch.Tensor | None
    counters: InnerCounters
    random: RandomState


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """The running `Train` order and what has been measured of it."""

    order: Train
    steps: int = 0
    finite_steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    reported_seconds: float = 0.0
    reported_tokens: int = 0

    def mean_loss(self) -> float:
        return self.loss_sum / self.finite_steps if self.finite_steps else math.nan

    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Replica:
    """One node's live copy of the model, its inner optimizer, and the three vectors of its accounts.

    Lifetime: construct; `write_initial` for genesis; `restore` what an earlier process knew; `apply` the first anchor;
    then `begin` stretches and `step` until one is over. The optimizer's moments live through `apply`; beyond the
    process they live as far as `inner_state` was saved.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        inner: InnerSettings,
        device: torch.device,
        contributions: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = workload.build().to(device)
        self._workload = workload
        self._settings = inner
        self._device = device
        self._flat = FlatParameters(self.model)
        self.layout = self._flat.layout
        trained = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
        self._trained_names = tuple(name for name, _ in trained)
        self._optimizer = AdamW(
            (parameter for _, parameter in trained),
            betas=inner.betas,
            weight_decay=inner.weight_decay,
        )
        self._base: torch.Tensor | None = None
        self._mark: _Mark | None = None
        self._tokens = 0  # of all work in local − base
        self._issued = contributions
        self._settled = contributions  # numbers up to this one belong to earlier bases
        self._stretch: _Stretch | None = None
        self._assignment: Assignment | None = None
        self._batches: Iterator[Any] = iter(())
        self._drawn = 0  # batches of the assignment
        self._nonfinite_steps = 0
        self._restored: _Restored | None = None

    @property
    def training(self) -> bool:
        """Whether a stretch is under way."""
        return self._stretch is not None

    def write_initial(self, out: Vector) -> None:
        """Write the parameters drawn from the seed, S(0), into `out`, ``(numel,) float32``.

        Raises `LocalError` after the first `apply`: they are gone then.
        """
        if self._base is not None:
            raise LocalError("the initial parameters are asked for after an anchor was applied")
        self._flat.gather(torch.from_numpy(out))

    def apply(self, anchor: Vector, *, taken: int = 0, fresh: bool = False) -> None:
        """Stand on a new anchor, ``(numel,) float32``, and keep what nobody has taken of local progress.

        Ends a running stretch. `taken` and `fresh` are those of the message `Apply`. Raises `LocalError`,
        with nothing changed, if `taken` names neither the mark nor a number older than this base.
        """
        kept: torch.Tensor | None = None
        kept_tokens = 0
        if self._base is not None and not fresh:
            since, counted = self._taken_until(taken, self._base)
            kept = self._local().sub_(since)
            kept_tokens = self._tokens - counted
        elif self._base is None and self._restored is not None and self._restored.kept is not None:
            kept, kept_tokens = self._restored.kept, self._restored.counters.kept_tokens
        base = self._base if self._base is not None else self._flat.new_vector()
        np.copyto(base.numpy(), anchor)
        self._flat.scatter(base if kept is None else kept.add_(base))
        self._base = base
        self._mark = None
        self._tokens = kept_tokens
        self._settled = self._issued if fresh else max(self._settled, taken)
        self._stretch = None

    def begin(self, order: Train) -> None:
        """Begin a stretch; one under way ends without a report, its steps stay in the replica."""
        if self._base is None:
            raise LocalError("a stretch was ordered before any anchor was applied")
        if order.steps < 1:
            raise LocalError(f"a stretch of {order.steps} steps")
        if order.assignment != self._assignment:
            self._open_stream(order.assignment)
        self._stretch = _Stretch(order=order)

    def _open_stream(self, assignment: Assignment) -> None:
        """Begin with this share of the data, or go on in it where a restored trainer had come to."""
        torch.manual_seed(assignment.stream_seed)  # dropout too follows the share, not the past
        restored, self._restored = self._restored, None
        resumed = restored is not None and restored.counters.assignment == assignment
        self._drawn = restored.counters.drawn if restored is not None and resumed else 0
        self._batches = batches_from(self._workload, assignment, self._drawn)
        self._assignment = assignment
        if restored is not None and resumed:
            restored.random.restore(self._device)

    def step(self, out: Vector) -> Progress | Contribution | Trained | None:
        """Make one inner step; return a report where one is due.

        The step that completes a contributing stretch writes base − local into `out` before it returns the
        `Contribution`. Raises `LocalError` without a stretch; whatever the workload raises passes through.
        """
        stretch = self._stretch
        if stretch is None:
            raise LocalError("a step without a stretch")
        began = time.monotonic()
        batch = next(self._batches, None)
        if batch is not None:
            self._drawn += 1
            self._optimize(batch, stretch)
            stretch.steps += 1
        elif not stretch.steps:
            raise RuntimeError("the workload's batches() ended before it yielded one batch")
        stretch.seconds += time.monotonic() - began
        if batch is None or stretch.steps >= stretch.order.steps:
            self._stretch = None
            return self._contribute(stretch, out) if stretch.order.contribute else _trained(stretch)
        return _progress(stretch)

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory."""
        return self._flat.new_vector()

    def inner_state_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's state, and of the model what does not travel, by name; each is the live tensor."""
        travelling = set(self.layout.names)
        buffers = [
            (f"buffer.{name}", value)
            for name, value in self.model.state_dict().items()
            if name not in travelling and isinstance(value, torch.Tensor) and keepable(value)
        ]
        return [*self._optimizer.state(self._trained_names), *buffers]

    def inner_state(self, round: int) -> InnerState:
        """What is to be kept of this replica for a restart, as it stands: live tensors, to be copied before any step.

        round: the last one whose contribution is in it. Raises before an `apply`.
        """
        if self._base is None:
            raise LocalError("a snapshot was ordered before any anchor was applied")
        since, counted = (self._base, 0) if self._mark is None else (self._mark.local, self._mark.tokens)
        kept = [("kept", self._local().sub_(since))] if self._tokens != counted else []
        counters = InnerCounters(
            layout=self.layout.digest.hex(),
            round=round,
            kept_tokens=self._tokens - counted,
            assignment=self._assignment,
            drawn=self._drawn,
        )
        return InnerState([*self.inner_state_tensors(), *kept], counters, RandomState.capture(self._device))

    def inner_state_bytes(self) -> int:
        """How much memory a copy of it takes, as long as no progress is to be kept."""
        return room_bytes(tensor for _, tensor in self.inner_state_tensors())

    def restore(self, saved: SavedInner, *, exact: bool) -> None:
        """Take over what an earlier process knew, before the first `apply`.

        exact: the anchor to come is the one it stood before, so all of it holds; else only the optimizer's moments and
        the buffers do. Raises DamagedFile, with nothing changed, if it is of another model, and LocalError.
        """
        if self._base is not None:
            raise LocalError("a snapshot is to be restored after an anchor was applied")
        own = self.inner_state_tensors()
        saved.check_layout(self.layout.digest)
        for name, tensor in own:
            saved.check(name, tensor)
        kept: torch.Tensor | None = None
        if exact and saved.has("kept"):
            saved.copy_to("kept", kept := self._flat.new_vector())
        for name, tensor in own:
            saved.copy_to(name, tensor)
        if exact:
            saved.random.restore(self._device)
            self._restored = _Restored(kept=kept, counters=saved.counters, random=saved.random)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the workload's metric of the base; the replica is untouched. Raises before an `apply`."""
        if self._base is None:
            raise LocalError("an evaluation was ordered before any anchor was applied")
        local = self._local()
        self._flat.scatter(self._base)
        self.model.eval()
        try:
            return float(self._workload.evaluate(self.model))
        finally:
            self.model.train()
            self._flat.scatter(local)

    def _local(self) -> torch.Tensor:
        """Return a host copy of the replica, ``(numel,) float32``."""
        return self._flat.gather(self._flat.new_vector())

    def _taken_until(self, taken: int, base: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the point up to which progress is the daemon's, and the tokens between base and there."""
        if self._mark is not None and taken == self._mark.number:
            return self._mark.local, self._mark.tokens
        if taken <= self._settled:
            return base, 0
        raise LocalError(f"contribution {taken} was taken, but a later one or an anchor has replaced it")

    def _optimize(self, batch: Any, stretch: _Stretch) -> None:
        """Take one AdamW step and account for it; a step that is not finite changes nothing."""
        self._optimizer.zero_grad()
        loss, tokens = self._workload.loss(self.model, _to_device(batch, self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_norm))
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._count_nonfinite(value, norm)
            return
        self._nonfinite_steps = 0
        stretch.finite_steps += 1
        stretch.loss_sum += value
        stretch.tokens += int(tokens)
        self._tokens += int(tokens)
        self._optimizer.step(warmed_up(self._settings, stretch.order.certified_tokens + self._tokens))

    def _count_nonfinite(self, loss: float, norm: float) -> None:
        self._nonfinite_steps += 1
        if self._nonfinite_steps >= NONFINITE_LIMIT_STEPS:
            raise FloatingPointError(
                f"loss {loss} or gradient norm {norm} not finite for {NONFINITE_LIMIT_STEPS} steps running; "
                "try a lower learning rate"
            )

    def _contribute(self, stretch: _Stretch, out: Vector) -> Contribution:
        """Write base − local into `out` and set the mark there."""
        assert self._base is not None
        local = self._local()
        np.subtract(self._base.numpy(), local.numpy(), out=out)
        if not np.isfinite(out).all():
            raise FloatingPointError("the replica's parameters are no longer finite")
        self._issued += 1
        self._mark = _Mark(number=self._issued, local=local, tokens=self._tokens)
        return Contribution(
            number=self._issued,
            order=stretch.order.order,
            round=stretch.order.round,
            tokens=self._tokens,
            steps=stretch.steps,
            loss=stretch.mean_loss(),
            seconds=stretch.seconds,
            tokens_per_s=stretch.tokens_per_s(),
        )


def _trained(stretch: _Stretch) -> Trained:
    return Trained(
        round=stretch.order.round,
        steps=stretch.steps,
        loss=stretch.mean_loss(),
        seconds=stretch.seconds,
        tokens_per_s=stretch.tokens_per_s(),
    )


def _progress(stretch: _Stretch) -> Progress | None:
    """Return a report if the previous one is `PROGRESS_PERIOD_S` of training ago."""
    seconds = stretch.seconds - stretch.reported_seconds
    if seconds < PROGRESS_PERIOD_S:
        return None
    tokens = stretch.tokens - stretch.reported_tokens
    stretch.reported_seconds, stretch.reported_tokens = stretch.seconds, stretch.tokens
    return Progress(
        round=stretch.order.round,
        step=stretch.steps,
        loss=stretch.mean_loss(),
        tokens_per_s=tokens / seconds,
    )


def _to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, in tuples, lists and dicts; leave everything else alone."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        items = [_to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, dict):
        return {key: _to_device(item, device) for key, item in batch.items()}
    return batch
