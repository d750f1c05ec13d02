"""Data of a peer outside the electorate: other pieces than the members read, as long as there are any.

The members of a round shuffle all pieces alike, and member m of n reads the places m, m + n, m + 2n, ... of that order.
Who is no member, because it was left out of the round before or belongs to no electorate, reads it from its end:

    lane = number mod L, L = min(64, pieces)     read    last − lane, last − lane − L, last − lane − 2L, ...

and then the next lane. So with p pieces, of which each member reads k and an outsider k', nobody repeats a member's
piece while n·k + L·k' ≤ p, and two outsiders meet only where their numbers, drawn by hash of their names, are of one
lane.
"""

from __future__ import annotations

from typing import Final

import torch

from shoal.node.training.trainer_messages import Assignment

OUTSIDER_LANES: Final = 64


def share_of_order(order: torch.Tensor, assignment: Assignment) -> torch.Tensor:
    """Part of the common order that the peer of `assignment` reads, ``(p,) int64``, in this sequence."""
    if assignment.member < assignment.members:
        return order[assignment.member :: assignment.members]
    backwards = order.flip(0)
    lanes = min(OUTSIDER_LANES, len(order))
    first = (assignment.member - assignment.members) % lanes
    return torch.cat([backwards[(first + lane) % lanes :: lanes] for lane in range(lanes)])
