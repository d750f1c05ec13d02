"""`shoal bench sapo`: agents that learn the same tasks, with and without each other's rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from shoal.cli.options import parse_seeds
from shoal.cli.render import ShowNow
from shoal.cli.text import number, quantity
from shoal.lab.case import Case, LongCaseOptions, PageOptions, end
from shoal.lab.targets import Row
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.sapo_spec import SapoBench, SapoResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoOptions(LongCaseOptions):
    """What the user asked `shoal bench sapo` for, as written."""

    local: Annotated[int, Option("--local", help="I: groups that each agent generates a round.")] = 4
    external: Annotated[int, Option("--external", help="J: groups of others that each agent takes a round.")] = 4
    agents: Annotated[int, Option("--agents", help="How many agents, attackers among them.")] = 8
    rounds: Annotated[int, Option("--rounds", help="How many rounds every agent makes.")] = 200
    skills: Annotated[
        str,
        Option("--skills", help="like: all are warmed up on all tasks; unlike: each on half.", metavar="like|unlike"),
    ] = "like"
    attackers: Annotated[float, Option("--attackers", help="Share of the agents that attack.")] = 0.0
    settings: Annotated[
        str | None,
        Option("--settings", help="Several I/J, like 8/0,4/4, one after the other, and a table.", metavar="I/J,…"),
    ] = None
    seed: Annotated[int, Option("--seed", help="Of models, tasks and draws.")] = 1
    seeds: Annotated[str | None, Option("--seeds", help="Several seeds, like 1,2,3.", metavar="S,S…")] = None
    results: Annotated[
        Path | None,
        Option("--results", help="Add each run to this file, a document a line; do not repeat what is in it."),
    ] = None
    terms: Annotated[
        str | None,
        Option(
            "--terms",
            help="What bounds others' completions with negative advantage. [default: positive]",
            metavar="naive|positive",
        ),
    ] = None
    sampling: Annotated[
        str,
        Option(
            "--sampling", help="Others' groups: all alike, or by the announced variance.", metavar="uniform|weighted"
        ),
    ] = "uniform"
    learning_rate: Annotated[float, Option("--learning-rate", help="Of every agent's AdamW.")] = 1e-3
    over_provision: Annotated[
        float, Option("--over-provision", help="Groups under way ÷ groups needed; partial ones go on next round.")
    ] = 1.0
    warm_up_reward: Annotated[
        float, Option("--warm-up-reward", help="The reward at which an agent's supervised warm-up ends.")
    ] = 0.2


def _run(options: SapoOptions, tell: ShowNow) -> list[SapoResult]:
    """Train agents on verifiable tasks in one process; J groups of each round are others', announced and judged."""
    from shoal.lab.bench.sapo_spec import SapoWords, bench_of
    from shoal.lab.bench.sapo_table import measure_all

    words = SapoWords(
        agents=options.agents,
        rounds=options.rounds,
        skills=options.skills,
        attackers=options.attackers,
        over_provision=options.over_provision,
        terms=options.terms,
        sampling=options.sampling,
        learning_rate=options.learning_rate,
        warm_up_reward=options.warm_up_reward,
    )
    benches = [bench_of(words, local=local, external=external) for local, external in _settings(options)]
    seeds = parse_seeds(options.seeds, options.seed)

    def show_run(bench: SapoBench, seed: int) -> Callable[[int, float], None]:
        def show_round(made: int, reward: float) -> None:
            run = f"{bench.local}/{bench.external}, seed {seed}: " if len(benches) * len(seeds) > 1 else ""
            tell(f"{run}round {made + 1} of {bench.rounds}, reward {reward:.3f}")

        return show_round

    done = []
    for result in measure_all(benches, seeds, results=options.results, on_run=show_run):
        done.append(result)
        if options.as_json:
            typer.echo(msgspec.json.encode(result))
    return done


def _settings(options: SapoOptions) -> list[tuple[int, int]]:
    if options.settings is None:
        return [(options.local, options.external)]
    found = [re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", part.strip()) for part in options.settings.split(",")]
    pairs = [(int(one[1]), int(one[2])) for one in found if one is not None]
    if len(pairs) < len(found):
        raise ConfigError(f"--settings: {options.settings!r} is not a list of pairs like 8/0,4/4")
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoTableOptions(PageOptions):
    """What the user asked `shoal bench sapo-table` for."""

    results: Annotated[
        list[Path], typer.Argument(help="Files of `shoal bench sapo --results`, of any settings.", metavar="FILE…")
    ]


def sapo_table(options: SapoTableOptions) -> None:
    """Write the page of what sharing rollouts is worth, with curves, beside the paper's figures."""
    from shoal.lab.bench.sapo_page import draw, render, rows_of
    from shoal.lab.bench.sapo_table import read_results
    from shoal.lab.page import publish

    results = [one for path in options.results for one in read_results(path)]
    if not results:
        raise ConfigError(
            f"{', '.join(map(str, options.results))}: no results; `shoal bench sapo --results` makes them"
        )
    publish(render(results), options.out)
    if options.out is not None:
        draw(results, options.out.parent)
    end(options, rows_of(results))


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


def to_lines(results: Sequence[SapoResult]) -> Iterable[str]:
    """One run, a fact a line; several, a table."""
    from shoal.lab.bench.sapo_table import summary_table

    return summary(results[0]) if len(results) == 1 else [summary_table(results)]


def rows(results: Sequence[SapoResult]) -> tuple[Row, ...]:
    """What the runs come to beside the targets, which are of some settings beside others."""
    from shoal.lab.bench.sapo_page import rows_of

    return rows_of(results)


sapo: Final = Case(spec=SapoOptions, run=_run, lines=to_lines, rows=rows, document=None)
