from __future__ import annotations

import pytest

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.families import load_family
from shoal.node.sapo.tasks import Task, TaskChoice
from shoal.node.sapo.warm_up import Lessons, WarmUpProgress, WarmUpSettings, warm_up
from shoal.protocol.errors import ConfigError
from tests.node.sapo.sums import SUMS, SomeSums, Sums, score

SETTINGS = CharModelSettings(width=32, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="01234+=")


class SolvedSums(Sums):
    """Sums that know their answer."""

    def solution(self, task: Task) -> str:
        return str(sum(self.terms(task.config, task.ref.seed, task.ref.index)))


CHOICES = [TaskChoice(family=SolvedSums(), config={"most": 2})]


def test_a_warm_up_ends_at_the_reward_that_was_asked_for() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    report = warm_up(policy, CHOICES, WarmUpSettings(reward=0.25, interval=5), score=score, seed=1)
    assert 0.25 <= report.reward < 0.9
    assert 5 <= report.updates <= 300
    again = warm_up(policy, CHOICES, WarmUpSettings(reward=0.1), score=score, seed=2)
    assert again.updates == 0
    assert again.reward >= 0.1


def test_a_warm_up_makes_no_more_updates_than_it_may() -> None:
    told: list[WarmUpProgress] = []
    settings = WarmUpSettings(reward=1.0, updates=7, interval=5)
    report = warm_up(CharPolicy(SETTINGS, seed=1), CHOICES, settings, score=score, seed=1, tell=told.append)
    assert report.updates == 7
    assert [progress.updates for progress in told] == list(range(8))  # before the first, which may take long, too
    assert (told[0].reward, told[0].left_s) == (None, None)
    first, second = {progress.reward for progress in told[1:6]}, {progress.reward for progress in told[6:]}
    assert len(first) == len(second) == 1  # as measured before these updates
    assert first | second <= {share / 128 for share in range(129)}
    assert told[-1].left_s == 0
    assert all(progress.left_s for progress in told[1:-1])


def test_lessons_are_solved_tasks_that_follow_from_seed_and_stream() -> None:
    drawn = Lessons(CHOICES, seed=1, stream="lessons").draw(50)
    assert score([(lesson.task, lesson.answer) for lesson in drawn]) == [1.0] * 50
    assert Lessons(CHOICES, seed=1, stream="lessons").draw(50) == drawn
    seeds = {lesson.task.ref.seed for lesson in drawn}
    for other in (Lessons(CHOICES, seed=1, stream="probes"), Lessons(CHOICES, seed=2, stream="lessons")):
        assert not seeds & {lesson.task.ref.seed for lesson in other.draw(50)}


def test_lessons_of_the_gym_get_full_reward() -> None:
    family = load_family("base_conversion")
    lessons = Lessons([TaskChoice(family=family, config="easy")], seed=1, stream="lessons").draw(10)
    assert [family.score(lesson.task, lesson.answer) for lesson in lessons] == [1.0] * 10


def test_lessons_that_cannot_be_made_are_replaced() -> None:
    class Some(SolvedSums, SomeSums):
        name = "some"

    drawn = Lessons([TaskChoice(family=Some(), config={"most": 2})], seed=1, stream="lessons").draw(50)
    assert score([(lesson.task, lesson.answer) for lesson in drawn]) == [1.0] * 50
    assert {lesson.task.ref.seed % 2 for lesson in drawn} == {0}


def test_a_family_without_solutions_cannot_be_taught() -> None:
    with pytest.raises(ConfigError, match=r"`def solution\(self, task\)` in its class, .* or warm_up_updates = 0"):
        Lessons([TaskChoice(family=SUMS, config={})], seed=1, stream="lessons").draw(1)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError):
        WarmUpSettings(reward=1.5)
