"""A task family for tests of the learner: sums of two digits, scored exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.tasks import Config, Task, TaskFamily, check_options
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId


class Sums(TaskFamily):
    """What is a+b? Both are digits up to `most`."""

    name = "sums"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        check_options(self.name, config, {"most": range(1, 10)})

    def question(self, config: Config, seed: int, index: int) -> str:
        return "{}+{}=".format(*self.terms(config, seed, index))

    def score(self, task: Task, text: str) -> float:
        return float(text == str(sum(self.terms(task.config, task.ref.seed, task.ref.index))))

    def terms(self, config: Config, seed: int, index: int) -> tuple[int, int]:
        dice = random.Random(f"{seed}/{index}")
        most = config.get("most", 9)
        assert isinstance(most, int)
        return dice.randint(0, most), dice.randint(0, most)


class SomeSums(Sums):
    """Sums of even seeds only."""

    name = "some-sums"

    def question(self, config: Config, seed: int, index: int) -> str:
        if seed % 2:
            raise LocalError("an odd seed")
        return super().question(config, seed, index)


SUMS = Sums()


def sum_task(round: int, index: int, most: int = 9) -> Task:
    """The task of a round and index, the same for every agent."""
    return SUMS.make({"most": most}, round, index)


def score(pairs: Sequence[tuple[Task, str]]) -> list[float]:
    """The rewards of completions."""
    return [SUMS.score(task, text) for task, text in pairs]


def foreign_group(task: Task, texts: Sequence[str], *, origin: str = "other") -> JudgedGroup:
    """Another agent's group, judged."""
    return JudgedGroup(
        task=task,
        texts=tuple(texts),
        rewards=tuple(score([(task, text) for text in texts])),
        origin=PeerId(origin),
        round=0,
        policy_version=0,
    )
