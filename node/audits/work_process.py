"""Weighs one contribution, in a process of its own: `useful_work.py` behind a framed pipe (`shoal.node.pipe`).

    python -P -m shoal.node.audits.work_process PIPE    a WorkRequest comes, a WorkReply or a Failed goes

The vectors are two files of little-endian float32. A process of its own, since importing torch changes a process, since
a workload may do anything, and since what takes too long can be ended. It runs at the lowest priority, on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from shoal.node.pipe import Failed, Message, ParentPipe, Stop, describe, unpacker
from shoal.node.training.trainer_messages import Assignment, Scalar

LOWEST_PRIORITY = 19


class WorkRequest(Message, frozen=True, kw_only=True):
    """Work to weigh: the workload, the share of its data, and files of the anchor and of base − local as decoded.

    chunk_values: of the swarm, whose chunks the vectors lie in.
    """

    workload: str
    options: Mapping[str, Scalar]
    data: str | None
    seed: int
    assignment: Assignment
    chunk_values: int
    anchor: str
    contribution: str


class WorkReply(Message, frozen=True, kw_only=True):
    """The losses on the member's first batches."""

    before: float
    after: float


unpack_request: Callable[[bytes], WorkRequest | Stop] = unpacker(WorkRequest | Stop, "a request to weigh work")
unpack_reply: Callable[[bytes], WorkReply | Failed] = unpacker(WorkReply | Failed, "what a contribution weighs")


def main(arguments: list[str]) -> int:
    """Weigh a contribution, and report the outcome; returns 0 whatever that is."""
    os.nice(LOWEST_PRIORITY)
    pipe = ParentPipe(int(arguments[0]), unpack_request, who="weighing")
    try:
        request = pipe.receive()
        if isinstance(request, WorkRequest):
            pipe.send(weigh(request))
    except Exception as error:  # the user's workload may raise anything
        pipe.send(describe(error))
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
    meter = WorkMeter(workload, torch.device("cpu"), chunk_values=request.chunk_values)
    work = meter.weigh(anchor, contribution, request.assignment)
    return WorkReply(before=work.before, after=work.after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
