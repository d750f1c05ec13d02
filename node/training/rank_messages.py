"""Messages of a trainer's first process to the others of its group, and what they may answer.

The group is one trainer on several devices of one machine (`ranks`). Rank 0 is the process that the daemon knows; it
alone has the accounts, and decides. The others do what they are told, in the order in which they are told it: each of
these messages but `RankStart` stands for one call of `shard.Shard`, which all ranks make at the same time. Frames are
those of every pipe (`shoal.node.pipe`). A rank answers only to say that the workload raised, by
`Failed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shoal.node.pipe import Message, unpacker
from shoal.node.training.trainer_messages import Assignment, Start

PROCESSES_LIMIT = 64

Part = Literal[
    "backward", "gather", "gather_gradients", "scatter", "gather_inner", "scatter_inner", "measure", "rest", "wake"
]


class RankStart(Message, frozen=True, kw_only=True):
    """Build the workload, form the group, keep this rank's part of every parameter. rank: in 1..processes-1."""

    start: Start
    rank: int
    processes: int


class Open(Message, frozen=True, kw_only=True):
    """Begin with this share of the data, after its first `drawn` batches."""

    assignment: Assignment
    drawn: int


class Clip(Message, frozen=True, kw_only=True):
    """Scale all gradients so that their common norm is at most this."""

    norm: float


class Move(Message, frozen=True, kw_only=True):
    """Take a step of the optimizer."""

    lr: float


class Decay(Message, frozen=True, kw_only=True):
    """Order to decay by this from the next step on."""

    weight_decay: float


class Do(Message, frozen=True, kw_only=True):
    """Do a rank's part of what rank 0 does now, whose name says all there is to know.

    backward: draw a batch, and compute the gradient of this rank's part of it. gather, gather_gradients, gather_inner:
    rank 0 reads the parameters, the gradients, the optimizer's moments. scatter, scatter_inner: it writes the
    parameters, or the moments and the model's buffers. measure: evaluate the model as it is. rest: leave the device to
    others, what this rank has on it goes to the host; wake: take it back.
    """

    what: Part


RankOrder = RankStart | Open | Do | Clip | Move | Decay

unpack_order: Callable[[bytes], RankOrder] = unpacker(RankOrder, "an order to a rank")
