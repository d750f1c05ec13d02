from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.char_policy import END, CharModelSettings, CharPolicy
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.grpo import ExternalTerms
from shoal.node.sapo.judge import Score
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings, Sharing
from shoal.node.sapo.policy import Sample
from shoal.node.sapo.tasks import Task
from shoal.node.sapo.updates import UpdateSettings
from shoal.protocol.errors import LocalError
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import foreign_group, score, sum_task

SMALL = CharModelSettings(width=32, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="01234+=")


class Market:
    """A `Sharing` that holds prepared groups, and notes what it is offered and asked for."""

    def __init__(self, groups: Sequence[JudgedGroup] = ()) -> None:
        self.groups = list(groups)
        self.offered: list[JudgedGroup] = []
        self.asked: list[int] = []

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        self.offered += groups

    def take(self, count: int) -> list[JudgedGroup]:
        self.asked.append(count)
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken


def easy_task(round: int, index: int) -> Task:
    return sum_task(round, index, most=2)


def new_learner(
    sharing: Sharing,
    *,
    settings: CharModelSettings = SMALL,
    seed: int = 1,
    rate: float = 3e-3,
    terms: ExternalTerms = "positive",
    score: Score = score,
    handed_out: Callable[[], None] = lambda: None,
    **rounds: Any,
) -> Learner:
    return Learner(
        CharPolicy(settings, seed=seed),
        LearnerSettings(updates=UpdateSettings(learning_rate=rate, terms=terms), **rounds),
        draw=easy_task,
        score=score,
        sharing=sharing,
        draws=assigned(seed),
        handed_out=handed_out,
    )


def mean_reward(reports: Sequence[RoundReport]) -> float:
    return sum(report.reward or 0.0 for report in reports) / len(reports)


