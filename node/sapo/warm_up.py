"""A short supervised warm-up: a model that never answers right has no reward to learn from.

It is taught by Muon, which gets as far with fewer lessons than AdamW, and leaves a policy that learns more from
rollouts afterwards. The lessons are tasks of the same families with their solutions. Their seeds are hashed in a domain
of their own, so they are not the seeds that `assigned_seed` gives to anybody, but for a chance of 2^-63 each; a small
family may ask the same question under two seeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from shoal.node.sapo.generation import rewards_of
from shoal.node.sapo.groups import mean
from shoal.node.sapo.judge import Score
from shoal.node.sapo.policy import Policy, module_of, trained_parameters
from shoal.node.sapo.tasks import Task, TaskChoice, makeable
from shoal.node.sapo.turns import encoded
from shoal.node.sapo.updates import GRADIENT_LIMIT
from shoal.node.training.muon import Muon
from shoal.protocol.errors import ConfigError
from shoal.protocol.rollouts import seed_of

_DOMAIN: Final = "shoal sapo warm-up seed v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A question and its answer."""

    task: Task
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpSettings:
    """Updates of `rows` lessons each until the mean reward of `probes` sampled completions reaches `reward`.

    It is measured after every `interval` updates; `updates` is the most of them.
    """

    reward: float = 0.2
    updates: int = 800
    interval: int = 20
    rows: int = 32
    probes: int = 128
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.reward <= 1 or min(self.interval, self.rows, self.probes) < 1 or self.updates < 0:
            raise ConfigError(f"a warm-up needs a reward of 0 to 1 and sizes of at least 1: change {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpReport:
    """The way that was gone: updates made, and the reward that was measured last."""

    updates: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpProgress:
    """Updates made so far, the reward that was measured last, None before; and how long the way is at most from here.

    left_s: for the updates that it may still make, at the pace so far; None before one was made.
    """

    updates: int
    reward: float | None = None
    left_s: float | None = None


class Lessons:
    """Tasks of some families by turns of chance, each with its solution. `stream` tells disjoint sequences apart."""

    def __init__(self, choices: Sequence[TaskChoice], *, seed: int, stream: str) -> None:
        """Raises ConfigError for no choices."""
        if not choices:
            raise ConfigError("a warm-up must have at least one task family")
        self._choices = choices
        self._weights = [choice.weight for choice in choices]
        self._random = random.Random(f"{seed}/{stream}")

    def draw(self, count: int) -> list[Lesson]:
        """The next lessons. Raises ConfigError where a family has no solutions to teach."""
        drawn = self._random.choices(self._choices, self._weights, k=count)
        return [self._lesson(choice) for choice in drawn]

    def _lesson(self, choice: TaskChoice) -> Lesson:
        task = next(makeable(lambda _: choice.family.make(choice.settings, self._seed(), 0)))
        answer = choice.family.answer(task)
        if answer is None:
            teacher = "solution(self, task)" if task.answering is None else "say(self, task, said)"
            raise ConfigError(
                f"the task family {choice.family.name!r} has no right answer to teach this policy first; write "
                f"`def {teacher}` in its class, which returns one, or warm_up_updates = 0 in [workload.options] for no "
                "teaching"
            )
        return Lesson(task=task, answer=answer)

    def _seed(self) -> int:
        return seed_of(self._random.getrandbits(128).to_bytes(16, "big"), context=_DOMAIN)


def warm_up(
    policy: Policy,
    choices: Sequence[TaskChoice],
    settings: WarmUpSettings,
    *,
    score: Score,
    seed: int,
    tell: Callable[[WarmUpProgress], None] = lambda progress: None,
) -> WarmUpReport:
    """Teach `policy` the solutions of these families until its reward on them is the one asked for.

    tell: is called before the first update and after each.
    """
    tell(WarmUpProgress(updates=0))
    lessons, probes = Lessons(choices, seed=seed, stream="lessons"), Lessons(choices, seed=seed, stream="probes")
    chance = random.Random(f"{seed}/draws")
    optimizer = Muon(module_of(policy), list(trained_parameters(policy).values()), betas=(0.9, 0.95), weight_decay=0.0)
    step = partial(optimizer.step, settings.learning_rate)
    updates, reward = 0, measure_reward(policy, probes.draw(settings.probes), score=score, chance=chance)
    began = time.monotonic()
    while reward < settings.reward and updates < settings.updates:
        for _ in range(min(settings.interval, settings.updates - updates)):
            teach(policy, lessons.draw(settings.rows), step=step)
            updates += 1
            left_s = (time.monotonic() - began) / updates * (settings.updates - updates)
            tell(WarmUpProgress(updates=updates, reward=reward, left_s=left_s))
        reward = measure_reward(policy, probes.draw(settings.probes), score=score, chance=chance)
    return WarmUpReport(updates=updates, reward=reward)


def measure_reward(policy: Policy, lessons: Sequence[Lesson], *, score: Score, chance: random.Random) -> float:
    """The mean reward of one sampled completion for each lesson's question, of those that were scored in time."""
    tasks = [lesson.task for lesson in lessons]
    rewards = rewards_of(policy, tasks, score=score, draws=lambda _: chance.random())
    return mean(reward for reward in rewards if reward is not None) or 0.0


def teach(policy: Policy, lessons: Sequence[Lesson], *, step: Callable[[], object]) -> None:
    """Update the policy on lessons by `step`, its optimizer's; those that its tokens cannot express are left out."""
    samples = [sample for one in lessons if (sample := encoded(policy, one.task, one.answer)) is not None]
    if not samples:
        return
    parameters = list(trained_parameters(policy).values())
    for parameter in parameters:
        parameter.grad = None
    loss = -policy.log_probs(samples).sum() / sum(sample.drawn for sample in samples)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_LIMIT)
    step()
