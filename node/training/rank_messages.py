"""Messages of a trainer's first process to the others of its group, and what they may answer.

The group is one trainer on several devices of one machine (`ranks`). Rank 0 is the process that the daemon knows; it
alone has the accounts, and decides. The others do what they are told, in the order in which they are told it: each of
these messages but `RankStart` stands for one call of `shard.Shard`, which all ranks make at the same time. Frames are
those of every pipe (`shoal.node.pipe`). A rank answers only to say that the workload raised, by
`Failed`.
"""

from __future__ import annotations

import msgspec

from shoal.node.pipe import Message, decode_frame
from shoal.node.training.trainer_messages import Assignment, Start

PROCESSES_LIMIT = 64


class RankStart(Message, frozen=True, kw_only=True):
    """Build the workload, form the group, keep this rank's part of every parameter. rank: in 1..processes-1."""

    start: Start
    rank: int
    processes: int


class Open(Message, frozen=True, kw_only=True):
    """Begin with this share of the data, after its first `drawn` batches."""

    assignment: Assignment
    drawn: int


class Backward(Message, frozen=True, kw_only=True):
    """Draw a batch; compute the gradient of this rank's part of it, and no other."""


class Clip(Message, frozen=True, kw_only=True):
    """Scale all gradients so that their common norm is at most this."""

    norm: float


class Move(Message, frozen=True, kw_only=True):
    """Take a step of the optimizer."""

    lr: float


class Decay(Message, frozen=True, kw_only=True):
    """Order to decay by this from the next step on."""

    weight_decay: float


class Gather(Message, frozen=True, kw_only=True):
    """Rank 0 reads the parameters."""


class GatherGradients(Message, frozen=True, kw_only=True):
    """Rank 0 reads the gradients."""


class Scatter(Message, frozen=True, kw_only=True):
    """Rank 0 writes the parameters."""


class GatherInner(Message, frozen=True, kw_only=True):
    """Rank 0 reads the optimizer's moments."""


class ScatterInner(Message, frozen=True, kw_only=True):
    """Rank 0 writes the optimizer's moments and the model's buffers."""


class Measure(Message, frozen=True, kw_only=True):
    """Evaluate the model as it is."""


class Rest(Message, frozen=True, kw_only=True):
    """Leave the device to others: what this rank has on it goes to the host."""


class Wake(Message, frozen=True, kw_only=True):
    """Take back from the host what `Rest` put there."""


RankOrder = (
    RankStart
    | Open
    | Backward
    | Clip
    | Move
    | Decay
    | Gather
    | GatherGradients
    | Scatter
    | GatherInner
    | ScatterInner
    | Measure
    | Rest
    | Wake
)

_ORDERS: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder)


def unpack_order(frame: bytes) -> RankOrder:
    """Decode what rank 0 sent. Raises `LocalError` if it is no order."""
    return decode_frame(_ORDERS, frame, "an order to a rank")
