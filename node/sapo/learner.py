"""One agent's rounds: draw tasks, generate, judge, offer to others, take theirs, train.

A round trains on `local` groups of the agent's own and `external` ones of others. What others do not deliver (nobody
is there, all have vanished, nothing that this policy can express) is generated here instead, so an agent that is
alone goes on with as many groups. Others are known only through `Sharing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.generation import AssignedDraws, GeneratedGroup, GroupGenerator
from shoal.node.sapo.groups import JudgedGroup, all_known, mean
from shoal.node.sapo.judge import Score
from shoal.node.sapo.policy import Policy
from shoal.node.sapo.tasks import Task, makeable
from shoal.node.sapo.turns import text_of
from shoal.node.sapo.updates import Row, Updater, UpdateSettings, external_rows, own_rows
from shoal.protocol.errors import LocalError

TAKE_LIMIT = 3
"""Times that a round asks for others' groups in place of those that its policy cannot express."""


DrawTask = Callable[[int, int], Task]
"""The assignment of an agent's tasks, by round and index: the same one whenever it is asked for.

Raises LocalError for one that cannot be made.
"""


class Sharing(Protocol):
    """The place that groups go to and come from. Neither raises: what is wrong with others' groups is counted there."""

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """Give groups of the agent's own to others."""

    def take(self, count: int) -> list[JudgedGroup]:
        """Return at most `count` groups of others that this agent has judged, each of them once."""


class Alone:
    """A `Sharing` with nobody in it."""

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """Keep nothing."""

    def take(self, count: int) -> list[JudgedGroup]:
        """Return none."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The make-up of a round: I groups of its own, one at least, J of others.

    trains: whether the policy is updated; an agent that only samples for others leaves it as it is.
    group_size, over_provision: see `GroupGenerator`. label: the policy's name, by which groups say how they were drawn;
    None where they do not say.
    """

    local: int = 8
    external: int = 0
    group_size: int = 8
    over_provision: float = 1.0
    trains: bool = True
    label: str | None = None
    updates: UpdateSettings = field(default_factory=UpdateSettings)


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round under way. tasks: those that are still to be drawn in it."""

    number: int
    tasks: Iterator[Task]
    tokens: int = 0
    external: int = 0
    unencodable: int = 0
    informative: int = 0
    own: list[JudgedGroup] = field(default_factory=list)
    generated: list[GeneratedGroup] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class Learner:
    """Trains one policy, round by round.

    round: how many are finished. version: the swarm's round to which the policy stands, where policies are averaged;
    None where the policy's version is the agent's own round. generator: of its groups.
    """

    def __init__(
        self,
        policy: Policy,
        settings: LearnerSettings,
        *,
        draw: DrawTask,
        score: Score,
        sharing: Sharing,
        draws: AssignedDraws,
        handed_out: Callable[[], None] = lambda: None,
    ) -> None:
        """draws: of completions. handed_out: is called when some groups are done, before anybody hears of them."""
        self.policy = policy
        self.round = 0
        self.version: int | None = None
        self._settings = settings
        self._draw, self._score, self._sharing, self._handed_out = draw, score, sharing, handed_out
        self.generator = GroupGenerator(
            policy, group_size=settings.group_size, draws=draws, over_provision=settings.over_provision
        )
        self._updater = Updater(policy, settings.updates)
        self._current: _Round | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's optimizer."""
        return self._updater.optimizer

    def run_round(self) -> RoundReport:
        """Make one whole round."""
        self.begin_round()
        return self.finish_round()

    def begin_round(self) -> None:
        """Generate and judge the round's own groups, and offer them."""
        if self._current is not None:
            raise LocalError(f"round {self._current.number} is begun twice")
        self._current = _Round(number=self.round, tasks=makeable(partial(self._draw, self.round)))
        self._generate(self._current, self._settings.local)

    def finish_round(self) -> RoundReport:
        """Take others' groups, generate what is missing, and train."""
        current, self._current = self._current, None
        if current is None:
            raise LocalError("a round is finished that was not begun")
        self._take(current)
        self._generate(current, self._settings.external - current.external)
        update = self._updater.train(current.rows) if self._settings.trains else None
        self.round += 1
        rollouts = [rollout for group in current.generated for rollout in group.rollouts]
        tokens = sum(rollout.sample.drawn for rollout in rollouts)
        distinct = sum(len({tuple(rollout.tokens) for rollout in group.rollouts}) for group in current.generated)
        return RoundReport(
            round=current.number,
            reward=mean(reward for group in current.own for reward in group.rewards),
            local=len(current.own),
            external=current.external,
            informative=current.informative,
            generated_tokens=current.tokens,
            unencodable=current.unencodable,
            entropy=-math.fsum(log for rollout in rollouts for log in rollout.log_probs) / tokens,
            length=tokens / len(rollouts),
            distinct=distinct / len(rollouts),
            gradient_norm=None if update is None else update.gradient_norm,
            clipped=None if update is None else update.clipped,
        )

    def _generate(self, current: _Round, count: int) -> None:
        if count == 0:
            return
        version = self.round if self.version is None else self.version
        draw = partial(next, current.tasks)
        generated = self.generator.collect(count, draw, round=current.number, version=version)
        self._handed_out()
        current.tokens += generated.tokens
        current.generated += generated.groups
        judged = self._judge(generated.groups)
        for made, group in judged:
            current.own.append(group)
            self._add(current, own_rows(made, group.rewards))
        if judged:
            self._sharing.offer([group for _, group in judged])

    def _take(self, current: _Round) -> None:
        """Add others' groups to the round."""
        for _ in range(TAKE_LIMIT):
            missing = self._settings.external - current.external
            groups = self._sharing.take(missing) if missing else []
            for group in groups:
                rows = external_rows(group, self.policy)
                if rows is None:
                    current.unencodable += 1
                    continue
                self._add(current, rows)
                current.external += 1
            if not groups:
                break

    def _add(self, current: _Round, rows: list[Row]) -> None:
        current.rows += rows
        current.informative += any(row.advantage != 0 for row in rows)

    def _judge(self, generated: Sequence[GeneratedGroup]) -> list[tuple[GeneratedGroup, JudgedGroup]]:
        """Return the groups whose completions were all scored."""
        texts = [[text_of(self.policy, group.task, rollout) for rollout in group.rollouts] for group in generated]
        scores = iter(
            self._score([(group.task, text) for group, own in zip(generated, texts, strict=True) for text in own])
        )
        judged = []
        for group, own in zip(generated, texts, strict=True):
            rewards = all_known([next(scores) for _ in own])
            if rewards is not None:
                judged.append((group, self._judged(group, own, rewards)))
        return judged

    def _judged(self, group: GeneratedGroup, texts: Sequence[str], rewards: tuple[float, ...]) -> JudgedGroup:
        return JudgedGroup(
            task=group.task,
            texts=tuple(texts),
            rewards=rewards,
            origin=None,
            round=group.round,
            policy_version=group.version,
            sampling=None if self._settings.label is None else group.sampling(self._settings.label),
        )
