"""Training that takes its time and little else: nodes of the speed that is asked for, whatever else the machine does.

It is the regression of `shoal.node.workloads.regression`, whose every step takes a pause, as on a slow accelerator.
Its data are there at once: who goes on after a restart draws again what it had drawn.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.node.workloads.regression import Batch, RegressionWorkload

if TYPE_CHECKING:
    import torch

WORKLOAD_NAME = "shoal.lab.waiting_workload:WaitingRegression"


@dataclass(frozen=True)
class WaitingRegression(RegressionWorkload):
    """Learn ``y = W x + noise``, `step_s` seconds a step and a negligible part of them computing.

    data: a file that says how many seconds a step takes on this node instead.
    """

    step_s: float = 0.1
    data: str | None = None

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        """The regression's, after the pause."""
        time.sleep(self.step_s if self.data is None else float(Path(self.data).read_text()))
        return super().loss(model, batch)
