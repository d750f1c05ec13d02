"""A workload whose every step can be found again: it takes one quantum off each value, and is noted in a file.

So a contribution's values, divided by the quantum, say how many steps are in it, chunk by chunk; and the file says how
many were really made, and when. `shoal.lab.bench.step_tally` compares the two.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.lab.bench.synthetic import IdleWorkload
from shoal.node.training.trainer_messages import Assignment
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

WORKLOAD_NAME = "shoal.lab.bench.tally_workload:TallyWorkload"
QUANTUM: Final = 2.0**-10
"""Exact in float32, and far above the rounding of values that hundreds of steps lead to."""
NOTES: Final = "steps"
_MADE: Final = struct.Struct("<d")


class TallyWorkload(IdleWorkload):
    """`numel` parameters, of which every step takes `QUANTUM` off all but the first, in `step_s` seconds.

    data: the folder with the file that notes the wall clock of every step.
    """

    def __init__(self, numel: int = 50_000, step_s: float = 0.1, data: str | None = None) -> None:
        if data is None:
            raise ConfigError("this workload notes its steps; give it a folder with --data")
        super().__init__(numel)
        self._step_s = step_s
        self._notes = Path(data) / NOTES

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Yield batches without content, as often as asked."""
        import torch

        while True:
            yield torch.zeros(1)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Make the step, in its time, and note it."""
        time.sleep(self._step_s)
        made = self.take(model, QUANTUM)
        with self._notes.open("ab") as file:
            file.write(_MADE.pack(time.time()))
        return made


def steps_made(folder: Path) -> list[float]:
    """Times of the steps that are noted in a folder, in wall-clock seconds; none if nothing is."""
    path = folder / NOTES
    data = path.read_bytes() if path.exists() else b""
    return [at for (at,) in _MADE.iter_unpack(data[: len(data) // _MADE.size * _MADE.size])]
