"""A workload that costs next to nothing: its pseudo-gradients are drawn from a seed. For measuring all the rest.

The contribution of a member is a function of its assignment, so whoever knows the seed can recompute a whole run to
the bit. Training is one subtraction: values are in a parameter without gradient, and the optimizer has a single number
to work on, which stays zero.

With `data`, a folder, a round waits at its gate before it draws: while somebody holds the file named like the round
locked, no member contributes to it. So a benchmark lets rounds begin one by one, without the nodes knowing.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.collectives.codecs import F32
from shoal.node.training.trainer_messages import Assignment

if TYPE_CHECKING:
    import torch

WORKLOAD_NAME = "shoal.lab.bench.synthetic:SyntheticWorkload"
TRAINED_NAME = "shoal.lab.bench.synthetic:TrainedWorkload"
TOKENS = 1
"""Weight of a step."""


def drawn_values(stream_seed: int, numel: int) -> F32:
    """Values that a member takes off its replica, (numel,) float32: uniform in [-0.5, 0.5), the first zero."""
    generator = np.random.Generator(np.random.SFC64(stream_seed))
    values = generator.random(numel, dtype=np.float32)
    np.subtract(values, np.float32(0.5), out=values)
    values[0] = 0.0
    return values


class IdleWorkload:
    """`numel` parameters that begin at zero, and that no optimizer moves; what a step takes off them, a subclass says.

    Its loss is zero, and so is its gradient.
    """

    metric = "no loss"

    def __init__(self, numel: int) -> None:
        self._numel = numel

    def build(self) -> torch.nn.Module:
        """Zeros, all but one of them without gradient."""
        import torch

        vector = torch.nn.Parameter(torch.zeros(self._numel - 1), requires_grad=False)
        return torch.nn.ParameterDict({"idle": torch.nn.Parameter(torch.zeros(1)), "vector": vector})

    def take(self, model: torch.nn.Module, amount: torch.Tensor | float) -> tuple[torch.Tensor, int]:
        """Take that off the values, and return a step's loss and tokens."""
        model.get_parameter("vector").sub_(amount)
        return model.get_parameter("idle").sum() * 0.0, TOKENS

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return 0: nothing is learnt."""
        return 0.0


class SyntheticWorkload(IdleWorkload):
    """Every round takes what was drawn."""

    def __init__(self, numel: int = 1_000_000, data: str | None = None) -> None:
        super().__init__(numel)
        self._gates = None if data is None else Path(data)

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Draw once for this member and round; then nothing more."""
        import torch

        if self._gates is not None:
            _pass(self._gates / str(assignment.round))
        yield torch.from_numpy(drawn_values(assignment.stream_seed, self._numel))
        while True:
            yield torch.zeros(1).expand(self._numel)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Take the batch off the values."""
        return self.take(model, batch[1:])


ROW_VALUES = 1024
"""Of a matrix of `TrainedWorkload`: it has as many rows."""


class TrainedWorkload:
    """Matrices of some `numel` parameters that an optimizer moves: as much memory as a model takes, but for layers.

    With `data`, a round waits at its gate likewise.
    """

    metric = "no loss"

    def __init__(self, numel: int = 1_000_000, data: str | None = None) -> None:
        self._rows = numel // ROW_VALUES
        self._gates = None if data is None else Path(data)

    def build(self) -> torch.nn.Module:
        """Square matrices, and one of the rows that are left."""
        import torch

        rows = [min(ROW_VALUES, self._rows - at) for at in range(0, self._rows, ROW_VALUES)]
        return torch.nn.ParameterList(torch.nn.Parameter(torch.randn(count, ROW_VALUES)) for count in rows)

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Draw vectors."""
        import torch

        if self._gates is not None:
            _pass(self._gates / str(assignment.round))
        while True:
            yield torch.randn(ROW_VALUES)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Sum the squares of what each matrix makes of the vector."""
        import torch

        return torch.stack([(matrix @ batch).square().mean() for matrix in model.parameters()]).sum(), TOKENS

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return 0: what is learnt is of no use."""
        return 0.0


def _pass(gate: Path) -> None:
    """Return as soon as nobody holds the file locked, at once if there is none."""
    if gate.exists():
        with gate.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
