"""`shoal bench checkpoint`: the seconds that a snapshot blocks the trainer, beside one memory copy of its bytes.

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
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, Spec
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.training.trainer_messages import Assignment, InnerSettings
from shoal.protocol.errors import ConfigError, LocalError

if TYPE_CHECKING:
    import torch

MATRIX = 2048
"""Rows and columns of the model's matrices: 16 MB each."""
ELEMENT_BYTES = 4
MOMENTS = 2
BLOCKED = Target(name="the trainer is blocked for", unit="copies in memory", most=2.1)
"""Twice what it took when it was made (1.07): tensor by tensor it had been 4.7."""


def _check_folder(path: Path, option: str) -> None:
    if not path.is_dir():
        raise ConfigError(f"{option}: there is no folder {path}; check the path")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBench(Spec):
    """Options of `shoal bench checkpoint`. folder: where files go, which are removed."""

    state_mb: Annotated[
        int,
        Option("--state-mb", help="MB (10^6 bytes) of optimizer state in a snapshot.", check=Within(1, 1_000_000)),
    ] = 1000
    repetitions: Annotated[
        int, Option("--repetitions", help="Measured pairs; one more warms up.", check=Within(1, 1000))
    ] = 5
    folder: Annotated[
        Path | None,
        Option("--folder", help="Whose disk to write to; by default the temporary folder's.", check=_check_folder),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpeed:
    """One entry per repetition: seconds blocked, seconds of one copy in memory, seconds of writing beside training."""

    state_bytes: int
    blocked_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    write_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Time for which the trainer is blocked, in memory copies of the same state."""
        return statistics.median(self.blocked_s) / statistics.median(self.copy_s)

    @property
    def write_mb_per_s(self) -> float:
        """MB/s (10^6 bytes) to disk, synced; the median."""
        return self.state_bytes / statistics.median(self.write_s) / 1e6

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured value, with its target."""
        return (BLOCKED.row(self.ratio),)


class MatricesWorkload:
    """Workload that learns nothing: matrices of zeros, enough for moments of that size."""

    metric = "no loss"

    def __init__(self, state_bytes: int) -> None:
        self._matrices = max(1, -(-state_bytes // (MOMENTS * ELEMENT_BYTES * MATRIX * MATRIX)))

    def build(self) -> torch.nn.Module:
        """Make as many matrices as give moments of the wanted size, at least one."""
        import torch

        return torch.nn.ParameterList(torch.zeros(MATRIX, MATRIX) for _ in range(self._matrices))

    def batches(self, assignment: Assignment) -> Iterator[object]:
        """Yield no batches: no step is made."""
        return iter(())

    def loss(self, model: torch.nn.Module, batch: object) -> tuple[torch.Tensor, int]:
        """Raise LocalError: `batches` has none to learn from."""
        raise LocalError("the checkpoint benchmark makes no step")

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return 0: nothing is learnt."""
        return 0.0


def run(bench: CheckpointBench, tell: ShowNow) -> CheckpointSpeed:
    """Take snapshots of a trainer, and copy as many bytes in memory in between."""
    import torch

    from shoal.node.training.inner_loop import Replica
    from shoal.node.training.inner_state import Snapshotter

    workload = MatricesWorkload(bench.state_mb * 1_000_000)
    replica = Replica(workload, seed=0, inner=InnerSettings(), device=torch.device("cpu"))
    replica.apply(replica.new_vector().numpy())
    state_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in replica.inner_state_tensors())
    source, target = (torch.ones(state_bytes, dtype=torch.uint8) for _ in range(2))
    snapshotter = Snapshotter()
    blocked, copied, written = [], [], []
    with tempfile.TemporaryDirectory(dir=bench.folder, prefix="shoal-bench-") as scratch:
        for _ in range(bench.repetitions + 1):
            began = time.perf_counter()
            writing = snapshotter.take(replica.inner_state(0), Path(scratch) / "trainer")
            blocked.append(time.perf_counter() - began)
            outcome = writing.write()
            snapshotter.done()
            snapshotter.prepare()
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


def to_document(speed: CheckpointSpeed) -> dict[str, object]:
    """Return medians, and every run in the order of measuring."""
    return {
        "state_bytes": speed.state_bytes,
        "blocked_s": round(statistics.median(speed.blocked_s), 6),
        "copy_s": round(statistics.median(speed.copy_s), 6),
        "ratio": round(speed.ratio, 3),
        "write_mb_per_s": round(speed.write_mb_per_s, 1),
        "blocked_runs_s": [round(seconds, 6) for seconds in speed.blocked_s],
        "copy_runs_s": [round(seconds, 6) for seconds in speed.copy_s],
        "write_runs_s": [round(seconds, 6) for seconds in speed.write_s],
    }


CASE: Final = Case(spec=CheckpointBench, run=run, document=to_document)
