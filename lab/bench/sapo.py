"""A swarm of agents that learn the same tasks and share rollouts, in one process: `shoal bench sapo`.

All agents make a round together: everybody generates and announces, then everybody takes others' groups and trains.
Everything but the network is what a node runs. The same seed gives the same values on the same machine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from shoal.lab.bench.machine import one_thread, this_machine
from shoal.lab.bench.sapo_attack import Attacker
from shoal.lab.bench.sapo_spec import SapoBench, SapoResult, task_choices, taught_choices
from shoal.lab.bench.sapo_swarm import MemberSharing, SharedMemory
from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.char_policy import CharPolicy
from shoal.node.sapo.held_out import HeldOut, held_out_tasks
from shoal.node.sapo.judge import Score
from shoal.node.sapo.learner import Alone, Learner
from shoal.node.sapo.policy import Policy
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.sapo.warm_up import WarmUpReport, WarmUpSettings, warm_up
from shoal.protocol.identity import Identity
from shoal.protocol.rollouts import assigned_draws

SEEDS_APART: Final = 1000
"""Agents of one seed of the bench have seeds of their own, which no other bench seed has."""

OnRound = Callable[[int, float], None]
"""Called with the number of the round that is done and the mean reward in it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Agent that learns."""

    learner: Learner
    sharing: MemberSharing
    taught: WarmUpReport


class WarmStarts:
    """Warm-ups by what they follow from, for benches that differ in nothing that plays a part there."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[dict[str, torch.Tensor], WarmUpReport]] = {}

    def warm(
        self, policy: CharPolicy, choices: list[TaskChoice], settings: WarmUpSettings, *, score: Score, seed: int
    ) -> WarmUpReport:
        """Bring a policy that was made with `seed` to where its warm-up ends."""
        key = (policy.settings, tuple(choice.family.name for choice in choices), settings, seed)
        if key not in self._known:
            report = warm_up(policy, choices, settings, score=score, seed=seed)
            self._known[key] = {name: value.clone() for name, value in policy.model.state_dict().items()}, report
        values, report = self._known[key]
        policy.model.load_state_dict(values)
        return report


def measure_sapo(
    bench: SapoBench, *, seed: int, on_round: OnRound | None = None, starts: WarmStarts | None = None
) -> SapoResult:
    """Warm up the agents, make the rounds, and sum up. Raises ConfigError where reasoning-gym is missing.

    starts: of benches before this one, and for those after it.
    """
    started = time.process_time()
    starts = starts or WarmStarts()
    choices = list(bench.given_tasks) or task_choices()
    source = TaskSource(choices)
    shared = SharedMemory(seed, delay=bench.delay)
    with one_thread(), Scorer(source) as scorer:
        agents = [
            _make_agent(bench, choices, shared, scorer, starts, seed=seed, number=at) for at in range(bench.honest)
        ]
        attackers = [
            Attacker(shared, agent_identity(seed, bench.honest + at), source, kind=at, seed=seed)
            for at in range(bench.attacking)
        ]
        for agent in agents:
            shared.join(agent.sharing)
        for attacker in attackers:
            shared.join(attacker)
        first = _held_out_reward(agents, bench, scorer)
        reports = []
        for number in range(bench.rounds):
            reports.append(_make_round(agents, attackers, shared, number))
            if bench.common:
                _average([agent.learner.policy for agent in agents])
            if on_round is not None:
                on_round(number, _mean_reward(reports[-1]))
        last = _held_out_reward(agents, bench, scorer)
    return _sum_up(
        bench, agents, shared, reports, seed=seed, cpu_s=time.process_time() - started, held_out=(first, last)
    )


def agent_identity(seed: int, number: int) -> Identity:
    """The key of an agent."""
    return Identity.from_seed(seed.to_bytes(16, "little") + number.to_bytes(16, "little"))


