"""Groups of completions that were scored here: the form in which rollouts reach the learner, and the way to others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import (
    GROUP_LIMIT_BYTES,
    Announcement,
    RolloutGroup,
    Sampling,
    announce_group,
    encode_group,
)

if TYPE_CHECKING:
    from shoal.node.sapo.tasks import Task

DRAWN_LIMIT_BYTES = GROUP_LIMIT_BYTES // 2
"""Of tokens and log-probabilities in a group: the text has to fit beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """G completions of one task, with the rewards that this node gave them.

    `texts` and `rewards`: (G,), rewards in [0, 1]. `origin`: who generated them, None for this node. `round` and
    `policy_version` are the origin's. `sampling`: how they were drawn, if their origin says so.
    """

    task: Task
    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    origin: PeerId | None
    round: int
    policy_version: int
    sampling: Sampling | None = None


def all_known(rewards: Sequence[float | None]) -> tuple[float, ...] | None:
    """The rewards of a group; None if one was not scored in time: it may be right, and to take it for 0 unlearns it."""
    known = tuple(reward for reward in rewards if reward is not None)
    return known if len(known) == len(rewards) else None


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, such as of rewards; None where there are none."""
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def announced(group: JudgedGroup, me: PeerId, *, labelled: bool = False) -> tuple[Announcement, bytes]:
    """Return the announcement of this node's own group, and the group as it travels.

    It goes without its tokens where they leave the text no room, unless it has to be `labelled`. Raises LocalError for
    completions that cannot travel, such as one that is too long.
    """
    sampling = group.sampling
    if sampling is not None and sum(len(one.log_probs) + len(one.tokens) for one in sampling.drawn) > DRAWN_LIMIT_BYTES:
        if labelled:
            raise LocalError("its tokens leave the text no room, and nobody takes it without them: sample shorter ones")
        sampling = Sampling(policy=sampling.policy)
    try:
        rollout = RolloutGroup(
            origin=me,
            round=group.round,
            policy_version=group.policy_version,
            task=group.task.ref,
            completions=group.texts,
            sampling=msgspec.UNSET if sampling is None else sampling,
        )
    except ValueError as error:
        raise LocalError(f"our own group is out of range: {error}") from error
    encoded = encode_group(rollout)
    return announce_group(rollout, encoded, group.rewards), encoded
