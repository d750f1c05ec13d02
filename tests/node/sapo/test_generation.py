from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GroupGenerator
from shoal.node.sapo.policy import Rollout
from shoal.node.sapo.tasks import Task
from shoal.protocol.errors import ConfigError
from tests.node.sapo.sums import sum_task

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=8, completion_tokens=30, alphabet="0123456789+=")


class Tasks:
    """Draws the tasks of one round."""

    def __init__(self) -> None:
        self.drawn: list[Task] = []

    def __call__(self) -> Task:
        self.drawn.append(sum_task(0, len(self.drawn)))
        return self.drawn[-1]


class Staircase(CharPolicy):
    """Completions whose lengths are set: the n-th rollout that is begun ends with its `lengths[n]`-th token."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(SETTINGS, seed=1)
        self._lengths = iter(lengths)
        self._ends: dict[Rollout, int] = {}

    def extend(
        self, rollouts: Sequence[Rollout], *, generator: torch.Generator, enough: Callable[[], bool] | None = None
    ) -> int:
        for rollout in rollouts:
            if rollout not in self._ends:
                self._ends[rollout] = next(self._lengths)
        drawn = 0
        while going := [rollout for rollout in rollouts if not rollout.done]:
            for rollout in going:
                rollout.tokens.append(5)
                rollout.log_probs.append(-float(len(rollout.tokens)))
                rollout.done = len(rollout.tokens) == self._ends[rollout]
            drawn += len(going)
            if enough is not None and enough():
                break
        return drawn


def new_generator(policy: CharPolicy, *, over_provision: float, group_size: int = 2) -> GroupGenerator:
    return GroupGenerator(
        policy, group_size=group_size, generator=torch.Generator().manual_seed(1), over_provision=over_provision
    )


def test_collect_returns_finished_groups_of_distinct_tasks() -> None:
    tasks = Tasks()
    groups = new_generator(CharPolicy(SETTINGS, seed=1), over_provision=1.0, group_size=4)
    made = groups.collect(3, tasks, round=7)
    assert [group.task for group in made.groups] == tasks.drawn
    assert all(group.done and group.round == 7 and len(group.rollouts) == 4 for group in made.groups)
    assert made.tokens == sum(len(rollout.tokens) for group in made.groups for rollout in group.rollouts)
    assert groups.under_way == ()
    assert groups.collect(0, tasks, round=8).groups == ()
    assert len(tasks.drawn) == 3


def test_collect_ends_with_enough_groups_and_goes_on_with_the_others() -> None:
    # Groups of two: ends after 3, 9, 4 and 20 tokens. Two are wanted, four begun.
    policy = Staircase([3, 2, 9, 1, 4, 4, 20, 5, *[1] * 100])
    tasks = Tasks()
    groups = new_generator(policy, over_provision=2.0)
    first = groups.collect(2, tasks, round=0)
    assert [group.task for group in first.groups] == [tasks.drawn[0], tasks.drawn[2]]
    assert first.tokens == (3 + 2) + (4 + 1) + (4 + 4) + (4 + 4)
    left = groups.under_way
    assert [group.task for group in left] == [tasks.drawn[1], tasks.drawn[3]]
    assert [[len(rollout.tokens) for rollout in group.rollouts] for group in left] == [[4, 1], [4, 4]]
    kept = [list(rollout.log_probs) for group in left for rollout in group.rollouts]

    second = groups.collect(2, tasks, round=1)
    assert len(tasks.drawn) == 6
    # The two fresh groups have one token each and are done at once; the old ones have one more token.
    assert [group.round for group in second.groups] == [1, 1]
    assert second.tokens == 1 + 2 + 4
    third = groups.collect(2, tasks, round=2)
    # The two that go on have the places of two fresh ones; again the fresh ones are done first.
    assert [group.round for group in third.groups] == [2, 2]
    assert [group.task for group in groups.under_way] == [tasks.drawn[1], tasks.drawn[3]]
    for log_probs, rollout in zip(kept, (one for group in left for one in group.rollouts), strict=True):
        assert rollout.log_probs[: len(log_probs)] == log_probs


def test_every_group_begun_is_handed_out_once_the_oldest_first() -> None:
    lengths = itertools.cycle([30, 1, 1, 1, 2, 2, 7, 3])
    policy = Staircase(list(itertools.islice(lengths, 4000)))
    tasks = Tasks()
    groups = new_generator(policy, over_provision=1.5)
    handed, tokens = [], 0
    for round_number in range(40):
        made = groups.collect(4, tasks, round=round_number)
        tokens += made.tokens
        assert len(made.groups) == 4
        handed += [group.task.ref for group in made.groups]
    assert len(set(handed)) == len(handed)
    waiting = groups.under_way
    assert set(handed) | {group.task.ref for group in waiting} == {task.ref for task in tasks.drawn}
    assert all(40 - group.round < 31 for group in waiting)
    drawn = [rollout for group in waiting for rollout in group.rollouts]
    assert tokens > sum(len(rollout.tokens) for rollout in drawn)


@pytest.mark.parametrize(("group_size", "over_provision"), [(1, 1.0), (65, 1.0), (8, 0.9), (8, 9.0)])
def test_sizes_out_of_range_are_refused(group_size: int, over_provision: float) -> None:
    with pytest.raises(ConfigError):
        new_generator(CharPolicy(SETTINGS, seed=1), over_provision=over_provision, group_size=group_size)
