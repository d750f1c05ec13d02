"""Several runs of `shoal bench sapo`, one after the other, and what they come to: a row for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.lab.bench.sapo import OnRound, WarmStarts, measure_sapo
from shoal.lab.bench.sapo_spec import SapoBench, SapoResult
from shoal.lab.page import table
from shoal.protocol.errors import ConfigError

RESULTS_LIMIT_BYTES = 64 << 20

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


def read_results(path: Path) -> list[SapoResult]:
    """The results that are in the file; none if there is no file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            lines = file.read(RESULTS_LIMIT_BYTES).splitlines()
        return [msgspec.json.decode(line, type=SapoResult) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--results {path} does not hold results of this command: {error}; name another") from None


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
