"""Specification of `shoal bench sapo`: the swarm, its tasks, its models, and the result."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from shoal.lab.bench.machine import Machine
from shoal.lab.case import Numbers, Spec, parse_numbers
from shoal.node.option import Option, Within
from shoal.node.sapo.char_policy import CharModelSettings
from shoal.node.sapo.families import load_family
from shoal.node.sapo.grpo import ExternalTerms
from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.learner import LearnerSettings
from shoal.node.sapo.tasks import Config, Task, TaskChoice, TaskFamily, answer_in
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.sapo.warm_up import WarmUpSettings
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import load_manifest
from shoal.protocol.manifest_rollouts import RolloutsSection

Skills = Literal["like", "unlike"]

AGENTS_LIMIT: Final = 64
ROUNDS_LIMIT: Final = 100_000
GROUPS_LIMIT: Final = 1024
"""Of one round."""

TASKS: Final[tuple[tuple[str, Config], ...]] = (
    ("base_conversion", {"min_base": 2, "max_base": 4, "min_value": 0, "max_value": 15}),
    (
        "basic_arithmetic",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["+", "-"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
    ),
    ("binary_matrix", {"min_n": 2, "max_n": 2, "p_zero": 0.5}),
    ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9}),
)
"""Families of reasoning-gym, with configs that the character model learns in minutes; all are drawn equally often."""

MODEL: Final = CharModelSettings(width=64, layers=2, heads=4, prompt_chars=48, completion_tokens=8)
UPDATES: Final = UpdateSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoBench(Spec):
    """Options of `shoal bench sapo`: a swarm, or several that differ in `settings`; and what is fixed of its agents.

    skills: `like`: every agent is warmed up on all families; `unlike`: each on half of them, shifted by one from agent
    to agent. warm_up: its reward is `warm_up_reward`. choices: tasks in place of those of `tasks`. Raises ConfigError
    for what cannot be run.
    """

    local: Annotated[
        int, Option("--local", help="I: groups that each agent generates a round.", check=Within(1, GROUPS_LIMIT))
    ] = 4
    external: Annotated[
        int,
        Option("--external", help="J: groups of others that each agent takes a round.", check=Within(0, GROUPS_LIMIT)),
    ] = 4
    agents: Annotated[
        int, Option("--agents", help="How many agents, attackers among them.", check=Within(1, AGENTS_LIMIT))
    ] = 8
    rounds: Annotated[
        int, Option("--rounds", help="How many rounds every agent makes.", check=Within(1, ROUNDS_LIMIT))
    ] = 200
    skills: Annotated[
        Skills, Option("--skills", help="like: all are warmed up on all tasks; unlike: each on half.")
    ] = "like"
    attackers: Annotated[float, Option("--attackers", help="Share of the agents that attack.")] = 0.0
    settings: Annotated[
        str | None,
        Option("--settings", help="Several I/J, like 8/0,4/4, one after the other, and a table.", metavar="I/J,…"),
    ] = None
    seed: Annotated[int, Option("--seed", help="Of models, tasks and draws.")] = 1
    seeds: Annotated[
        Numbers | None, Option("--seeds", help="Several seeds, like 1,2,3.", metavar="S,S…", parse=parse_numbers)
    ] = None
    results: Annotated[
        Path | None,
        Option("--results", help="Add each run to this file, a document a line; do not repeat what is in it."),
    ] = None
    terms: Annotated[
        ExternalTerms, Option("--terms", help="What bounds others' completions with negative advantage.")
    ] = "positive"
    learning_rate: Annotated[float, Option("--learning-rate", help="Of every agent's AdamW.")] = UPDATES.learning_rate
    common: Annotated[
        bool, Option("--common", help="All agents have one policy: after each round the mean of theirs.")
    ] = False
    delay: Annotated[int, Option("--delay", help="Rounds after which others hear of a group that was made.")] = 0
    warm_up_reward: Annotated[
        float, Option("--warm-up-reward", help="The reward at which an agent's supervised warm-up ends.")
    ] = WarmUpSettings().reward
    tasks: Annotated[
        Path | None,
        Option(
            "--tasks",
            help="Train on the tasks of this manifest's [rollouts], by their own rewards, in place of four easy ones.",
            metavar="MANIFEST",
        ),
    ] = None
    group_size: int = 8
    model: CharModelSettings = MODEL
    warm_up: WarmUpSettings = field(default_factory=WarmUpSettings)
    choices: tuple[TaskChoice, ...] = ()

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if len(self.given_tasks) == 1 and self.skills == "unlike":
            raise ConfigError("--skills unlike: of one task there is no half; give --tasks a manifest with two or more")
        if not 0 <= self.delay < self.rounds + 1:
            raise ConfigError(f"--delay must be 0 to the {self.rounds} rounds that are made, not {self.delay}")
        if not 0 <= self.attackers < 1 or self.honest < 1:
            raise ConfigError(f"--attackers must leave an honest agent, not {self.attackers:g} of {self.agents}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"--learning-rate must be a number above 0, not {self.learning_rate}")
        _ = self.benches

    @property
    def benches(self) -> list[SapoBench]:
        """One bench for each of the `settings`, this one where there are none. Raises ConfigError."""
        if self.settings is None:
            return [self]
        pairs = pairs_of(self.settings)
        return [replace(self, settings=None, local=local, external=external) for local, external in pairs]

    @property
    def attacking(self) -> int:
        """Number of agents that attack."""
        return round(self.attackers * self.agents)

    @property
    def honest(self) -> int:
        """Number of agents that learn."""
        return self.agents - self.attacking

    @property
    def given_tasks(self) -> tuple[TaskChoice, ...]:
        """Tasks that were asked for; none for those of the benchmark."""
        return self.choices or (() if self.tasks is None else tasks_in(self.tasks))

    @property
    def sized_model(self) -> CharModelSettings:
        """The model, with completions as long as those of the manifest whose tasks are given."""
        if self.tasks is None:
            return self.model
        return replace(self.model, completion_tokens=_section_of(self.tasks).completion_tokens)

    @property
    def learner(self) -> LearnerSettings:
        """Settings of every honest agent's learner."""
        return LearnerSettings(
            local=self.local,
            external=self.external,
            group_size=self.group_size,
            label="char-policy" if self.terms == "tis" else None,
            updates=replace(UPDATES, learning_rate=self.learning_rate, terms=self.terms),
        )

    @property
    def facts(self) -> dict[str, int | float | str]:
        """Settings that tell this bench's results from those of another, under their names in `SapoResult`."""
        return {
            "local": self.local,
            "external": self.external,
            "agents": self.agents,
            "rounds": self.rounds,
            "skills": self.skills,
            "terms": self.terms,
            "attackers": self.attacking,
            "common": self.common,
            "delay": self.delay,
            "learning_rate": self.learning_rate,
            "warm_up_reward": self.warm_up_reward,
            "tasks": "; ".join(f"{one.family.name} {one.config} × {one.weight}" for one in self.given_tasks),
        }


