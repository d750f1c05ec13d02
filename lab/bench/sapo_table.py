"""`shoal bench sapo`: several runs, one after the other, and what they come to: a row for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from shoal.cli.render import ShowNow
from shoal.lab.bench.sapo import OnRound, WarmStarts, measure_sapo
from shoal.lab.bench.sapo_page import read_results, rows_of
from shoal.lab.bench.sapo_spec import SapoBench, SapoOptions, SapoResult
from shoal.lab.case import Case, LongCaseOptions
from shoal.lab.page import table
from shoal.protocol.errors import ConfigError

OnRun = Callable[[SapoBench, int], OnRound]
"""Called with a run that begins, its bench and seed."""


def measure_all(
    benches: Sequence[SapoBench], seeds: Sequence[int], *, results: Path | None, on_run: OnRun
) -> Iterator[SapoResult]:
    """The results of all benches with all seeds, seed by seed, each as soon as it is there.

    results: a file with a document a line. What it has is not measured again, and what is measured is added to it.
    Raises ConfigError for a file that holds something else.
    """
    known = [] if results is None else read_results(results)
    for seed in seeds:
        starts = WarmStarts()
        for bench in benches:
            found = next((one for one in known if _is_of(one, bench, seed)), None)
            if found is None:
                found = measure_sapo(bench, seed=seed, on_round=on_run(bench, seed), starts=starts)
                if results is not None:
                    _append(results, found)
            yield found


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
        pairs = [(one, first[one.seed]) for one in runs if one.seed in first]
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


def _append(path: Path, result: SapoResult) -> None:
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise ConfigError(f"--results {path} cannot be written: {error.strerror}; name another file") from None


# -- the command ---------------------------------------------------------------------------------------------


def run(options: SapoOptions, tell: ShowNow) -> Iterator[SapoResult]:
    """Train agents on verifiable tasks in one process; J groups of each round are others', announced and judged."""
    benches, seeds = options.benches, options.seeds or (options.seed,)

    def show_run(bench: SapoBench, seed: int) -> OnRound:
        def show_round(made: int, reward: float) -> None:
            run = f"{bench.local}/{bench.external}, seed {seed}: " if len(benches) * len(seeds) > 1 else ""
            tell(f"{run}round {made + 1} of {bench.rounds}, reward {reward:.3f}")

        return show_round

    return measure_all(benches, seeds, results=options.results, on_run=show_run)


def to_lines(results: Sequence[SapoResult]) -> Iterable[str]:
    """A row for each setting."""
    return [summary_table(results)]


CASE: Final = Case(spec=SapoOptions, run=run, lines=to_lines, rows=rows_of, in_parts=True, options=LongCaseOptions)
