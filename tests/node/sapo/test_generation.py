from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.completions import version_of
from shoal.node.sapo.generation import AGE_LIMIT_ROUNDS, GeneratedGroup, GroupGenerator
from shoal.node.sapo.policy import Rollout
from shoal.node.sapo.tasks import Task
from tests.node.sapo.draws import assigned
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

    def extend(self, rollouts: Sequence[Rollout], *, enough: Callable[[], bool] | None = None) -> int:
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
    return GroupGenerator(policy, group_size=group_size, draws=assigned(1), over_provision=over_provision)


def test_collect_returns_finished_groups_of_distinct_tasks() -> None:
    tasks = Tasks()
    groups = new_generator(CharPolicy(SETTINGS, seed=1), over_provision=1.0, group_size=4)
    made = groups.collect(3, tasks, round=7, version=7)
    assert [group.task for group in made.groups] == tasks.drawn
    assert all(group.done and group.round == 7 and len(group.rollouts) == 4 for group in made.groups)
    assert made.tokens == sum(len(rollout.tokens) for group in made.groups for rollout in group.rollouts)
    assert groups.under_way == ()
    assert groups.collect(0, tasks, round=8, version=8).groups == ()
    assert len(tasks.drawn) == 3


def test_collect_ends_with_enough_groups_and_goes_on_with_the_others() -> None:
    # Groups of two: ends after 3, 9, 4 and 20 tokens. Two are wanted, four begun.
    policy = Staircase([3, 2, 9, 1, 4, 4, 20, 5, *[1] * 100])
    tasks = Tasks()
    groups = new_generator(policy, over_provision=2.0)
    first = groups.collect(2, tasks, round=0, version=10)
    assert [group.task for group in first.groups] == [tasks.drawn[0], tasks.drawn[2]]
    assert first.tokens == (3 + 2) + (4 + 1) + (4 + 4) + (4 + 4)
    left = groups.under_way
    assert [group.task for group in left] == [tasks.drawn[1], tasks.drawn[3]]
    assert [[len(rollout.tokens) for rollout in group.rollouts] for group in left] == [[4, 1], [4, 4]]
    kept = [list(rollout.log_probs) for group in left for rollout in group.rollouts]

    second = groups.collect(2, tasks, round=1, version=13)
    assert len(tasks.drawn) == 6
    # The two fresh groups have one token each and are done at once; the old ones have one more token.
    assert [group.round for group in second.groups] == [1, 1]
    assert second.tokens == 1 + 2 + 4
    third = groups.collect(2, tasks, round=2, version=13)
    # The two that go on have the places of two fresh ones; again the fresh ones are done first.
    assert [group.round for group in third.groups] == [2, 2]
    assert [group.task for group in groups.under_way] == [tasks.drawn[1], tasks.drawn[3]]
    assert [group.version for group in (*first.groups, *second.groups, *third.groups)] == [10, 10, 13, 13, 13, 13]
    assert [rollout.versions for group in first.groups for rollout in group.rollouts] == [
        [(10, 3)],
        [(10, 2)],
        [(10, 4)],
        [(10, 4)],
    ]
    # The old ones drew a token more in each round, but for what was done: 9 and 1 tokens, 20 and 5.
    assert [rollout.versions for group in left for rollout in group.rollouts] == [
        [(10, 4), (13, 2)],
        [(10, 1)],
        [(10, 4), (13, 2)],
        [(10, 4), (13, 1)],
    ]
    for log_probs, rollout in zip(kept, (one for group in left for one in group.rollouts), strict=True):
        assert rollout.log_probs[: len(log_probs)] == log_probs


def test_every_group_begun_is_handed_out_once_the_oldest_first() -> None:
    lengths = itertools.cycle([30, 1, 1, 1, 2, 2, 7, 3])
    policy = Staircase(list(itertools.islice(lengths, 4000)))
    tasks = Tasks()
    groups = new_generator(policy, over_provision=1.5)
    handed, tokens = [], 0
    for round_number in range(40):
        made = groups.collect(4, tasks, round=round_number, version=0)
        tokens += made.tokens
        assert len(made.groups) == 4
        handed += [group.task.ref for group in made.groups]
    assert len(set(handed)) == len(handed)
    waiting = groups.under_way
    assert set(handed) | {group.task.ref for group in waiting} == {task.ref for task in tasks.drawn}
    assert all(40 - group.round < 31 for group in waiting)
    drawn = [rollout for group in waiting for rollout in group.rollouts]
    assert tokens > sum(len(rollout.tokens) for rollout in drawn)


def test_group_that_was_begun_long_ago_is_waited_for() -> None:
    policy = Staircase([30, 30, *[1] * 1000])
    tasks = Tasks()
    groups = new_generator(policy, over_provision=2.0)
    rounds = [0, AGE_LIMIT_ROUNDS - 1, AGE_LIMIT_ROUNDS, AGE_LIMIT_ROUNDS + 1]
    made = [groups.collect(1, tasks, round=number, version=number) for number in rounds]
    assert [[group.task for group in one.groups] for one in made] == [
        [tasks.drawn[1]],
        [tasks.drawn[2]],
        [tasks.drawn[0]],  # 28 tokens at once
        [tasks.drawn[3]],
    ]
    (waited,) = made[2].groups
    assert waited.rollouts[0].versions == [(0, 1), (AGE_LIMIT_ROUNDS - 1, 1), (AGE_LIMIT_ROUNDS, 28)]
    assert made[2].tokens == 2 * 28 + 2


def test_label_has_tokens_log_probabilities_and_versions_where_they_differ() -> None:
    rollouts = tuple(
        Rollout(prompt=(1,), tokens=[*tokens], log_probs=[-0.5] * len(tokens), done=True, versions=versions)
        for tokens, versions in (((5, 6, 1), [(7, 2), (9, 1)]), ((5, 1), [(9, 2)]), ((5, 5), [(7, 2)]))
    )
    label = GeneratedGroup(task=sum_task(0, 0), round=0, rollouts=rollouts).sampling("gpt")
    assert label.policy == "9-gpt"
    assert version_of(label.policy) == 9
    assert [one.ids() for one in label.drawn] == [(5, 6, 1), (5, 1), (5, 5)]
    assert [one.values() for one in label.drawn] == [(-0.5,) * 3, (-0.5,) * 2, (-0.5,) * 2]
    assert [one.versions for one in label.drawn] == [((7, 2), (9, 1)), msgspec.UNSET, ((7, 2),)]


def test_version_is_noted_for_what_is_new() -> None:
    rollout = Rollout(prompt=(1,))
    rollout.note_version(3)
    assert rollout.versions == []
    for version, drawn in ((3, 2), (3, 1), (4, 0), (5, 2)):
        rollout.tokens += [9] * drawn
        rollout.note_version(version)
    assert rollout.versions == [(3, 3), (5, 2)]
