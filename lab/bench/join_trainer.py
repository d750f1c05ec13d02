"""Training of a donor in `shoal bench join` besides serving: in a process of its own, as a node does.

    python -m shoal.lab.bench.join_trainer COUNTER

Real steps, forward, backward and AdamW, of a small model in one thread; how many there were stands in the file COUNTER,
8 bytes, little-endian. Ends when its parent's pipe to its stdin does.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
from pathlib import Path
from typing import Final

import torch

from shoal.node.training.trainer_messages import Assignment
from shoal.node.workloads.regression import RegressionWorkload

WIDTH: Final = 512
COUNTER_BYTES: Final = 8


def train(counter: Path) -> None:
    """Make steps until stdin ends."""
    torch.set_num_threads(1)
    workload = RegressionWorkload(inputs=WIDTH, outputs=WIDTH)
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    with counter.open("r+b") as file, mmap.mmap(file.fileno(), COUNTER_BYTES) as shared:
        for batch in workload.batches(Assignment(seed=1, round=1, member=os.getpid(), members=1 << 30)):
            loss, _ = workload.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            shared[:] = steps.to_bytes(COUNTER_BYTES, "little")
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    train(Path(sys.argv[1]))
