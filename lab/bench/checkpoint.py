"""What a snapshot costs the trainer: the seconds it is blocked, beside one memory copy of the same bytes.

A replica with a model of plain matrices, whose AdamW moments are the state to be saved; the copy and the file are those
of a trainer in use. In turn: a snapshot, of which the blocked seconds are those between the order and the next step and
the rest is the writing beside it, and one copy of as many bytes from and to memory that was touched before, by the same
library. The medians of some such pairs, after one that warms up.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.lab.targets import Row, Target
from shoal.node.training.trainer_messages import Assignment, InnerSettings
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    import torch

MATRIX = 2048
"""Rows and columns of the model's matrices: 16 MB each."""
ELEMENT_BYTES = 4
MOMENTS = 2
BLOCKED = Target(name="the trainer is blocked for", unit="copies in memory", most=2.1)
"""Twice what it took when it was made (1.07): tensor by tensor it had been 4.7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpeed:
    """One entry per repetition: seconds blocked, seconds of one copy in memory, seconds of writing beside training."""

    state_bytes: int
    blocked_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    write_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many memory copies the trainer is blocked for."""
        return statistics.median(self.blocked_s) / statistics.median(self.copy_s)

    @property
    def write_mb_per_s(self) -> float:
        """MB/s (10^6 bytes) to disk, synced; the median."""
        return self.state_bytes / statistics.median(self.write_s) / 1e6

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was measured beside its target."""
        return (BLOCKED.row(self.ratio),)


class MatricesWorkload:
    """Nothing is learnt: matrices of zeros, enough for moments of that size."""

    metric = "no loss"

    def __init__(self, state_bytes: int) -> None:
        self._matrices = max(1, -(-state_bytes // (MOMENTS * ELEMENT_BYTES * MATRIX * MATRIX)))

    def build(self) -> torch.nn.Module:
        """As many matrices as give moments of the wanted size, at least one."""
        import torch

        return torch.nn.ParameterList(torch.zeros(MATRIX, MATRIX) for _ in range(self._matrices))

    def batches(self, assignment: Assignment) -> Iterator[object]:
        """None: no step is made."""
        return iter(())

    def loss(self, model: torch.nn.Module, batch: object) -> tuple[torch.Tensor, int]:
        """Nothing to learn from: `batches` has none. Raises LocalError."""
        raise LocalError("the checkpoint benchmark makes no step")

    def evaluate(self, model: torch.nn.Module) -> float:
        """Nothing is learnt."""
        return 0.0


def measure_checkpoint(*, state_mb: int, repetitions: int, folder: Path | None = None) -> CheckpointSpeed:
    """Measure in this process; files go to `folder`, by default where temporary files go, and are removed."""
    import torch

    from shoal.node.training.inner_loop import Replica
    from shoal.node.training.inner_state import Snapshotter

    workload = MatricesWorkload(state_mb * 1_000_000)
    replica = Replica(workload, seed=0, inner=InnerSettings(), device=torch.device("cpu"))
    replica.apply(replica.new_vector().numpy())
    state_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in replica.inner_state_tensors())
    source, target = (torch.ones(state_bytes, dtype=torch.uint8) for _ in range(2))
    snapshotter = Snapshotter()
    snapshotter.reserve(replica.inner_state_bytes())
    blocked, copied, written = [], [], []
    with tempfile.TemporaryDirectory(dir=folder, prefix="shoal-bench-") as scratch:
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            writing = snapshotter.take(replica.inner_state(0), Path(scratch) / "trainer")
            blocked.append(time.perf_counter() - began)
            outcome = writing.write()
            snapshotter.done()
            if outcome.failure:
                raise OSError(outcome.failure)
            written.append(outcome.write_s)
            began = time.perf_counter()
            target.copy_(source)
            copied.append(time.perf_counter() - began)
    return CheckpointSpeed(
        state_bytes=state_bytes,
        blocked_s=tuple(blocked[1:]),
        copy_s=tuple(copied[1:]),
        write_s=tuple(written[1:]),
    )
