from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.held_out import TIME_SHARE, HeldOut, held_out_tasks
from shoal.node.sapo.policy import Rollout, Sample
from shoal.node.sapo.tasks import Task, TaskChoice, TaskSource
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import assigned_seed
from shoal.protocol.wire import SwarmId
from tests.node.sapo.sums import SUMS, SomeSums, Sums, score

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="01234+=")


class Differences(Sums):
    """The same questions under another name."""

    name = "differences"


def new_source() -> TaskSource:
    choices = [
        TaskChoice(family=Sums(), config={"most": 2}, weight=3),
        TaskChoice(family=Differences(), config={"most": 2}),
    ]
    return TaskSource(choices)


class Solver(CharPolicy):
    """Greedily answers the sums of one family right, and no other's; counts what it is asked together."""

    def __init__(self, right: Callable[[str], bool]) -> None:
        super().__init__(SETTINGS, seed=1)
        self.asked: list[int] = []
        self._right = right

    def extend(
        self,
        rollouts: Sequence[Rollout],
        *,
        enough: Callable[[], bool] | None = None,
    ) -> int:
        assert all(rollout.draws is None for rollout in rollouts)
        self.asked.append(len(rollouts))
        for rollout in rollouts:
            question = self.decode(rollout.prompt)
            answer = str(sum(map(int, question.rstrip("=").split("+"))) if self._right(question) else 4)
            rollout.tokens += self.encode_completion(answer) or ()
            rollout.done = True
        return len(rollouts)


def test_held_out_tasks_are_the_same_for_everybody_and_nobody_is_assigned_one() -> None:
    tasks = held_out_tasks(new_source())
    assert tasks == held_out_tasks(new_source())
    assert len({task.ref.seed for task in tasks}) == 200
    assert tasks[0].ref.seed == 2333750597260746438
    families = Counter(task.ref.family for task in tasks)
    assert families["sums"] / 200 == pytest.approx(0.75, abs=0.08)
    assigned = {assigned_seed(SwarmId(bytes(32)), PeerId("p"), 0, index) for index in range(200)}
    assert not assigned & {task.ref.seed for task in tasks}


def test_held_out_tasks_that_cannot_be_made_are_replaced() -> None:
    tasks = held_out_tasks(TaskSource([TaskChoice(family=SomeSums(), config={"most": 2})]))
    assert all(task.question == SUMS.question({"most": 2}, task.ref.seed, 0) for task in tasks)
    every = held_out_tasks(TaskSource([TaskChoice(family=Sums(), config={"most": 2})]), 1000)
    assert [task.ref.seed for task in tasks] == [one.ref.seed for one in every if one.ref.seed % 2 == 0][:200]


def test_the_reward_is_the_mean_of_the_greedy_answers_in_all_and_by_family() -> None:
    tasks = held_out_tasks(new_source(), 50)
    policy = Solver(lambda question: question != "1+1=")
    held_out = HeldOut(tasks, every=1, together=16, score=score)
    found = held_out.evaluate(policy, 0)
    right = [task for task in tasks if task.question != "1+1="]
    assert 0 < len(right) < 50
    assert (found.tasks, found.reward) == (50, pytest.approx(len(right) / 50))
    for family in ("sums", "differences"):
        own = [task for task in tasks if task.ref.family == family]
        assert found.by_family[family] == pytest.approx(sum(task in right for task in own) / len(own))
    assert policy.asked == [16, 16, 16, 2]


def test_an_answer_that_was_not_scored_in_time_counts_nothing() -> None:
    def late(pairs: Sequence[tuple[Task, str]]) -> list[float | None]:
        return [None, *score(pairs[1:])]

    found = HeldOut(held_out_tasks(new_source(), 20), every=1, together=20, score=late).evaluate(
        Solver(lambda _: True), 0
    )
    assert (found.reward, found.tasks) == (1.0, 19)


def test_an_evaluation_waits_for_rounds_and_for_its_share_of_the_time() -> None:
    now = [100.0]
    held_out = HeldOut(
        held_out_tasks(new_source(), 8), every=20, together=8, score=score, clock=lambda: now[0], rest=lambda: None
    )

    class Slow(Solver):
        def extend(self, *args: object, **keys: object) -> int:
            now[0] += 2.0
            return super().extend(*args, **keys)  # type: ignore[arg-type]

    policy = Slow(lambda _: True)
    assert held_out.is_due(0)
    assert held_out.evaluate(policy, 0).seconds == 2.0
    after = now[0]
    now[0] = after + 2.0 / TIME_SHARE - 2.0 - 0.1  # 5 % of 40 s
    assert not held_out.is_due(20)
    now[0] += 0.2
    assert [held_out.is_due(round) for round in (19, 20, 21)] == [False, True, True]
    assert (held_out.is_behind(0), held_out.is_behind(1)) == (False, True)
    never = HeldOut([], every=0, together=8, score=score)
    assert (never.is_due(0), never.is_behind(5)) == (False, False)


def test_tasks_that_take_too_long_are_fewer_from_then_on() -> None:
    ticks = count(0.0, 200.0)
    held_out = HeldOut(held_out_tasks(new_source(), 40), every=1, together=8, score=score, clock=lambda: next(ticks))
    assert [held_out.evaluate(Solver(lambda _: True), round).tasks for round in (0, 1)] == [16, 16]


def test_without_draws_the_most_probable_token_is_taken() -> None:
    policy = CharPolicy(SETTINGS, seed=3)
    prompt = policy.encode_prompt("1+1=")
    rollout = Rollout(prompt=prompt)
    policy.extend([rollout])
    for at, token in enumerate(rollout.tokens):
        others = [
            Sample(prompt=prompt, completion=(*rollout.tokens[:at], other))
            for other in (1, *range(4, 4 + len(SETTINGS.alphabet)))
        ]
        logs = policy.log_probs(others)[:, at].detach()
        assert others[int(logs.argmax())].completion[-1] == token
        assert rollout.log_probs[at] == pytest.approx(float(logs.max()), abs=1e-5)
