"""Weighs one contribution, in a process of its own: `useful_work.py` behind a pipe.

    python -P -m shoal.node.audits.work_process < request.json > reply.json

The vectors are two files of little-endian float32. A process of its own, since importing torch changes a process, since
a workload may do anything, and since what takes too long can be ended. It runs at the lowest priority, on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import msgspec

from shoal.node.training.trainer_messages import Assignment, Scalar
from shoal.protocol.errors import ShoalError

REQUEST_LIMIT_BYTES = 1 << 20
LOWEST_PRIORITY = 19


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which workload, which share of its data, and the files of the anchor and of base − local as decoded."""

    workload: str
    options: Mapping[str, Scalar]
    data: str | None
    seed: int
    assignment: Assignment
    anchor: str
    contribution: str


class WorkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The losses on the member's first batches; without them, why there are none."""

    before: float | None = None
    after: float | None = None
    error: str | None = None


def main() -> int:
    """Weigh, and say what came of it; 0 whatever that is."""
    os.nice(LOWEST_PRIORITY)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    request = msgspec.json.decode(sys.stdin.buffer.read(REQUEST_LIMIT_BYTES), type=WorkRequest)
    try:
        reply = weigh(request)
    except ShoalError as error:
        reply = WorkReply(error=str(error))
    except Exception as error:  # the user's workload may raise anything
        from shoal.node.pipe import one_line

        reply = WorkReply(error=f"the workload raised {one_line(error)}")
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(reply) + b"\n")
    return 0


def weigh(request: WorkRequest) -> WorkReply:
    """The losses. Raises ConfigError for a workload that cannot be had, LocalError for vectors of another model."""
    import numpy as np
    import torch

    from shoal.node.audits.useful_work import WorkMeter
    from shoal.node.workload import load_workload

    workload = load_workload(request.workload, request.options, request.data)
    anchor, contribution = (np.fromfile(path, "<f4") for path in (request.anchor, request.contribution))
    torch.manual_seed(request.seed)  # what of the model is not trained is as in the trainers
    work = WorkMeter(workload, torch.device("cpu")).weigh(anchor, contribution, request.assignment)
    return WorkReply(before=work.before, after=work.after)


if __name__ == "__main__":
    sys.exit(main())
