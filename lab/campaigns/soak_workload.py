"""Training that takes its time and little else: for swarms that are to live for hours, or beside others.

It is the regression of `shoal.node.workloads.regression`, whose every batch comes after a pause, as from a slow
accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.node.workload import Assignment
from shoal.node.workloads.regression import Batch, RegressionWorkload

WORKLOAD_NAME = "shoal.lab.campaigns.soak_workload:PacedRegression"


@dataclass(frozen=True)
class PacedRegression(RegressionWorkload):
    """Learn ``y = W x + noise``, `step_s` seconds a step and a negligible part of them computing."""

    step_s: float = 0.1

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        """Yield samples without end, one every `step_s`."""
        for batch in super().batches(assignment):
            time.sleep(self.step_s)
            yield batch
