"""The life of every process of a trainer's group but the first: it does what rank 0 tells it.

Two threads, as in `trainer_process`: one reads orders, and ends the process at once when rank 0 is gone; the main one
follows them. What the workload raises goes to rank 0, which tells the daemon.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final

import torch

from shoal.node.pipe import EXIT_FAILED, ParentPipe, describe
from shoal.node.training.rank_messages import Clip, Decay, Do, Move, Open, Part, RankOrder, RankStart, unpack_order
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
            for _ in range(shard.open(order.assignment, order.drawn)):
                shard.draw()
        case Do():
            PARTS[order.what](shard)
        case Clip():
            shard.clip(order.norm)
        case Move():
            shard.move(order.lr)
        case Decay():
            shard.decay(order.weight_decay)


def _scatter_inner(shard: Shard) -> None:
    shard.scatter_moments({})
    shard.share_buffers()


PARTS: Final[Mapping[Part, Callable[[Shard], object]]] = {
    "backward": lambda shard: shard.backward(check_drawn(shard.draw())),
    "gather": lambda shard: shard.gather(None),
    "gather_gradients": lambda shard: shard.gather_gradients(None),
    "scatter": lambda shard: shard.scatter(None),
    "gather_inner": Shard.gather_moments,
    "scatter_inner": _scatter_inner,
    "measure": Shard.measure,
    "rest": Shard.rest,
    "wake": Shard.wake,
}
"""By what rank 0 says, the call of it in this rank."""
