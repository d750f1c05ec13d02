"""The inner loop: an optimizer's steps on a replica, on this node's data; or gradients alone, for the swarm's step.

Plain torch, no pipes and no processes, so that it can be read, tested and timed by itself. What is owed to the swarm is
kept in `accounts`.

Source: DiLoCo, arXiv 2311.08105, algorithm 1, lines 4-9 (the outer step is the daemon's).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.collectives.schedule import learning_rate
from shoal.node.outcome import NOT_FINITE
from shoal.node.training.accounts import Accounts, GradientAccounts, GradientFlat, Outgoing
from shoal.node.training.flat_parameters import FlatParameters, own_buffers
from shoal.node.training.inner_optimizer import InnerOptimizer, inner_optimizer
from shoal.node.training.inner_state import BUFFER, InnerCounters, InnerState, SavedInner, keepable
from shoal.node.training.micro_batches import batch_digest, split_batch, to_device
from shoal.node.training.random_state import RandomState
from shoal.node.training.samples import Sampler
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import (
    Assignment,
    Contribution,
    InnerSettings,
    Progress,
    SyncSettings,
    Train,
    Trained,
)
from shoal.node.workload import OneUnitWorkload, Workload, batches_from, loss_of, value_of
from shoal.protocol.errors import ConfigError, LocalError

logger = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 1.0
SKIP_S = 1.0
"""Batches that were drawn before a restart are skipped for so long at a time: orders are looked at in between."""
NONFINITE_LIMIT_STEPS = 10
"""So many steps in a row with an infinite loss or gradient, and training has failed."""
SAME_FIRST_BATCH = (
    "round %s begins with the same batch as the round before: batches() is called once a round, so let what it yields "
    "depend on assignment.round or assignment.stream_seed, or most of the data is never read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    """Inner state that was read back and waits for the share of the data that it belongs to."""

    counters: InnerCounters
    random: RandomState


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Measurements since the newest contribution was written; times in seconds."""

    began: float
    steps: int = 0
    finite_steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    blocked_s: float = 0.0
    reported_seconds: float = 0.0
    reported_tokens: int = 0

    def mean_loss(self) -> float:
        return self.loss_sum / self.finite_steps if self.finite_steps else math.nan

    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """A contribution that is to be written as soon as its values are in host memory, and what it is reported with."""

    outgoing: Outgoing
    order: Train
    tally: _Tally
    wall_s: float