def _make_agent(
    bench: SapoBench,
    choices: list[TaskChoice],
    shared: SharedMemory,
    scorer: Scorer,
    starts: WarmStarts,
    *,
    seed: int,
    number: int,
) -> Agent:
    """The agent with this number: its values follow from the seed, whoever else is there."""
    own_seed = SEEDS_APART * seed + number
    identity = agent_identity(seed, number)
    own_score = partial(scorer.score_each, own=True)
    policy_seed = SEEDS_APART * seed if bench.common else own_seed
    policy, known = CharPolicy(bench.sized_model, seed=policy_seed), taught_choices(bench, choices, number)
    to_teach = replace(bench.warm_up, reward=bench.warm_up_reward)
    taught = starts.warm(policy, known, to_teach, score=own_score, seed=policy_seed)
    sharing = MemberSharing(shared, identity, scorer.source, score=scorer.score_each, seed=own_seed)
    learner = Learner(
        policy,
        bench.learner,
        draw=partial(scorer.source.draw, shared.swarm_id, identity.peer_id),
        score=own_score,
        sharing=sharing if bench.external else Alone(),
        draws=partial(assigned_draws, shared.swarm_id, identity.peer_id),
    )
    return Agent(learner, sharing, taught)


def _make_round(agents: list[Agent], attackers: list[Attacker], shared: SharedMemory, number: int) -> list[RoundReport]:
    shared.begin_round(number)
    for agent in agents:
        agent.sharing.begin_round(number)
    for agent in agents:
        agent.learner.begin_round()
    for attacker in attackers:
        attacker.attack(number)
    return [agent.learner.finish_round() for agent in agents]


@torch.no_grad()
def _average(policies: Sequence[Policy]) -> None:
    """Give all policies the mean of each of their parameters."""
    for same in zip(*(policy.parameters() for policy in policies), strict=True):
        mean = torch.stack(list(same)).mean(0)
        for parameter in same:
            parameter.copy_(mean)


def _held_out_reward(agents: list[Agent], bench: SapoBench, scorer: Scorer) -> float:
    held_out = HeldOut(
        held_out_tasks(scorer.source),
        every=bench.rounds,
        together=bench.local * bench.group_size,
        score=partial(scorer.score_each, own=True),
    )
    return math.fsum(held_out.evaluate(agent.learner.policy, 0).reward for agent in agents) / len(agents)


def _mean_reward(reports: list[RoundReport]) -> float:
    return math.fsum(report.reward or 0.0 for report in reports) / len(reports)


def _sum_up(
    bench: SapoBench,
    agents: list[Agent],
    shared: SharedMemory,
    rounds: list[list[RoundReport]],
    *,
    seed: int,
    cpu_s: float,
    held_out: tuple[float, float],
) -> SapoResult:
    reports = [report for reports in rounds for report in reports]
    curve = [_mean_reward(reports) for reports in rounds]
    last = curve[-max(1, len(curve) // 10) :]
    tokens = sum(report.generated_tokens for report in reports)
    cumulative = math.fsum(report.reward or 0.0 for report in reports)
    rejected: Counter[str] = Counter()
    for agent in agents:
        rejected += agent.sharing.rejected()
    return SapoResult(
        **bench.facts,  # type: ignore[arg-type]
        cumulative_reward=round(cumulative, 4),
        final_reward=round(math.fsum(last) / len(last), 4),
        generated_tokens=tokens,
        wire_bytes=shared.announced_bytes + shared.pulled_bytes,
        rejected=dict(sorted(rejected.items())),
        reward_per_million_tokens=round(1e6 * cumulative / tokens, 4),
        pulled_bytes=shared.pulled_bytes,
        trained_bytes=sum(agent.sharing.trained_bytes for agent in agents),
        informative_groups=round(sum(report.informative for report in reports) / len(reports), 3),
        external_groups=round(sum(report.external for report in reports) / len(reports), 3),
        reward_by_round=tuple(round(reward, 4) for reward in curve),
        warm_up_updates=tuple(agent.taught.updates for agent in agents),
        warm_up_rewards=tuple(round(agent.taught.reward, 4) for agent in agents),
        seed=seed,
        cpu_s=round(cpu_s, 1),
        held_out_first=round(held_out[0], 4),
        held_out_last=round(held_out[1], 4),
        machine=this_machine(),
    )
