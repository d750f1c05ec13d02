from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal.lab.bench.sapo import WarmStarts, agent_identity, measure_sapo
from shoal.lab.bench.sapo_attack import FLOOD, GROUPS, KINDS, Attacker
from shoal.lab.bench.sapo_spec import TASKS, SapoBench, SapoResult, task_choices, taught_choices
from shoal.lab.bench.sapo_swarm import KEPT_ROUNDS, MemberSharing, SharedMemory
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.families import load_family
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Config, Task, TaskChoice, TaskFamily, TaskSource
from shoal.node.sapo.warm_up import WarmUpSettings
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest
from tests.manifests import manifest_of

TINY = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=16, completion_tokens=6, alphabet="0123456789-. \n")


def tiny_bench(**changes: object) -> SapoBench:
    settings: dict[str, object] = {
        "local": 2,
        "external": 2,
        "agents": 3,
        "rounds": 4,
        "group_size": 4,
        "model": TINY,
        "warm_up": WarmUpSettings(updates=120, probes=32, rows=16),
        "warm_up_reward": 0.05,
    }
    return SapoBench(**(settings | changes))  # type: ignore[arg-type]


def comparable(result: SapoResult) -> dict[str, object]:
    """Everything but the time and the machine."""
    return {name: getattr(result, name) for name in result.__struct_fields__ if name not in ("cpu_s", "machine")}


@pytest.fixture(scope="module")
def shared_run() -> SapoResult:
    return measure_sapo(tiny_bench(), seed=1)


def test_a_run_is_summed_up_as_the_fields_say(shared_run: SapoResult) -> None:
    result = shared_run
    assert (result.local, result.external, result.agents, result.rounds) == (2, 2, 3, 4)
    assert len(result.reward_by_round) == 4
    assert result.cumulative_reward == pytest.approx(3 * math.fsum(result.reward_by_round), abs=1e-3)
    assert result.final_reward == result.reward_by_round[-1]
    assert result.cumulative_reward > 0
    # 2 groups of 4 with at least one token and at most 6, of 3 agents in 4 rounds; more where nothing could be taken.
    assert 96 <= result.generated_tokens <= 2 * 96 * 6
    assert 0 < result.external_groups <= 2
    assert 0 < result.pulled_bytes == result.trained_bytes < result.wire_bytes
    assert result.rejected == {}


def test_the_same_seed_gives_the_same_result(shared_run: SapoResult) -> None:
    assert comparable(measure_sapo(tiny_bench(), seed=1)) == comparable(shared_run)


def test_a_warm_start_is_what_the_warm_up_gives(shared_run: SapoResult) -> None:
    starts = WarmStarts()
    measure_sapo(tiny_bench(rounds=1), seed=1, starts=starts)  # trains on from there, which is nobody else's
    assert comparable(measure_sapo(tiny_bench(), seed=1, starts=starts)) == comparable(shared_run)


def test_what_is_published_is_heard_so_many_rounds_later() -> None:
    found = [
        measure_sapo(tiny_bench(rounds=3, delay=delay, local=4, external=4, group_size=6), seed=1)
        for delay in (1, 2, 3)
    ]
    assert [one.delay for one in found] == [1, 2, 3]
    first = found[0].reward_by_round[0]
    assert all(one.reward_by_round[0] == first for one in found), "nobody has heard of anything"
    external = [one.external_groups for one in found]
    assert external[0] > external[1] > external[2] == 0


def test_agents_of_one_policy_are_one_after_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[CharPolicy] = []
    plain = CharPolicy.__init__

    def keep(policy: CharPolicy, *args: object, **keys: object) -> None:
        plain(policy, *args, **keys)  # type: ignore[arg-type]
        policies.append(policy)

    monkeypatch.setattr(CharPolicy, "__init__", keep)
    for common in (True, False):
        policies.clear()
        measure_sapo(tiny_bench(rounds=2, common=common, terms="tis"), seed=1)
        first, *others = [[parameter.detach() for parameter in policy.parameters()] for policy in policies]
        assert (
            all(torch.equal(one, other) for values in others for one, other in zip(first, values, strict=True))
            is common
        )


def test_agents_that_take_nothing_send_nothing(shared_run: SapoResult) -> None:
    alone = measure_sapo(tiny_bench(local=4, external=0, rounds=2), seed=1)
    assert (alone.wire_bytes, alone.external_groups) == (0, 0)
    assert alone.warm_up_rewards == shared_run.warm_up_rewards  # the same agents, whatever the setting
    assert alone.held_out_first == shared_run.held_out_first


def test_rewards_are_those_of_the_exact_answer() -> None:
    name, config = TASKS[0]
    family = task_choices()[0].family
    assert family.name.endswith(name)
    task = family.make(config, 1, 0)
    right = family.solution(task)
    assert right
    assert family.score(task, right) == 1.0
    assert family.score(task, right + "z" * len(right)) == 0.0


class Echo(TaskFamily):
    """Of a user: the digit that was asked for."""

    name = "echo"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        assert config == {"digits": 1}

    def question(self, config: Config, seed: int, index: int) -> str:
        return f"say {(seed + index) % 10}"

    def solution(self, task: Task) -> str:
        return task.question[-1]

    def score(self, task: Task, text: str) -> float:
        return float(text == self.solution(task))


def test_agents_train_on_the_tasks_that_they_are_given_by_their_own_rewards() -> None:
    tasks = (TaskChoice(family=Echo(), config={"digits": 1}, weight=3),)
    result = measure_sapo(tiny_bench(choices=tasks, rounds=2), seed=1)
    assert result.tasks == "echo {'digits': 1} × 3"
    assert min(result.warm_up_rewards) >= 0.05  # none of them knew an answer, and each was taught some
    assert result.cumulative_reward > 0
    assert result.informative_groups > 0
    with pytest.raises(ConfigError, match="of one task there is no half"):
        tiny_bench(choices=tasks, skills="unlike")


