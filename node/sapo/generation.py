"""Generating groups of completions: more are begun than needed, and what is unfinished goes on next time.

A batch takes as long as its longest completion. With over-provision a call ends as soon as enough groups are done;
the others keep their tokens, and the next call goes on from there under the policy of that time. The log-probability
of a token stays that of the policy that drew it, so the ratio in the loss remains that of the token's own draw.
Source: APRIL, arXiv 2509.18521, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.node.sapo.policy import Policy, Rollout
from shoal.node.sapo.tasks import Task
from shoal.protocol.errors import ConfigError

GROUP_LIMIT = 64
"""Completions of one group."""
OVER_PROVISION_LIMIT = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedGroup:
    """A task, the agent's round in which it was drawn, and its completions."""

    task: Task
    round: int
    rollouts: tuple[Rollout, ...]

    @property
    def done(self) -> bool:
        """True once every completion has come to its end."""
        return all(rollout.done for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The groups that one call made. tokens: all that were drawn in it, also for groups that go on."""

    groups: tuple[GeneratedGroup, ...]
    tokens: int


class GroupGenerator:
    """Draws tasks and completions for one agent, and holds what was begun and not yet handed out, oldest first.

    over_provision: groups under way at the start of a call ÷ groups wanted; at 1 nothing is left unfinished.
    """

    def __init__(
        self, policy: Policy, *, group_size: int, generator: torch.Generator, over_provision: float = 1.0
    ) -> None:
        """Raises ConfigError for a size or a share out of range."""
        if not 2 <= group_size <= GROUP_LIMIT:
            raise ConfigError(f"a group must have 2 to {GROUP_LIMIT} completions, not {group_size}")
        if not 1 <= over_provision <= OVER_PROVISION_LIMIT:
            raise ConfigError(f"over-provision must be 1 to {OVER_PROVISION_LIMIT:g}, not {over_provision}")
        self._policy = policy
        self._group_size = group_size
        self._generator = generator
        self._over_provision = over_provision
        self._under_way: list[GeneratedGroup] = []

    @property
    def under_way(self) -> tuple[GeneratedGroup, ...]:
        """Groups that a later call hands out; those in front may be done."""
        return tuple(self._under_way)

    def collect(self, count: int, draw: Callable[[], Task], *, round: int) -> Generated:
        """Return `count` finished groups, of those that are done the ones begun first. `draw` gives `round`'s tasks."""
        if count == 0:
            return Generated(groups=(), tokens=0)
        while len(self._under_way) < math.ceil(count * self._over_provision):
            self._under_way.append(self._begin(draw(), round))
        tokens = 0
        if not self._enough(count):
            rollouts = [rollout for group in self._under_way for rollout in group.rollouts]
            tokens = self._policy.extend(rollouts, generator=self._generator, enough=lambda: self._enough(count))
        groups = [group for group in self._under_way if group.done][:count]
        self._under_way = [group for group in self._under_way if group not in groups]
        return Generated(groups=tuple(groups), tokens=tokens)

    def _begin(self, task: Task, round: int) -> GeneratedGroup:
        prompt = self._policy.encode_prompt(task.question)
        rollouts = tuple(Rollout(prompt=prompt) for _ in range(self._group_size))
        return GeneratedGroup(task=task, round=round, rollouts=rollouts)

    def _enough(self, count: int) -> bool:
        return sum(group.done for group in self._under_way) >= count