def pairs_of(settings: str) -> list[tuple[int, int]]:
    """I and J of each pair of "8/0,4/4". Raises ConfigError."""
    found = [re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", part.strip()) for part in settings.split(",")]
    pairs = [(int(one[1]), int(one[2])) for one in found if one is not None]
    if len(pairs) < len(found):
        raise ConfigError(f"--settings: {settings!r} is not a list of pairs like 8/0,4/4")
    return pairs


def task_choices() -> list[TaskChoice]:
    """The families of `TASKS`. Raises ConfigError where reasoning-gym is missing."""
    return [TaskChoice(family=ExactFamily(name), config=config) for name, config in TASKS]


def tasks_in(manifest: Path) -> tuple[TaskChoice, ...]:
    """The tasks that the swarm of a manifest shares. Raises ConfigError, also for a family that is not installed."""
    return tuple(
        TaskChoice(family=load_family(one.family), config=one.config, weight=one.weight)
        for one in _section_of(manifest).tasks
    )


def _section_of(manifest: Path) -> RolloutsSection:
    section = load_manifest(manifest).rollouts
    if section is None:
        raise ConfigError(
            f"--tasks {manifest}: it has no [rollouts]; `shoal init --strategy rollouts` writes one that has"
        )
    return section


def taught_choices(bench: SapoBench, choices: list[TaskChoice], agent: int) -> list[TaskChoice]:
    """Tasks that an agent is warmed up on."""
    if bench.skills == "like":
        return choices
    half = len(choices) // 2
    return [choices[(agent + at) % len(choices)] for at in range(half)]


class ExactFamily(TaskFamily):
    """A family of reasoning-gym whose reward is 1 for its own answer and 0 for any other text.

    The library gives a share of the reward to a text that contains the answer, and a model that is trained on nothing
    else learns to write down many.
    """

    scoring = "direct"

    def __init__(self, name: str) -> None:
        self._gym = GymFamily(name)
        self.name = f"exact.{name}"
        self.version = self._gym.version

    def check(self, config: Config) -> None:
        """See `TaskFamily`."""
        self._gym.check(config)

    def question(self, config: Config, seed: int, index: int) -> str:
        """See `TaskFamily`."""
        return self._gym.question(config, seed, index)

    def solution(self, task: Task) -> str | None:
        """See `TaskFamily`."""
        return self._gym.solution(task)

    def score(self, task: Task, text: str) -> float:
        """Score a text 1 for the family's own answer, 0 for any other."""
        return float(answer_in(text) == self.solution(task))


class SapoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench sapo`. All figures are of the honest agents.

    cumulative_reward: the sum over rounds and agents of the mean reward of the completions that the agent generated
    itself in that round. final_reward: the mean of these over the last tenth of the rounds. reward_by_round: their mean
    over the agents. generated_tokens: all that were drawn, without those of the warm-up. wire_bytes: announcements,
    once for each who receives them, and pulled groups. rejected: refusals by reason. held_out_first, held_out_last: the
    greedy reward on held-out tasks before the first round and after the last, mean over the agents.
    """

    local: int
    external: int
    agents: int
    rounds: int
    cumulative_reward: float
    final_reward: float
    generated_tokens: int
    wire_bytes: int
    rejected: dict[str, int]
    reward_per_million_tokens: float
    pulled_bytes: int
    trained_bytes: int
    informative_groups: float
    external_groups: float
    reward_by_round: tuple[float, ...]
    warm_up_updates: tuple[int, ...]
    warm_up_rewards: tuple[float, ...]
    skills: str
    terms: str
    attackers: int
    learning_rate: float
    warm_up_reward: float
    seed: int
    cpu_s: float
    machine: Machine
    common: bool = False
    delay: int = 0
    tasks: str = ""
    held_out_first: float | None = None
    held_out_last: float | None = None