def lesson(index: int, *, wrong: str = "", right: str | None = None, copies: int = 4) -> JudgedGroup:
    """Another agent's group: half of the completions right, half `wrong`."""
    task = easy_task(1000, index)
    answer = right if right is not None else next(str(n) for n in range(9) if score([(task, str(n))]) == [1.0])
    return foreign_group(task, [answer, wrong] * (copies // 2))


def test_a_learner_alone_learns_a_small_task() -> None:
    learner = new_learner(Alone())
    reports = [learner.run_round() for _ in range(60)]
    # Two tokens of eight have to be right: 1/64 by chance, and a third for the best answer that never changes.
    assert mean_reward(reports[:5]) < 0.05
    assert mean_reward(reports[-10:]) > 0.15
    assert learner.round == 60


def test_the_same_seeds_give_the_same_rounds() -> None:
    runs = [[learner.run_round() for _ in range(6)] for learner in (new_learner(Alone()), new_learner(Alone()))]
    assert runs[0] == runs[1]
    other = new_learner(Alone(), seed=2)
    assert [other.run_round() for _ in range(6)] != runs[0]


def test_own_groups_are_offered_as_they_were_drawn_with_their_rewards() -> None:
    market = Market()
    learner = new_learner(market, local=5, group_size=6, label="small")
    policy = learner.policy
    learner.run_round()
    before = copy.deepcopy(policy)
    report = learner.run_round()
    assert (report.round, report.local, report.external) == (1, 5, 0)
    groups = market.offered[5:]
    assert [(group.round, group.policy_version, group.origin) for group in groups] == [(1, 1, None)] * 5
    assert [group.task for group in groups] == [easy_task(1, index) for index in range(5)]
    for group in groups:
        assert group.rewards == tuple(score([(group.task, text) for text in group.texts]))
        assert group.sampling is not None
        assert group.sampling.policy == "1-small"
        assert len(group.texts) == len(group.rewards) == len(group.sampling.drawn) == 6
        prompt = policy.encode_prompt(group.task.question)
        for text, drawn in zip(group.texts, group.sampling.drawn, strict=True):
            assert policy.decode(drawn.ids()) == text
            assert len(drawn.ids()) == 3 or drawn.ids()[-1] == END
            found = before.log_probs([Sample(prompt=prompt, completion=drawn.ids())]).detach()[0]
            assert drawn.values() == pytest.approx(found.tolist(), abs=1e-5)
            assert drawn.versions is msgspec.UNSET
    rewards = [reward for group in groups for reward in group.rewards]
    assert report.reward == pytest.approx(sum(rewards) / len(rewards))
    lengths = [len(drawn.ids()) for group in groups if group.sampling for drawn in group.sampling.drawn]
    assert report.generated_tokens == sum(lengths)


def test_groups_name_the_version_that_their_policy_stands_to() -> None:
    market = Market()
    learner = new_learner(market, local=2, label="small")
    learner.version = 12
    learner.run_round()
    assert [(group.policy_version, group.sampling and group.sampling.policy) for group in market.offered] == [
        (12, "12-small")
    ] * 2


def test_a_round_takes_others_groups_and_generates_fewer() -> None:
    market = Market([lesson(at) for at in range(3)])
    report = new_learner(market, local=2, external=3).run_round()
    assert market.asked == [3]
    assert (report.local, report.external) == (2, 3)
    assert report.informative >= 3


def test_missing_groups_are_generated_instead() -> None:
    market = Market([lesson(0)])
    learner = new_learner(market, local=2, external=4)
    report = learner.run_round()
    assert (report.local, report.external) == (5, 1)
    assert [group.task for group in market.offered] == [easy_task(0, index) for index in range(5)]
    vanished = learner.run_round()
    assert (vanished.local, vanished.external) == (6, 0)
    alone = new_learner(Alone(), local=2, external=4).run_round()
    assert (alone.local, alone.external) == (6, 0)


def test_tasks_that_cannot_be_made_are_skipped() -> None:
    """Also in what is generated for want of others' groups, and the same ones whenever the round is made."""
    market = Market()
    learner = new_learner(market, local=3, external=2)

    def draw(round: int, index: int) -> Task:
        if index % 3:
            raise LocalError("no such task")
        return easy_task(round, index)

    learner._draw = draw
    assert [learner.run_round().local for _ in range(2)] == [5, 5]
    assert [group.task for group in market.offered] == [
        easy_task(round, index) for round in range(2) for index in (0, 3, 6, 9, 12)
    ]


def test_groups_that_the_tokenizer_cannot_express_are_replaced() -> None:
    market = Market([lesson(0, wrong="seven"), lesson(1), lesson(2, wrong="é"), lesson(3)])
    learner = new_learner(market, local=1, external=2)
    report = learner.run_round()
    assert (report.local, report.external) == (1, 2)
    assert market.asked == [2, 1, 1]
    assert report.unencodable == 2
    market.groups = [lesson(at, wrong="seven") for at in range(4, 60)]
    report = learner.run_round()
    assert (report.local, report.external) == (3, 0)
    assert market.asked[3:] == [2, 2, 2]  # bounded, whatever comes


def test_others_answers_are_learnt_by_another_tokenizer_model_and_group_size() -> None:
    """An agent that finds nothing itself learns the answers from groups of 4 and 12 completions."""

    class School(Market):
        def take(self, count: int) -> list[JudgedGroup]:
            self.asked.append(count)
            return [lesson(10 * len(self.asked) + at, wrong="44", copies=4 + 8 * (at % 2)) for at in range(count)]

    settings = CharModelSettings(
        width=32, layers=1, heads=2, prompt_chars=4, completion_tokens=12, alphabet="=+abcdefghijklmnopqrstuvwxyz43210"
    )
    learner = new_learner(School(), settings=settings, local=1, external=8, rate=5e-3)
    reports = [learner.run_round() for _ in range(60)]
    assert mean_reward(reports[:5]) < 0.1
    assert mean_reward(reports[-10:]) > 0.3


def test_a_policy_moves_towards_the_good_and_away_from_the_bad() -> None:
    task = easy_task(1000, 0)
    market = Market([lesson(0, wrong="44")])
    learner = new_learner(market, local=1, external=1, rate=1e-3, terms="naive")
    prompt = learner.policy.encode_prompt(task.question)
    right = next(group.texts[0] for group in market.groups)

    def probability(text: str) -> float:
        completion = learner.policy.encode_completion(text)
        assert completion is not None
        return float(learner.policy.log_probs([Sample(prompt=prompt, completion=completion)]).detach().sum().exp())

    before = {text: probability(text) for text in (right, "44")}
    learner.run_round()
    assert probability(right) > before[right] * 1.02
    assert probability("44") < before["44"]


def test_over_provision_hands_out_groups_of_earlier_rounds_with_their_round() -> None:
    market = Market()
    settings = CharModelSettings(
        width=32, layers=1, heads=2, prompt_chars=4, completion_tokens=24, alphabet="0123456789+="
    )
    learner = new_learner(market, settings=settings, local=2, group_size=2, over_provision=3.0)
    reports = [learner.run_round() for _ in range(12)]
    assert all(report.local == 2 for report in reports)
    ages = [group.policy_version - group.round for group in market.offered]
    assert max(ages) > 0
    assert min(ages) == 0
    assert all(group.sampling is None for group in market.offered), "nothing asks for labels"
    # A task's round is the one it was drawn in, so that others can tell that it was assigned.
    drawn = {easy_task(number, index).ref: number for number in range(12) for index in range(6)}
    assert all(drawn[group.task.ref] == group.round for group in market.offered)


def test_a_round_is_begun_once_and_then_finished() -> None:
    learner = new_learner(Alone())
    with pytest.raises(LocalError):
        learner.finish_round()
    learner.begin_round()
    with pytest.raises(LocalError):
        learner.begin_round()


def test_an_own_answer_that_was_not_scored_in_time_is_not_taken_for_a_wrong_one() -> None:
    market = Market()
    learner = new_learner(market, local=3, group_size=4)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]

    def late(pairs: Sequence[tuple[Task, str]]) -> list[float | None]:
        """The first of each four is right, and of the last two groups one answer is not known."""
        return [None if at in (5, 10) else float(at % 4 == 0) for at in range(len(pairs))]

    learner._score = late
    report = learner.run_round()
    assert (report.local, report.reward, report.informative) == (1, 0.25, 1)
    assert [group.rewards for group in market.offered] == [(1.0, 0.0, 0.0, 0.0)]
    learner._score = lambda pairs: [None] * len(pairs)
    after = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    assert not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    empty = learner.run_round()
    assert (empty.local, empty.reward, empty.gradient_norm) == (0, None, None)
    assert all(torch.equal(one, other) for one, other in zip(after, learner.policy.parameters(), strict=True))


def test_a_round_says_what_its_completions_and_its_update_were_like() -> None:
    market = Market()
    learner = new_learner(
        market, local=2, group_size=4, label="small", score=lambda pairs: [float(at % 2) for at in range(len(pairs))]
    )
    report = learner.run_round()
    groups = [group.sampling.drawn for group in market.offered if group.sampling]
    logs = [log for group in groups for drawn in group for log in drawn.values()]
    assert report.entropy == pytest.approx(-sum(logs) / len(logs))
    assert report.length == len(logs) / 8
    assert report.distinct == sum(len({drawn.ids() for drawn in group}) for group in groups) / 8
    assert (report.gradient_norm or 0) > 0
    assert report.clipped == 0.0  # a round's own draws have ratio 1


def test_what_is_unfinished_is_known_before_anybody_hears_of_what_is_done() -> None:
    happened: list[str] = []

    class Told(Market):
        def offer(self, groups: Sequence[JudgedGroup]) -> None:
            happened.append("offered")

        def take(self, count: int) -> list[JudgedGroup]:
            happened.append("taken")
            return []

    learner = new_learner(Told(), local=1, external=1, handed_out=lambda: happened.append("handed out"))
    learner.run_round()
    assert happened == ["handed out", "offered", "taken", "handed out", "offered"]
