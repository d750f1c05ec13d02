"""`shoal bench sapo` and `sapo-table`: several runs, one after the other, and what they come to beside the targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal.cli.render import ShowNow
from shoal.lab.bench.sapo import OnRound, WarmStarts, measure_sapo
from shoal.lab.bench.sapo_spec import SapoBench, SapoResult
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.page import table
from shoal.lab.results_file import add_result, read_results
from shoal.lab.targets import Row, Spread, Target
from shoal.protocol.errors import ConfigError

ALONE, SHARED = "8/0", "4/4"
REWARD: Final = {
    "like": Target(name="reward of 4/4, like skills", unit="× that of 8/0, of the worst seed", least=1.1),
    "unlike": Target(name="reward of 4/4, unlike skills", unit="× that of 8/0, of the worst seed", least=0.98),
}
PER_TOKEN: Final = Target(name="reward of 4/4 per token", unit="× that of 8/0, of the worst seed", least=1.5)
ATTACKED: Final = Target(name="reward of honest agents under attack", unit="× that of as many alone", least=0.95)

OnRun = Callable[[SapoBench, int], OnRound]
"""Called with a run that begins, its bench and seed."""


def measure_all(
    benches: Sequence[SapoBench], seeds: Sequence[int], *, results: Path | None, on_run: OnRun
) -> Iterator[SapoResult]:
    """The results of all benches with all seeds, seed by seed, each as soon as it is there.

    results: a file with a document a line. What it has is not measured again, and what is measured is added to it.
    Raises ConfigError for a file that holds something else.
    """
    known = [] if results is None else read_results(results, SapoResult)
    for seed in seeds:
        starts = WarmStarts()
        for bench in benches:
            found = next((one for one in known if _is_of(one, bench, seed)), None)
            if found is None:
                found = measure_sapo(bench, seed=seed, on_round=on_run(bench, seed), starts=starts)
                if results is not None:
                    add_result(results, found)
            yield found


# -- what they come to ---------------------------------------------------------------------------------------


def rows_of(results: Sequence[SapoResult]) -> list[Row]:
    """All targets of sharing, beside what these results come to; of sharing the worst seed counts."""
    rows = []
    for swarm in dict.fromkeys(_swarm(one) for one in results if not one.attackers):
        runs = [one for one in results if not one.attackers and _swarm(one) == swarm]
        alone = {one.seed: one for one in runs if _setting(one) == ALONE}
        pairs = _comparable((one, alone[one.seed]) for one in runs if _setting(one) == SHARED and one.seed in alone)
        if alone:
            rewards = (one.cumulative_reward / other.cumulative_reward for one, other in pairs)
            tokens = (one.reward_per_million_tokens / other.reward_per_million_tokens for one, other in pairs)
            rows += [REWARD[runs[0].skills].row(min(rewards, default=None)), PER_TOKEN.row(min(tokens, default=None))]
    attacked = [one.cumulative_reward / other.cumulative_reward for one, other in _comparable(_attacked_pairs(results))]
    return [*rows, ATTACKED.row(Spread.of_any(attacked))]


def _comparable(pairs: Iterable[tuple[SapoResult, SapoResult]]) -> list[tuple[SapoResult, SapoResult]]:
    """Those whose second has any reward: in few rounds an agent may earn none."""
    return [(one, other) for one, other in pairs if other.cumulative_reward > 0]


def _swarm(result: SapoResult) -> str:
    """Settings that runs have in common which are compared with one another."""
    return (
        f"{result.agents} agents, {result.skills} skills, {result.rounds} rounds, warmed up to a reward of "
        f"{result.warm_up_reward:g}, learning rate {result.learning_rate:g}, others' terms {result.terms}"
        + (f", tasks {result.tasks}" if result.tasks else "")
    )


def _attacked_pairs(results: Sequence[SapoResult]) -> list[tuple[SapoResult, SapoResult]]:
    """Attacked runs, each with the run of the same seed in which the honest agents are by themselves."""

    def same(one: SapoResult, other: SapoResult) -> bool:
        names = ("seed", "local", "external", "rounds", "skills", "warm_up_reward", "learning_rate", "terms", "tasks")
        return all(getattr(one, name) == getattr(other, name) for name in names)

    quiet = [one for one in results if not one.attackers]
    return [
        (one, other)
        for one in results
        if one.attackers
        for other in quiet
        if same(one, other) and other.agents == one.agents - one.attackers
    ]


def summary_table(results: Sequence[SapoResult]) -> str:
    """A row for each setting, in Markdown: means over seeds, and ratios to the first setting's run of the same seed.

    Rewards are compared for each honest agent.
    """
    settings = list(dict.fromkeys(map(_setting, results)))
    first = {one.seed: one for one in results if _setting(one) == settings[0]}
    heads = ("setting", "cumulative reward", "beside the first", "final", "per million tokens", "beside the first")
    lines = []
    for setting in settings:
        runs = [one for one in results if _setting(one) == setting]
        pairs = _comparable((one, first[one.seed]) for one in runs if one.seed in first)
        cells = (
            setting,
            f"{statistics.fmean(one.cumulative_reward for one in runs):.1f}",
            _span([_for_each_agent(one) / _for_each_agent(other) for one, other in pairs]),
            f"{statistics.fmean(one.final_reward for one in runs):.3f}",
            f"{statistics.fmean(one.reward_per_million_tokens for one in runs):.0f}",
            _span([one.reward_per_million_tokens / other.reward_per_million_tokens for one, other in pairs]),
            str(len(runs)),
        )
        lines.append(cells)
    return table((*heads, "seeds"), lines)


def _for_each_agent(result: SapoResult) -> float:
    return result.cumulative_reward / len(result.warm_up_rewards)


def _setting(result: SapoResult) -> str:
    words = f"{result.local}/{result.external}"
    return f"{words}, {result.attackers} attack" if result.attackers else words


def _span(ratios: Sequence[float]) -> str:
    """The mean, and from where to where; nothing for nothing."""
    if not ratios:
        return ""
    mean = f"{statistics.fmean(ratios):.2f}"
    return mean if len(ratios) == 1 else f"{mean} ({min(ratios):.2f} to {max(ratios):.2f})"


def _is_of(result: SapoResult, bench: SapoBench, seed: int) -> bool:
    return result.seed == seed and all(getattr(result, name) == value for name, value in bench.facts.items())


# -- the commands --------------------------------------------------------------------------------------------


def run(bench: SapoBench, tell: ShowNow) -> Iterator[SapoResult]:
    """Train agents on verifiable tasks in one process; J groups of each round are others', announced and judged."""
    benches, seeds = bench.benches, bench.seeds or (bench.seed,)

    def show_run(bench: SapoBench, seed: int) -> OnRound:
        def show_round(made: int, reward: float) -> None:
            run = f"{bench.local}/{bench.external}, seed {seed}: " if len(benches) * len(seeds) > 1 else ""
            tell(f"{run}round {made + 1} of {bench.rounds}, reward {reward:.3f}")

        return show_round

    return measure_all(benches, seeds, results=bench.results, on_run=show_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoTableOptions(Spec):
    """Options of `shoal bench sapo-table`."""

    results: Annotated[
        list[Path], typer.Argument(help="Files of `shoal bench sapo --results`, of any settings.", metavar="FILE…")
    ]


def put_together(options: SapoTableOptions, tell: ShowNow) -> list[SapoResult]:
    """Worth of sharing rollouts, by the results of several runs."""
    results = [one for path in options.results for one in read_results(path, SapoResult)]
    if not results:
        names = ", ".join(map(str, options.results))
        raise ConfigError(f"{names}: no results; `shoal bench sapo --results` makes them")
    return results


def to_lines(results: Sequence[SapoResult]) -> Iterable[str]:
    """A table for each swarm, with a row for each setting, and the targets."""
    for swarm, runs in groupby(sorted(results, key=_swarm), _swarm):
        yield from (f"{swarm}:", summary_table(list(runs)))
    yield from map(str, rows_of(results))


CASE: Final = Case(spec=SapoBench, run=run, lines=to_lines, rows=rows_of, in_parts=True, options=LongCaseOptions)
TABLE: Final = Case(spec=SapoTableOptions, run=put_together, lines=to_lines, rows=rows_of, in_parts=True)
