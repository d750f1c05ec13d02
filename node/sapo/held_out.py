"""The greedy reward on fixed held-out tasks: by it one sees whether a policy gets better.

The reward of a round's own completions is drawn from a handful of tasks, others in each round, so it swings more than
a policy moves in a hundred rounds. Here the tasks are always the same, and the most probable token is always taken.
Their seeds are hashed in a context of their own, so no round of any node is assigned one (but for a chance of 2^-63
each); a small family may ask the same question under two seeds.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean
from typing import Final

from shoal.node.sapo.agent_messages import Probed
from shoal.node.sapo.generation import rewards_of
from shoal.node.sapo.groups import mean
from shoal.node.sapo.judge import Score
from shoal.node.sapo.policy import Policy
from shoal.node.sapo.tasks import Task, TaskSource, makeable
from shoal.protocol.rollouts import seed_of

HELD_OUT_TASKS: Final = 200
TIME_SHARE: Final = 0.05
"""Of an agent's time, at most, after the first evaluation."""
TIME_LIMIT_S: Final = 300.0
"""Of one evaluation; where the tasks take longer, those that fit are the held-out tasks from then on."""

_CONTEXT: Final = "shoal rollout held-out seed v1"


def held_out_tasks(source: TaskSource, count: int = HELD_OUT_TASKS) -> list[Task]:
    """The held-out tasks of a source: the same on every node, by the weights of the families."""

    def make(at: int) -> Task:
        return source.task(source.table.of_seed(seed_of(at.to_bytes(8, "big"), context=_CONTEXT), 0))

    return list(islice(makeable(make), count))


class HeldOut:
    """Evaluates one policy every so often, within a share of the time.

    An evaluation is due before the first round, then as soon as `every` rounds are made since the last one and the last
    one's time is `TIME_SHARE` of what has passed.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        every: int,
        together: int,
        score: Score,
        rest: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """every: rounds, 0 for never. together: completions in one batch. rest: called between two batches."""
        self._tasks = list(tasks)
        self._every = every
        self._together = together
        self._score = score
        self._rest = rest
        self._clock = clock
        self._round: int | None = None
        self._due_at = -math.inf

    def is_due(self, round: int) -> bool:
        """True if the policy after `round` rounds is to be evaluated now."""
        if not self._every:
            return False
        enough = self._round is None or round >= self._round + self._every
        return enough and self._clock() >= self._due_at

    def is_behind(self, round: int) -> bool:
        """True if the policy after `round` rounds was not evaluated, and may be."""
        return bool(self._every) and self._round != round

    def evaluate(self, policy: Policy, round: int) -> Probed:
        """Evaluate the policy after `round` rounds."""
        seconds, rewards = 0.0, list[float | None]()
        while len(rewards) < len(self._tasks) and seconds < TIME_LIMIT_S:
            began = self._clock()
            tasks = self._tasks[len(rewards) : len(rewards) + self._together]
            rewards += rewards_of(policy, tasks, score=self._score)
            seconds += self._clock() - began
            self._rest()
        self._tasks = self._tasks[: len(rewards)]
        self._round = round
        self._due_at = self._clock() + seconds * (1 / TIME_SHARE - 1)
        by_family: dict[str, list[float]] = defaultdict(list)
        for task, reward in zip(self._tasks, rewards, strict=True):
            if reward is not None:
                by_family[task.ref.family].append(reward)
        known = [reward for one in by_family.values() for reward in one]
        return Probed(
            round=round,
            reward=mean(known) or 0.0,
            by_family={name: fmean(by_family[name]) for name in sorted(by_family)},
            tasks=len(known),
            seconds=seconds,
        )
