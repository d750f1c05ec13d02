"""The life of every process of a trainer's group but the first: it does what rank 0 tells it.

Two threads, as in `trainer_process`: one reads orders, and ends the process at once when rank 0 is gone; the main one
follows them. What the workload raises goes to rank 0, which tells the daemon.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from shoal.node.pipe import EXIT_FAILED, ParentPipe, describe
from shoal.node.training.rank_messages import (
    Backward,
    Clip,
    Decay,
    Gather,
    GatherGradients,
    GatherInner,
    Measure,
    Move,
    Open,
    RankOrder,
    RankStart,
    Rest,
    Scatter,
    ScatterInner,
    Wake,
    unpack_order,
)
from shoal.node.training.ranks import END_DEADLINE_S
from shoal.node.training.shard import Shard, check_drawn, join_group, rank_device
from shoal.node.workload import load_workload
from shoal.protocol.errors import LocalError


def serve(descriptor: int, store: int) -> int:
    """Follow rank 0 until one of the two ends; return the exit status of a workload that raised."""
    control = ParentPipe(descriptor, unpack_order, who="trainer")
    shard: Shard | None = None
    try:
        while True:
            order = control.receive()
            if isinstance(order, RankStart):
                shard = _start(order, store)
            elif shard is None:
                raise LocalError(f"{type(order).__name__} before RankStart")
            else:
                _follow(order, shard)
    except Exception as error:  # the boundary of the user's code: whatever it raised goes to the user
        control.send(describe(error))
        sys.stderr.flush()
        threading.Event().wait(END_DEADLINE_S)  # rank 0 ends all; to end sooner would be an error in the others
        os._exit(EXIT_FAILED)


def _start(order: RankStart, store: int) -> Shard:
    start = order.start
    torch.set_num_threads(start.threads)
    device = rank_device(start.device, order.rank, order.processes)
    workload = load_workload(start.workload, start.options, start.data)
    join_group(store, rank=order.rank, processes=order.processes, device=device)
    return Shard(workload, start, rank=order.rank, processes=order.processes, device=device)


def _follow(order: RankOrder, shard: Shard) -> None:
    match order:
        case Open():
            shard.open(order.assignment, order.drawn)
        case Backward():
            shard.backward(check_drawn(shard.draw()))
        case Clip():
            shard.clip(order.norm)
        case Move():
            shard.move(order.lr)
        case Decay():
            shard.decay(order.weight_decay)
        case Gather():
            shard.gather(None)
        case GatherGradients():
            shard.gather_gradients(None)
        case Scatter():
            shard.scatter(None)
        case GatherInner():
            shard.gather_moments()
        case ScatterInner():
            shard.scatter_moments({})
            shard.share_buffers()
        case Measure():
            shard.measure()
        case Rest():
            shard.rest()
        case Wake():
            shard.wake()
