"""A group of completions that was scored here: the only form in which rollouts, own or others', reach the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.protocol.identity import PeerId

if TYPE_CHECKING:
    from shoal.node.sapo.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """G completions of one prompt, with the rewards that this node gave them.

    `texts` and `rewards`: (G,), rewards in [0, 1]. `origin`: who generated them, None for this node. `round` and
    `policy_version` are the origin's.
    """

    task: Task
    prompt: str
    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    origin: PeerId | None
    round: int
    policy_version: int