def test_tasks_are_those_of_a_manifest(tmp_path: Path) -> None:
    founder = Identity.from_seed(bytes(32)).peer_id
    section = {
        "tasks": [{"family": "lcm", "config": {"max_value": 9}, "weight": 2}, {"family": "gcd"}],
        "completion_tokens": 48,
    }
    shared = manifest_of([founder], {"sync": {"strategy": "rollouts"}, "rollouts": section})
    (tmp_path / "shared.toml").write_text(render_manifest(shared))
    (bench,) = SapoBench(tasks=tmp_path / "shared.toml").benches
    assert [(one.family.name, one.weight) for one in bench.given_tasks] == [("lcm", 2), ("gcd", 1)]
    assert bench.facts["tasks"] == "lcm {'max_value': 9} × 2; gcd default × 1"
    assert SapoBench().facts["tasks"] == ""
    assert bench.sized_model.completion_tokens == 48
    assert SapoBench().sized_model.completion_tokens == 8
    (tmp_path / "alone.toml").write_text(render_manifest(manifest_of([founder])))
    with pytest.raises(ConfigError, match=r"it has no \[rollouts\]; `shoal init --strategy rollouts`"):
        SapoBench(tasks=tmp_path / "alone.toml")


def test_unlike_agents_are_taught_unlike_families_that_cover_all() -> None:
    choices = task_choices()
    taught = [
        {repr(choice.config) for choice in taught_choices(tiny_bench(skills="unlike"), choices, agent)}
        for agent in range(4)
    ]
    assert all(len(names) == len(choices) // 2 for names in taught)
    assert set.union(*taught) == {repr(choice.config) for choice in choices}
    assert len({frozenset(names) for names in taught}) == 4
    assert taught_choices(tiny_bench(), choices, 1) == choices


class Market:
    """Members who offer honest groups without a model, beside attackers of every kind."""

    def __init__(self, *, honest: int, attackers: Sequence[str]) -> None:
        family = load_family("basic_arithmetic")
        self.source = TaskSource([TaskChoice(family=family, config="easy")])
        self.shared = SharedMemory(seed=1)
        self.scorer = Scorer(self.source)
        identities = [agent_identity(1, number) for number in range(honest + len(attackers))]
        self.members = [
            MemberSharing(self.shared, identity, self.source, score=self.scorer.score_each, seed=number)
            for number, identity in enumerate(identities[:honest])
        ]
        self.attackers = [
            Attacker(self.shared, identity, self.source, kind=KINDS.index(kind), seed=1)
            for identity, kind in zip(identities[honest:], attackers, strict=True)
        ]
        for listener in (*self.members, *self.attackers):
            self.shared.join(listener)

    def run_round(self, number: int, *, count: int = 4) -> list[list[JudgedGroup]]:
        """What each member took."""
        self.shared.begin_round(number)
        for member in self.members:
            member.begin_round(number)
        for member in self.members:
            member.offer([self.honest_group(member, number, index) for index in range(8)])
        for attacker in self.attackers:
            attacker.attack(number)
        return [member.take(count) for member in self.members]

    def honest_group(self, member: MemberSharing, number: int, index: int) -> JudgedGroup:
        task = self.source.draw(self.shared.swarm_id, member.peer_id, number, index)
        texts = (str(self.source.family(task).solution(task)), "oops", f"{number} {index}", "-")
        rewards = tuple(self.scorer.score_each([(task, text) for text in texts]))
        make = partial(JudgedGroup, task=task, texts=texts, rewards=rewards)
        return make(origin=None, round=number, policy_version=number)


def test_members_take_each_others_groups_once() -> None:
    market = Market(honest=3, attackers=[])
    taken: list[JudgedGroup] = []
    for number in range(3):
        for member, groups in zip(market.members, market.run_round(number), strict=True):
            assert len(groups) == 4
            assert all(group.origin != member.peer_id for group in groups)
            if member is market.members[0]:
                taken += groups
    assert len({group.task.ref for group in taken}) == len(taken) == 12
    assert all(group.rewards[0] == 1.0 for group in taken)


def test_groups_can_be_taken_for_a_few_rounds_only() -> None:
    market = Market(honest=2, attackers=[])
    market.run_round(0, count=0)
    market.shared.begin_round(KEPT_ROUNDS + 1)
    taker = market.members[0]
    taker.begin_round(KEPT_ROUNDS + 1)
    assert taker.take(4) == []


def test_nobody_learns_from_attackers_and_everything_is_counted() -> None:
    market = Market(honest=3, attackers=KINDS)
    honest = {member.peer_id for member in market.members}
    taken = [groups for number in range(10) for groups in market.run_round(number)]
    assert {group.origin for groups in taken for group in groups} == honest
    assert all(group.rewards[0] == 1.0 for groups in taken for group in groups)
    assert sum(map(len, taken)) >= 0.8 * 4 * len(taken), list(map(len, taken))
    for member in market.members:
        rejected = member.rejected()
        for reason in ("malformed", "forged", "foreign task", "replayed", "quota", "hint", "ignored"):
            assert rejected[reason] > 0, (reason, rejected)
        assert all(type(reason) is str for reason in rejected)
        assert rejected["quota"] > FLOOD - GROUPS
    waste = market.shared.pulled_bytes - sum(member.trained_bytes for member in market.members)
    assert waste < 0.25 * market.shared.pulled_bytes
