"""A workload whose steps wait instead of computing: nodes of different speed, whatever else the machine does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.node.workloads.regression import RegressionWorkload

if TYPE_CHECKING:
    import torch


class WaitingWorkload(RegressionWorkload):
    """Linear regression; `data` is a file that says how many seconds a step waits on this node."""

    def __init__(self, inputs: int = 16, outputs: int = 8, data: str | None = None) -> None:
        super().__init__(inputs=inputs, outputs=outputs)
        object.__setattr__(self, "_step_s", 0.0 if data is None else float(Path(data).read_text()))

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Loss as of regression, after the wait."""
        time.sleep(self._step_s)  # type: ignore[attr-defined]
        return super().loss(model, batch)
