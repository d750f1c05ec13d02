"""Training that takes its time and little else: nodes of the speed that is asked for, whatever else the machine does.

It is the regression of `shoal.node.workloads.regression`, whose every batch comes after a pause, as from a slow
accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.node.workload import Assignment
from shoal.node.workloads.regression import Batch, RegressionWorkload

WORKLOAD_NAME = "shoal.lab.waiting_workload:WaitingRegression"


@dataclass(frozen=True)
class WaitingRegression(RegressionWorkload):
    """Learn ``y = W x + noise``, `step_s` seconds a step and a negligible part of them computing.

    data: a file that says how many seconds a step takes on this node instead.
    """

    step_s: float = 0.1
    data: str | None = None

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        """Yield samples without end, one a step."""
        step_s = self.step_s if self.data is None else float(Path(self.data).read_text())
        for batch in super().batches(assignment):
            time.sleep(step_s)
            yield batch
