"""`shoal bench sapo`: agents that learn the same tasks, with and without each other's rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import ReportOptions, option
from shoal.cli.render import progress_display
from shoal.cli.text import number, quantity

if TYPE_CHECKING:
    from shoal.testnet.bench_sapo_spec import SapoResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoOptions(ReportOptions):
    """What the user asked `shoal bench sapo` for, as written."""

    local: Annotated[int, option("--local", help="I: groups that each agent generates a round.")] = 4
    external: Annotated[int, option("--external", help="J: groups of others that each agent takes a round.")] = 4
    agents: Annotated[int, option("--agents", help="How many agents, attackers among them.")] = 8
    rounds: Annotated[int, option("--rounds", help="How many rounds every agent makes.")] = 200
    skills: Annotated[
        str,
        option("--skills", help="like: all are warmed up on all tasks; unlike: each on half.", metavar="like|unlike"),
    ] = "like"
    attackers: Annotated[float, option("--attackers", help="Share of the agents that attack.")] = 0.0
    seed: Annotated[int, option("--seed", help="Of models, tasks and draws.")] = 1
    terms: Annotated[
        str | None,
        option(
            "--terms",
            help="What bounds others' completions with negative advantage. [default: positive]",
            metavar="naive|damped|positive",
        ),
    ] = None
    over_provision: Annotated[
        float, option("--over-provision", help="Groups under way ÷ groups needed; partial ones go on next round.")
    ] = 1.0
    warm_up_reward: Annotated[
        float, option("--warm-up-reward", help="The reward at which an agent's supervised warm-up ends.")
    ] = 0.2


def sapo(options: SapoOptions) -> None:
    """Train agents on verifiable tasks in one process; J groups of each round are others', announced and judged."""
    from shoal.testnet.bench_sapo import measure_sapo
    from shoal.testnet.bench_sapo_spec import bench_of

    bench = bench_of(
        local=options.local,
        external=options.external,
        agents=options.agents,
        rounds=options.rounds,
        skills=options.skills,
        attackers=options.attackers,
        over_provision=options.over_provision,
        terms=options.terms,
        warm_up_reward=options.warm_up_reward,
    )
    with progress_display(log_format=options.log_format, log_level=options.log_level) as show_now:

        def show_round(done: int, reward: float) -> None:
            show_now(f"round {done + 1} of {bench.rounds}, reward {reward:.3f}")

        result = measure_sapo(bench, seed=options.seed, on_round=show_round)
    typer.echo(msgspec.json.encode(result).decode() if options.as_json else "\n".join(summary(result)))


def summary(result: SapoResult) -> list[str]:
    """What was measured, a fact a line."""
    first = result.reward_by_round[: max(1, result.rounds // 10)]
    honest = len(result.warm_up_rewards)
    lines = [
        f"reward     {number(result.cumulative_reward, 1)} in all, over {result.rounds} rounds of {honest} agents; "
        f"{sum(first) / len(first):.3f} at first, {result.final_reward:.3f} at last",
        f"tokens     {result.generated_tokens} generated, "
        f"{number(result.reward_per_million_tokens, 0)} of reward for a million",
        f"groups     {result.local} of its own and {result.external} of others wanted a round; "
        f"{result.external_groups:.2f} came, {result.informative_groups:.2f} of all had unequal rewards",
        f"bytes      {quantity(result.wire_bytes, 'B')} in all, {quantity(result.pulled_bytes, 'B')} pulled, "
        f"{quantity(result.trained_bytes, 'B')} of groups trained on",
    ]
    if result.attackers:
        lines.append(f"attackers  {result.attackers} of {result.agents}, whose rewards do not count")
    if result.rejected:
        lines.append("rejected   " + ", ".join(f"{count} {reason}" for reason, count in result.rejected.items()))
    return lines
