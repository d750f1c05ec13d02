"""A replica whose model is held by several processes: what rank 0 does with its accounts, and has the others do.

The inner loop and the accounts are those of `inner_loop`, in rank 0 alone. Where one process would use its model, this
one tells the other ranks what is to be done and does its own part of it (`shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shoal.node.training.flat_parameters import CopyMade, HostCopy, HostFlat, joined
from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import InnerState, SavedInner
from shoal.node.training.rank_messages import Clip, Decay, Do, Move, Open, RankStart
from shoal.node.training.ranks import Ranks
from shoal.node.training.samples import Sampler
from shoal.node.training.shard import Shard, join_group, rank_device
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import Assignment, Start
from shoal.node.workload import Workload


class ShardedFlat(HostFlat):
    """The parameters of all ranks as rank 0's host vector: what `accounts.Flat` asks for."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self._shard = shard
        self._ranks = ranks
        self.layout = shard.layout
        self.block_values = shard.layout.numel  # each update copies all there is

    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the parameters into `out`, ``(numel,) float32``, and return it."""
        self._ranks.tell(Do(what="gather"))
        self._shard.gather(out)
        return out

    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the gradients into `out`, ``(numel,) float32``; zeros for parameters that have none."""
        self._ranks.tell(Do(what="gather_gradients"))
        self._shard.gather_gradients(out)

    def scatter(self, vector: torch.Tensor) -> None:
        """Copy `vector`, ``(numel,) float32``, into the parameters of all ranks."""
        self._ranks.tell(Do(what="scatter"))
        self._shard.scatter(vector)

    def copy_out(self, spans: Sequence[slice]) -> HostCopy:
        """A host copy of the parameters there, of all ranks."""
        return CopyMade(joined(self.gather(self.new_vector()), spans))

    def update(self, spans: Sequence[slice], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the parameters there, of all ranks, by what `change` makes of a host copy of them."""
        whole = self.gather(self.new_vector())
        values, at = change(joined(whole, spans)), 0
        for span in spans:
            whole[span] = values[at : at + span.stop - span.start]
            at += span.stop - span.start
        self.scatter(whole)


class ShardedOptimizer:
    """The optimizers of all ranks, as the inner loop uses its own."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self._shard = shard
        self._ranks = ranks

    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient."""
        self._ranks.tell(Move(lr=lr))
        self._shard.move(lr)

    def decay(self, weight_decay: float) -> None:
        """Decay by this from the next step on, in all ranks."""
        self._ranks.tell(Decay(weight_decay=weight_decay))
        self._shard.decay(weight_decay)

    def state(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """All that it knows, whole, copied to the host: writing to it changes nothing. names: of the parameters."""
        self._ranks.tell(Do(what="gather_inner"))
        return self._shard.gather_moments()

    def move(self, device: torch.device) -> None:
        """Stay: parts are where their process has its device."""


class ShardedReplica(Replica):
    """`Replica` over a group of processes, seen from rank 0."""

    def __init__(self, workload: Workload, start: Start, *, ranks: Ranks) -> None:
        """Have all ranks build the workload's model, and keep a part of it each. Raises ConfigError."""
        device = rank_device(start.device, 0, ranks.processes)
        self.device_type = device.type
        self._start = start
        self._ranks = ranks
        self._resting = False
        for rank in range(1, ranks.processes):
            ranks.tell_rank(rank, RankStart(start=start, rank=rank, processes=ranks.processes))
        join_group(ranks.store, rank=0, processes=ranks.processes, device=device)
        super().__init__(
            workload,
            seed=start.seed,
            inner=start.inner,
            device=device,
            sync=start.sync,
            accumulate=start.accumulate,
            contributions=start.contributions,
        )

    def _build(self, seed: int) -> None:
        self._shard = Shard(self._workload, self._start, rank=0, processes=self._ranks.processes, device=self._device)
        self.model = self._shard.model
        self._trained_names = self._shard.moved_names
        self._flat = ShardedFlat(self._shard, self._ranks)
        self._optimizer = ShardedOptimizer(self._shard, self._ranks)

    def _stream(self, assignment: Assignment) -> tuple[Iterator[Any], int]:
        self._ranks.tell(Open(assignment=assignment, drawn=self._drawn))
        to_skip = self._shard.open(assignment, self._drawn)
        return self._drawn_batches(), to_skip

    def _drawn_batches(self) -> Iterator[Any]:
        while (batch := self._shard.draw()) is not None:
            yield batch

    def _backward(self, batch: Any) -> tuple[float, int]:
        self._ranks.tell(Do(what="backward"))
        return self._shard.backward(batch)

    def _clip(self, limit: float) -> float:
        self._ranks.tell(Clip(norm=limit))
        return self._shard.clip(limit)

    def _measure(self, sampler: Sampler | None) -> float:
        """Measure with the other ranks; there are no samples, as no rank has the whole model to go on with."""
        self._ranks.tell(Do(what="measure"))
        return self._shard.measure()

    def _put_inner(self, own: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._ranks.tell(Do(what="scatter_inner"))
        self._shard.scatter_moments(dict(own))
        self._shard.share_buffers()

    def rest(self) -> None:
        """Leave the devices to others until `wake`: the parts go to the host, at a step boundary.

        What is asked of them meanwhile, such as a new anchor or an evaluation, takes them back for as long as it takes.
        """
        self._ranks.tell(Do(what="rest"))
        self._shard.rest()
        self._resting = True

    def wake(self) -> None:
        """Come back from `rest`, with nothing changed."""
        self._ranks.tell(Do(what="wake"))
        self._shard.wake()
        self._resting = False

    @contextmanager
    def _awake(self) -> Iterator[None]:
        resting = self._resting
        if resting:
            self.wake()
        try:
            yield
        finally:
            if resting:
                self.rest()

    def write_initial(self, out: Vector) -> None:
        """Write the initial parameters as one process does."""
        with self._awake():
            super().write_initial(out)

    def restore(self, saved: SavedInner, *, exact: bool, spent: bool = False) -> None:
        """Take over a snapshot as one process does."""
        with self._awake():
            super().restore(saved, exact=exact, spent=spent)

    def apply(self, anchor: Vector, *, round: int | None = None, taken: int = 0, fresh: bool = False) -> None:
        """Apply an anchor as one process does."""
        with self._awake():
            super().apply(anchor, round=round, taken=taken, fresh=fresh)

    def evaluate(self, sampler: Sampler | None = None) -> float:
        """Evaluate as one process does."""
        with self._awake():
            return super().evaluate(sampler)

    def inner_state(self, round: int, *, midway: bool = False) -> InnerState:
        """Return the inner state as one process does."""
        with self._awake():
            return super().inner_state(round, midway=midway)