class Replica:
    """One node's live copy of the model, its inner optimizer, its batches, and its accounts.

    Lifetime: construct; `write_initial` for genesis; `restore` what an earlier process knew; `apply` the first anchor;
    then `begin` a stretch and `step` while it is `training`. A stretch goes on beyond its contribution by the steps of
    overlap, and those for a late anchor, after which it waits for `apply`. The optimizer's moments live through
    `apply`; beyond the process they live as far as `inner_state` was saved.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        inner: InnerSettings,
        device: torch.device,
        sync: SyncSettings | None = None,
        accumulate: int = 1,
        contributions: int = 0,
    ) -> None:
        self._workload = workload
        self._metric_per_loss = workload.metric_per_loss if isinstance(workload, OneUnitWorkload) else 1.0
        self._settings = inner
        self._device = device
        self._accumulate = accumulate
        self._gradients = sync is not None and sync.gradients
        self._chunk_values = (sync or SyncSettings()).chunk_values
        self._build(seed)
        self.layout = self._flat.layout
        self.accounts: Accounts | GradientAccounts
        if self._gradients:
            self.accounts = GradientAccounts(self._flat, contributions=contributions)
        else:
            self.accounts = Accounts(self._flat, sync=sync, contributions=contributions)
        self._order: Train | None = None
        self._order_steps = 0
        self._steps_wanted = 0  # until the order's contribution, or its end
        self._overlapping = False  # beyond its contribution
        self._settled: _Settled | None = None
        self._tally = _Tally(began=time.monotonic())
        self._assignment: Assignment | None = None
        self._batches: Iterator[Any] = iter(())
        self._drawn = 0  # batches of the assignment, with those that are still to be skipped
        self._to_skip = 0
        self._exhausted = False  # it has no more; who asks again gets them from the first one
        self._first: tuple[int, bytes] | None = None  # round, and hash of its first batch
        self._told: set[str] = set()  # what its user was warned of
        self._nonfinite_steps = 0
        self._restored: _Restored | None = None
        self._read: Sequence[torch.cuda.Event] = ()  # what the optimizer knows is being copied until then

    def _build(self, seed: int) -> None:
        """Make the model of that seed, and what copies it whole and moves it."""
        torch.manual_seed(seed)
        self.model = self._workload.build().to(self._device)
        # The swarm's AdamW decays all that travels; what is frozen stays here, as the seed has it.
        self._flat: GradientFlat = FlatParameters(
            self.model, frozen=not self._gradients, chunk_values=self._chunk_values
        )
        named = () if self._gradients else self.model.named_parameters()
        trained = [(name, value) for name, value in named if value.requires_grad]
        self._trained_names = tuple(name for name, _ in trained)
        parameters = [parameter for _, parameter in trained]
        self._optimizer: InnerOptimizer = inner_optimizer(self.model, parameters, self._settings)

    @property
    def training(self) -> bool:
        """True if there are steps to be made."""
        return self._order is not None

    @property
    def overlapping(self) -> bool:
        """True if steps are left to be made before the anchor after the newest contribution is applied."""
        return self._order is not None and self.accounts.overlap_left > 0

    @property
    def waiting(self) -> bool:
        """True if nothing can be done but wait for the anchor after the newest contribution."""
        return self._order is None and self.accounts.waiting

    def blocked(self, seconds: float) -> None:
        """Count the seconds for which it stood still, `waiting`."""
        self._tally.blocked_s += seconds

    def rest(self) -> None:
        """Leave the accelerator to others until `wake`: all that is on it goes to the host, at a step boundary.

        An evaluation meanwhile is made on the host. Memory that device and host share is left as it is.
        """
        if self._device.type == "cuda":
            self._move(torch.device("cpu"))
            torch._C._cuda_clearCublasWorkspaces()  # torch keeps them for the next products, and has no public name
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Come back from `rest`, with nothing changed."""
        if self._device.type == "cuda":
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Parameters stay the objects they are, with their values elsewhere; gradients are of no further use."""
        self._await_copies()
        self.model.zero_grad()
        self.model.to(device)
        self._optimizer.move(device)

    def write_initial(self, out: Vector) -> None:
        """Write the parameters drawn from the seed, S(0), into `out`, ``(numel,) float32``.

        Raises LocalError after the first `apply`: they are gone then.
        """
        self.accounts.write_initial(out)

    def apply(self, anchor: Vector, *, round: int | None = None, taken: int = 0, fresh: bool = False) -> None:
        """Stand on a new anchor, ``(numel,) float32``, and keep what nobody has taken of local progress.

        Ends a running stretch. `round`, `taken` and `fresh` are those of the message `Apply`, the rules those of
        `accounts`. Raises LocalError, with nothing changed, if `taken` cannot be.
        """
        first = self.accounts.base is None
        self.accounts.apply(anchor, round=round, taken=taken, fresh=fresh)
        self._order = None
        if first or fresh:
            self._tally = _Tally(began=time.monotonic())

    def retune(self, inner: InnerSettings, sync: SyncSettings) -> None:
        """Go on under amended settings; the optimizer's moments, progress and accounts stay."""
        self._settings = inner
        self._optimizer.decay(inner.weight_decay)
        self.accounts.retune(sync)

    def begin(self, order: Train) -> None:
        """Begin a stretch; one under way ends without a report, its steps stay in the replica and count."""
        if self.accounts.base is None:
            raise LocalError("a stretch was ordered before any anchor was applied")
        if order.steps < 1:
            raise LocalError(f"a stretch of {order.steps} steps")
        if order.assignment != self._assignment or self._exhausted:
            self._open_stream(order.assignment)
        self._order, self._order_steps, self._overlapping = order, 0, False
        self._steps_wanted = max(1, order.steps - self.accounts.steps) if order.contribute else order.steps

    def _open_stream(self, assignment: Assignment) -> None:
        """Begin with this share of the data, or go on in it where a restored trainer had come to."""
        torch.manual_seed(assignment.stream_seed)  # dropout too follows the share, not the past
        if self._restored is not None and self._restored.counters.assignment != assignment:
            self._restored = None
        self._drawn = self._restored.counters.drawn if self._restored is not None else 0
        self._batches, self._to_skip = self._stream(assignment)
        self._assignment, self._exhausted = assignment, False
        self._go_on_in_stream()

    def _stream(self, assignment: Assignment) -> tuple[Iterator[Any], int]:
        """The batches of this share after those drawn, and how many are to be skipped before that."""
        return batches_from(self._workload, assignment, self._drawn)

    def _skip(self) -> None:
        """Skip batches for `SKIP_S`, one at least."""
        ends_at = time.monotonic() + SKIP_S
        while self._to_skip:
            next(self._batches, None)
            self._to_skip -= 1
            if time.monotonic() >= ends_at:
                break
        self._go_on_in_stream()

    def _go_on_in_stream(self) -> None:
        """Have the random numbers of a restored trainer, once all batches are skipped that it had drawn."""
        if self._restored is not None and not self._to_skip:
            self._restored.random.restore(self._device)
            self._restored = None

    def step(self, out: Vector) -> Progress | Contribution | Trained | None:
        """Make one inner step, or skip batches that were drawn before a restart; return a report where one is due.

        The step that completes a contributing stretch settles base − local of the round's fragment, or where gradients
        are exchanged that of its batch. It or, where the values travel from a device meanwhile, a step of overlap soon
        after it writes them into `out` and returns the `Contribution`; see also `hand_over`. Raises LocalError without
        a stretch, ConfigError if there is no batch at all; whatever the workload raises passes through.
        """
        order, tally = self._order, self._tally
        if order is None:
            raise LocalError("a step without a stretch")
        if self._to_skip:
            self._skip()
            return None
        began = time.monotonic()
        batch = next(self._batches, None)
        if batch is None and self._drawn and not self._order_steps:  # they had ended with the stretch before this one
            self._open_stream(order.assignment)
            batch = next(self._batches, None)
        self._exhausted = batch is None
        if batch is None and self._drawn:
            self._warn_once("batches() ended after %s, and begins anew: it should not end by itself", self._drawn)
        if batch is not None:
            if not self._drawn:
                self._compare_first(batch, order.assignment.round)
            self._drawn += 1
            self._order_steps += 1
            tally.steps += 1
            self._optimize(batch, order)
        elif not self._order_steps:
            share = order.assignment
            raise ConfigError(
                f"the workload's batches() yielded nothing for member {share.member} of {share.members} "
                f"in round {share.round}; give this node more data, or the swarm fewer members"
            )
        tally.seconds += time.monotonic() - began
        if self._overlapping:
            self._order = order if batch is not None and self.accounts.goes_on else None
            last = batch is None or not self.accounts.overlap_left
            if self._settled is not None and (last or self._settled.outgoing.here):
                return self.hand_over(out)
        elif batch is None or self._order_steps >= self._steps_wanted:
            return self._contribute(order, out) if order.contribute else self._trained(order)
        return _progress(order, tally)

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory."""
        return self._flat.new_vector()

    def inner_state_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's state and the buffers that do not travel, by name; each is the live tensor."""
        buffers = [
            (f"{BUFFER}{name}", value) for name, value in own_buffers(self.model, self.layout) if keepable(value)
        ]
        return [*self._optimizer.state(self._trained_names), *buffers]

    def inner_state(self, round: int, *, midway: bool = False) -> InnerState:
        """Return what is to be kept for a restart, as it stands: live tensors, to be copied before any step.

        round: the last one whose contribution is in it. midway: see `Accounts.saved`. Raises before an `apply`.
        """
        restored = self._restored  # it has not come to where that was
        return InnerState.of(
            self.accounts.saved(round, midway=midway),
            self.layout,
            self._device,
            own=self.inner_state_tensors(),
            assignment=self._assignment if restored is None else restored.counters.assignment,
            drawn=self._drawn if restored is None else restored.counters.drawn,
            random=None if restored is None else restored.random,
        )

    def copied_at(self, events: Sequence[torch.cuda.Event]) -> None:
        """Leave the optimizer's state as it is until then: a copy of it is under way beside the computation."""
        self._read = (*self._read, *events)

    def _await_copies(self) -> None:
        """Have the device wait for copies that are under way; this process does not wait."""
        for event in self._read:
            event.wait(torch.cuda.current_stream(self._device))
        self._read = ()

    def restore(self, saved: SavedInner, *, exact: bool, spent: bool = False) -> None:
        """Take over what an earlier process knew, before the first `apply`.

        exact: the anchor to come is the one it stood before, so all of it holds; else only the optimizer's moments and
        the buffers do. spent: a contribution to the round after was made. Raises DamagedFile, with nothing changed, if
        it is of another model, and LocalError.
        """
        if self.accounts.base is not None:
            raise LocalError("a snapshot is to be restored after an anchor was applied")
        self._await_copies()
        own, counters = self.inner_state_tensors(), saved.counters
        saved.check_layout(self.layout.digest)
        for name, tensor in own:
            saved.check(name, tensor)
        if exact:
            self.accounts.restore(saved.accounts(self.layout.numel), spent=spent)
        for name, tensor in own:
            saved.copy_to(name, tensor)
        self._put_inner(own)
        if exact:
            saved.random.restore(self._device)
            self._restored = _Restored(counters=counters, random=saved.random)

    @torch.no_grad()
    def evaluate(self, sampler: Sampler | None = None) -> float:
        """Return the workload's metric of the base; the replica is untouched. Raises before an `apply`.

        sampler: takes samples of the base too, where it may.
        """
        base = self.accounts.base
        if base is None:
            raise LocalError("an evaluation was ordered before any anchor was applied")
        local = self._flat.set_aside()
        self._flat.scatter(base)
        try:
            value = self._measure(sampler)
        finally:
            self._flat.scatter(local)
        if not math.isfinite(value):
            self._warn_once(NOT_FINITE, value)
        return value

    def _compare_first(self, batch: Any, round: int) -> None:
        """Warn of a workload that begins every round alike: most of its data would never be read."""
        before, self._first = self._first, (round, batch_digest(batch))
        if before is not None and before[0] != round and before[1] == self._first[1]:
            self._warn_once(SAME_FIRST_BATCH, round)

    def _warn_once(self, text: str, value: float) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, value)

    def _measure(self, sampler: Sampler | None) -> float:
        """The workload's metric of the parameters as they are."""
        self.model.eval()
        try:
            began = time.perf_counter()
            value = value_of(self._workload, self.model)
            if sampler is not None:
                sampler.sample(self.model, evaluated_s=time.perf_counter() - began)
            return value
        finally:
            self.model.train()

    def _put_inner(self, own: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take over what was written to the tensors of `inner_state_tensors`. They are live here: that is all."""

    def _optimize(self, batch: Any, order: Train) -> None:
        """Take one step and account for it; a step that is not finite changes nothing.

        Where gradients are exchanged, the step is the swarm's, and so is clipping.
        """
        self.model.zero_grad()
        value, tokens = self._backward(batch)
        norm = self._clip(math.inf if self._gradients else self._settings.clip_norm)
        if not (math.isfinite(value) and math.isfinite(norm)):
            self.accounts.count(0)
            self._count_nonfinite(value, norm)
            return
        self._nonfinite_steps = 0
        self._tally.finite_steps += 1
        self._tally.loss_sum += value * self._metric_per_loss
        self._tally.tokens += tokens
        self.accounts.count(tokens)
        if not self._gradients:
            self._await_copies()
            self._optimizer.step(learning_rate(self._settings, order.certified_tokens + self.accounts.tokens))

    def _clip(self, limit: float) -> float:
        """Scale all gradients so that their norm is at most `limit`; returns what it was."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _backward(self, batch: Any) -> tuple[float, int]:
        """Leave the gradient of the batch's mean loss in the parameters; returns that loss, and its tokens.

        Of a batch in parts it is the mean of theirs, weighted by tokens, one part at a time on the device.
        """
        if self._accumulate == 1:
            loss, tokens = loss_of(self._workload, self.model, to_device(batch, self._device))
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach()), tokens
        total, counted = 0.0, 0
        for part in split_batch(batch, self._accumulate):
            loss, tokens = loss_of(self._workload, self.model, to_device(part, self._device))
            if tokens:  # the mean over nothing is no number
                (loss * tokens).backward()  # type: ignore[no-untyped-call]
                total, counted = total + float(loss.detach()) * tokens, counted + tokens
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(1, counted))
        return total / max(1, counted), counted

    def _count_nonfinite(self, loss: float, norm: float) -> None:
        self._nonfinite_steps += 1
        if self._nonfinite_steps >= NONFINITE_LIMIT_STEPS:
            raise FloatingPointError(
                f"loss {loss} or gradient norm {norm} not finite for {NONFINITE_LIMIT_STEPS} steps running; "
                "try a lower learning rate"
            )

    def _contribute(self, order: Train, out: Vector) -> Contribution | None:
        """Settle the contribution, and go on by the steps of overlap; without any wait until it is written."""
        outgoing = self.accounts.mark(order.round)
        tally, self._tally = self._tally, _Tally(began=time.monotonic())
        self._settled = _Settled(outgoing=outgoing, order=order, tally=tally, wall_s=self._tally.began - tally.began)
        self._overlapping = self.accounts.goes_on
        if not self._overlapping:
            self._order = None
        return self.hand_over(out) if outgoing.here or not self._overlapping else None

    def hand_over(self, out: Vector) -> Contribution | None:
        """Write a contribution that is settled, waiting for its device, and return the report; None if there is none.

        To be called before any order is followed: an anchor, or leaving the device, ends what it is made of.
        """
        settled, self._settled = self._settled, None
        if settled is None:
            return None
        written = settled.outgoing.write(out)
        order, tally = settled.order, settled.tally
        return Contribution(
            number=written.number,
            order=order.order,
            round=order.round,
            tokens=written.tokens,
            steps=tally.steps,
            loss=tally.mean_loss(),
            seconds=tally.seconds,
            tokens_per_s=tally.tokens_per_s(),
            wall_s=settled.wall_s,
            blocked_s=tally.blocked_s,
        )

    def _trained(self, order: Train) -> Trained:
        self._order, tally = None, self._tally
        return Trained(
            round=order.round,
            steps=self._order_steps,
            loss=tally.mean_loss(),
            seconds=tally.seconds,
            tokens_per_s=tally.tokens_per_s(),
        )


def _progress(order: Train, tally: _Tally) -> Progress | None:
    """Return a report if the previous one is `PROGRESS_PERIOD_S` of training ago."""
    seconds = tally.seconds - tally.reported_seconds
    if seconds < PROGRESS_PERIOD_S:
        return None
    tokens = tally.tokens - tally.reported_tokens
    tally.reported_seconds, tally.reported_tokens = tally.seconds, tally.tokens
    return Progress(
        round=order.round,
        step=tally.steps,
        loss=tally.mean_loss(),
        tokens_per_s=tokens / seconds,
    )
