"""How many completions each task of a round gets: as many for all, or more where the first ones say that it pays.

The budget of a round is the same whatever the rule. Adaptive rules draw half of it evenly, look at the rewards, and
give the other half where they expect most: by `variance`, where answers are right as often as not (after XRPO, arXiv
2510.06672), or by `difficulty`, where they are rarely right (after DARS, arXiv 2508.13755). Agents share rollouts as
nodes do, in one process (`sapo.py`).

    python -m shoal.lab.bench.allocation swarm.toml --warm-up-reward 0.2 --seeds 1,2,3
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from shoal.lab.bench import sapo
from shoal.lab.bench.sapo_spec import SapoBench, tasks_in
from shoal.node.sapo.generation import GeneratedGroup
from shoal.node.sapo.learner import Learner, _Round
from shoal.node.sapo.policy import Rollout
from shoal.node.sapo.tasks import Task
from shoal.node.sapo.turns import begun, extend_dialogues, text_of
from shoal.node.sapo.updates import own_rows

Rule = Callable[[float], float]
"""The share of the second half that a task gets, ÷ that of others, by how often its answers are right."""

RULES: Final[dict[str, Rule | None]] = {
    "uniform": None,
    "variance": lambda right: math.sqrt(right * (1 - right)),
    "difficulty": lambda right: 1 - right,
}
MOST: Final = 4
"""Times as many as evenly, for one task."""


def shared_out(total: int, weights: Sequence[float], most: int) -> list[int]:
    """Return `total` in whole parts by weight, of `most` each at most: the largest remainders get what is left."""
    parts = [0] * len(weights)
    left = min(total, most * len(weights))
    while left:
        open_at = [at for at, part in enumerate(parts) if part < most]
        whole = math.fsum(weights[at] for at in open_at)
        wanted = {at: left * weights[at] / whole for at in open_at}
        given = {at: min(int(wanted[at]), most - parts[at]) for at in open_at}
        if not any(given.values()):
            best = sorted(open_at, key=lambda at: -(wanted[at] % 1))[:left]
            given = dict.fromkeys(best, 1)
        for at, count in given.items():
            parts[at] += count
            left -= count
    return parts


class AllocatingLearner(Learner):
    """Draws half of a round's completions evenly, and the rest by a rule."""

    rule: Rule

    def _generate(self, current: _Round, count: int) -> None:
        if count == 0:
            return
        size = self._settings.group_size
        tasks = [next(current.tasks) for _ in range(count)]
        rollouts = [[begun(self.policy, task) for _ in range(size // 2)] for task in tasks]
        current.tokens += self._draw_more(current.number, tasks, rollouts)
        each = list(zip(tasks, rollouts, strict=True))
        scores = iter(self._score([(task, text_of(self.policy, task, one)) for task, own in each for one in own]))
        weights = []
        for own in rollouts:
            rewards = [next(scores) or 0.0 for _ in own]
            weights.append(self.rule((sum(rewards) + 1) / (len(rewards) + 2)))
        shares = shared_out(count * (size - size // 2), weights, MOST * size)
        for (task, own), more in zip(each, shares, strict=True):
            own += [begun(self.policy, task) for _ in range(more)]
        current.tokens += self._draw_more(current.number, tasks, rollouts)
        groups = [GeneratedGroup(task=task, round=current.number, rollouts=tuple(own)) for task, own in each]
        current.generated += groups
        judged = self._judge(groups)
        for made, group in judged:
            current.own.append(group)
            self._add(current, own_rows(made, group.rewards))
        if judged:
            self._sharing.offer([group for _, group in judged])

    def _draw_more(self, round: int, tasks: Sequence[Task], rollouts: Sequence[list[Rollout]]) -> int:
        for task, own in zip(tasks, rollouts, strict=True):
            for number, rollout in enumerate(own):
                rollout.draws = self.generator._draws(round, task.ref.index, number)
        dialogues = [(task, one) for task, own in zip(tasks, rollouts, strict=True) for one in own]
        return extend_dialogues(self.policy, dialogues, version=self.round)


def main() -> None:
    """Run every rule with every seed, and print each run and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--warm-up-reward", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    choices, reward = tasks_in(asked.manifest), asked.warm_up_reward
    bench = SapoBench(agents=4, rounds=asked.rounds, warm_up_reward=reward, choices=choices)
    bench = replace(bench, model=replace(bench.model, style="rotary"))
    starts = sapo.WarmStarts()
    found: dict[str, list[tuple[float, float]]] = {rule: [] for rule in asked.rules.split(",")}
    for seed in map(int, asked.seeds.split(",")):
        for name in found:
            rule = RULES[name]
            learner = Learner if rule is None else type(name, (AllocatingLearner,), {"rule": staticmethod(rule)})
            setattr(sapo, "Learner", learner)  # noqa: B010
            result = sapo.measure_sapo(bench, seed=seed, starts=starts)
            found[name].append((result.held_out_last or 0.0, result.cumulative_reward))
            told = {
                "rule": name,
                "seed": seed,
                "first": result.held_out_first,
                "last": result.held_out_last,
                "cumulative": result.cumulative_reward,
                "tokens": result.generated_tokens,
                "informative": result.informative_groups,
            }
            print(json.dumps(told), flush=True)
    for name, each in found.items():
        print(
            name, "greedy", round(median(last for last, _ in each), 4), "rewards", round(median(r for _, r in each), 1)
        )


if __name__ == "__main__":
    main()
