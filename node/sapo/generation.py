"""Generating groups of completions: more are begun than needed, and what is unfinished goes on next time.

A batch takes as long as its longest completion. With over-provision a call ends as soon as enough groups are done;
the others keep their tokens, and the next call goes on from there under the policy of that time. The log-probability
of a token stays that of the policy that drew it, so the ratio in the loss remains that of the token's own draw. A group
that was begun `AGE_LIMIT_ROUNDS` ago is waited for. Source: APRIL, arXiv 2509.18521, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shoal.node.sapo.judge import Score
from shoal.node.sapo.policy import Draws, Policy, Rollout
from shoal.node.sapo.tasks import Task
from shoal.node.sapo.turns import begun, extend_dialogues, text_of
from shoal.protocol.rollouts import Drawn, Sampling

AGE_LIMIT_ROUNDS = 64
"""Groups are announced under the round that they were begun in; what is 256 rounds behind (`OfferBook`) is refused."""


AssignedDraws = Callable[[int, int, int], Draws]
"""The draws of an agent's completions, by round, index of the task in it, and number of the completion."""


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

    @property
    def version(self) -> int:
        """The newest policy that drew any of it, once something is drawn."""
        return max(rollout.versions[-1][0] for rollout in self.rollouts if rollout.versions)

    def sampling(self, policy: str) -> Sampling:
        """The label that travels with a group: of each token its log-probability, and the version that drew it.

        policy: the name of all versions.
        """
        return Sampling(
            policy=f"{self.version}-{policy}",
            drawn=tuple(
                Drawn.of(
                    rollout.log_probs,
                    rollout.tokens,
                    () if [version for version, _ in rollout.versions] == [self.version] else rollout.versions,
                )
                for rollout in self.rollouts
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The groups that one call made. tokens: all that were drawn in it, also for groups that go on."""

    groups: tuple[GeneratedGroup, ...]
    tokens: int


def rewards_of(
    policy: Policy, tasks: Sequence[Task], *, score: Score, draws: Draws | None = None
) -> Sequence[float | None]:
    """The rewards of one completion for each task, None for one that was not scored in time. draws: see `Rollout`."""
    dialogues = [(task, begun(policy, task)) for task in tasks]
    for _, rollout in dialogues:
        rollout.draws = draws
    extend_dialogues(policy, dialogues)
    return score([(task, text_of(policy, task, rollout)) for task, rollout in dialogues])


class GroupGenerator:
    """Draws tasks and completions for one agent, and holds what was begun and not yet handed out, oldest first.

    group_size: completions of a group. draws: by which they are drawn. over_provision: groups under way at the start of
    a call ÷ groups wanted, 1 or more; at 1 nothing is left unfinished.
    """

    def __init__(self, policy: Policy, *, group_size: int, draws: AssignedDraws, over_provision: float = 1.0) -> None:
        self._policy = policy
        self._group_size = group_size
        self._draws = draws
        self._over_provision = over_provision
        self._under_way: list[GeneratedGroup] = []

    @property
    def under_way(self) -> tuple[GeneratedGroup, ...]:
        """Groups that a later call hands out; those in front may be done."""
        return tuple(self._under_way)

    def go_on_with(self, groups: Sequence[GeneratedGroup]) -> None:
        """Take groups for under way that an earlier process began, the oldest first."""
        self._under_way = [*groups]
        for group in groups:
            self._assign(group)

    def collect(self, count: int, draw: Callable[[], Task], *, round: int, version: int) -> Generated:
        """Return `count` finished groups, of those that are done the ones begun first.

        draw: gives tasks of `round`, which is this one. version: of the policy as it is now.
        """
        if count == 0:
            return Generated(groups=(), tokens=0)
        while len(self._under_way) < math.ceil(count * self._over_provision):
            self._under_way.append(self._begin(draw(), round))
        tokens = 0
        if not self._enough(count, round):
            dialogues = [(group.task, rollout) for group in self._under_way for rollout in group.rollouts]
            enough = partial(self._enough, count, round)
            tokens = extend_dialogues(self._policy, dialogues, version=version, enough=enough)
        groups = [group for group in self._under_way if group.done][:count]
        self._under_way = [group for group in self._under_way if group not in groups]
        return Generated(groups=tuple(groups), tokens=tokens)

    def _begin(self, task: Task, round: int) -> GeneratedGroup:
        rollouts = tuple(begun(self._policy, task) for _ in range(self._group_size))
        group = GeneratedGroup(task=task, round=round, rollouts=rollouts)
        self._assign(group)
        return group

    def _assign(self, group: GeneratedGroup) -> None:
        for number, rollout in enumerate(group.rollouts):
            rollout.draws = self._draws(group.round, group.task.ref.index, number)

    def _enough(self, count: int, round: int) -> bool:
        done = [group.done for group in self._under_way]
        oldest = next((group for group in self._under_way if not group.done), None)
        return sum(done) >= count and (oldest is None or round - oldest.round < AGE_LIMIT_ROUNDS)
