"""Results of `shoal bench sapo` for people: tables beside the paper's, curves of the reward, a page.

Everything on the page is from the results it is given; the targets and the paper's figures are those below.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import typer

from shoal.lab import picture
from shoal.lab.bench.sapo_spec import TASKS, SapoResult
from shoal.lab.case import PageOptions, end
from shoal.lab.page import publish, spread, table, verdict
from shoal.lab.targets import Row, Spread, Target
from shoal.protocol.errors import ConfigError

RESULTS_LIMIT_BYTES: Final = 64 << 20
SMOOTHED_ROUNDS: Final = 20
PAPER: Final = {"8/0": 561.79, "6/2": 854.43, "4/4": 1093.31, "2/6": 945.87}
"""Cumulative reward by I/J: "Sharing is Caring", arXiv 2509.08721, section 5."""
ALONE, SHARED = "8/0", "4/4"
REWARD: Final = {
    "like": Target(name="reward of 4/4, like skills", unit="× that of 8/0, of the worst seed", least=1.1),
    "unlike": Target(name="reward of 4/4, unlike skills", unit="× that of 8/0, of the worst seed", least=0.98),
}
PER_TOKEN: Final = Target(name="reward of 4/4 per token", unit="× that of 8/0, of the worst seed", least=1.5)
ATTACKED: Final = Target(name="reward of honest agents under attack", unit="× that of as many alone", least=0.95)

_ATTACK_HEADS: Final = (
    "seed",
    "own / others'",
    "honest agents",
    "attackers",
    "reward",
    "without attackers",
    "ratio",
    "pulled ÷ trained",
)
_COLOURS: Final = {"8/0": "#444444", "6/2": "#1f6f8b", "4/4": "#c8553d", "2/6": "#588157"}

_DEFINITIONS: Final = """\
* All agents run in one process; groups are announced, pulled by digest, scored again and judged by the code that a node
  runs. Models have 0.12 M parameters and know only characters; tasks are {families}, in small configurations.
* **Reward** of a round is the mean over the agents and over the completions that each made itself, 1 for the exact
  answer, else 0. **Cumulative** is the sum over rounds and honest agents. **Final** is the mean of the last tenth.
* **Beside 8/0** is the ratio to the run of the same seed, skills, warm-up and learning rate in which nobody shares.
* **Per token**: the cumulative reward ÷ tokens that honest agents generated, beside that of 8/0.
* **Groups that teach** are those, own and others', of which the rewards differ, for each agent and round.
* **Pulled ÷ trained** are the bytes of groups that an agent downloaded ÷ those of the groups that it trained on.
* Agents are *like* when all are warmed up on all families, *unlike* when each is on half of them."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """Settings that runs have in common which are compared with one another."""

    agents: int
    rounds: int
    skills: str
    warm_up_reward: float
    learning_rate: float
    terms: str
    common: bool
    delay: int

    @staticmethod
    def of(result: SapoResult) -> Swarm:
        return Swarm(**{name: getattr(result, name) for name in COMPARED})

    def __str__(self) -> str:
        return (
            f"{self.agents} agents, {self.skills} skills, {self.rounds} rounds, warmed up to a reward of "
            f"{self.warm_up_reward:g}, learning rate {self.learning_rate:g}, others' terms {self.terms}"
            f"{', of one policy' if self.common else ''}{f', others heard {self.delay} rounds late' * bool(self.delay)}"
        )

    @property
    def picture(self) -> str:
        return f"sapo_{self.skills}_{self.warm_up_reward:g}_{self.learning_rate:g}.png"


COMPARED: Final = tuple(field.name for field in fields(Swarm))


def render(results: Sequence[SapoResult]) -> str:
    """The page: a table for each swarm of which some run shares nothing, and one for attacks."""
    parts = [
        "# Sharing rollouts, measured\n",
        "Made by `shoal bench sapo-table` from files of `shoal bench sapo --results`; no number here was written by "
        "hand. What is measured is described in docs/rollouts.md.\n",
    ]
    for swarm, runs in _compared(results).items():
        rate = f"learning rate {swarm.learning_rate:g}"
        parts += [f"## {swarm.skills.capitalize()} skills, warm-up {swarm.warm_up_reward:g}, {rate}\n", f"{swarm}.\n"]
        parts += [table(_heads(swarm), _rows(swarm, runs)), f"![Reward by round]({swarm.picture})\n"]
    attacks = list(_attacks(results))
    if attacks:
        parts += ["## Attackers\n", table(_ATTACK_HEADS, attacks), _attacked(results)]
    machine = results[0].machine
    parts += [
        "## How the numbers are defined\n",
        _DEFINITIONS.format(families=", ".join(name for name, _ in TASKS)),
        f"* {machine.cpu}, {machine.cores} cores, torch {machine.torch}, {machine.date}.\n",
    ]
    return "\n".join(parts)


def draw(results: Sequence[SapoResult], folder: Path) -> None:
    """Write a picture for each swarm: the reward by round, the mean over seeds, smoothed."""
    for swarm, runs in _compared(results).items():
        picture.draw(
            folder / swarm.picture,
            (_curve(setting, runs) for setting in _settings(runs)),
            across="round",
            up=f"reward, mean of the last {_smoothed_rounds(swarm.rounds)} rounds",
            title="own / others' groups",
        )


def _smoothed_rounds(rounds: int) -> int:
    """Number of rounds that one point of a curve is the mean of: of a short run no more than leave a curve."""
    return min(SMOOTHED_ROUNDS, (rounds + 1) // 2)


def _curve(setting: str, runs: Iterable[SapoResult]) -> picture.Curve:
    rewards = np.array([one.reward_by_round for one in runs if _setting(one) == setting])
    width = _smoothed_rounds(rewards.shape[1])
    smooth = np.convolve(rewards.mean(axis=0), np.full(width, 1 / width), mode="valid")
    return picture.Curve(
        name=setting, across=range(width, width + len(smooth)), up=smooth.tolist(), colour=_COLOURS.get(setting)
    )


def _compared(results: Iterable[SapoResult]) -> dict[Swarm, list[SapoResult]]:
    """Runs without attackers by what they have in common, where at least one of them shares nothing."""
    found: dict[Swarm, list[SapoResult]] = {}
    for one in results:
        if not one.attackers:
            found.setdefault(Swarm.of(one), []).append(one)
    return {swarm: runs for swarm, runs in found.items() if any(_setting(one) == ALONE for one in runs)}


def _heads(swarm: Swarm) -> tuple[str, ...]:
    heads = (
        "own / others'",
        "seeds",
        "cumulative reward",
        "beside 8/0",
        "final",
        "per token, beside 8/0",
        "groups that teach",
        "pulled ÷ trained",
    )
    return (*heads, "the paper's", "beside its 8/0") if swarm.skills == "like" else heads


def _rows(swarm: Swarm, runs: Sequence[SapoResult]) -> Iterable[tuple[str, ...]]:
    for setting in _settings(runs):
        of_it = [one for one in runs if _setting(one) == setting]
        reward, tokens = _beside_alone(setting, runs)
        told, per_token = (spread(Spread.of_any(ratios), "{:.2f}") for ratios in (reward, tokens))
        if setting == SHARED:
            told, per_token = (
                f"{text} ({verdict(row)})"
                for text, row in zip((told, per_token), _shared_rows(swarm, runs), strict=True)
            )
        row = (
            setting,
            ", ".join(str(one.seed) for one in of_it),
            ", ".join(f"{one.cumulative_reward:.1f}" for one in of_it),
            told,
            f"{statistics.fmean(one.final_reward for one in of_it):.3f}",
            per_token,
            f"{statistics.fmean(one.informative_groups for one in of_it):.1f}",
            _most(of_it),
        )
        paper = PAPER.get(setting)
        theirs = ("–", "–") if paper is None else (f"{paper:.2f}", f"{paper / PAPER[ALONE]:.2f}")
        yield (*row, *theirs) if swarm.skills == "like" else row


def _beside_alone(setting: str, runs: Sequence[SapoResult]) -> tuple[list[float], list[float]]:
    """Ratios of each seed's reward, and reward per token, to those of the run in which nobody shares."""
    alone = {one.seed: one for one in runs if _setting(one) == ALONE}
    pairs = [(one, alone[one.seed]) for one in runs if _setting(one) == setting and one.seed in alone]
    return (
        [one.cumulative_reward / other.cumulative_reward for one, other in pairs],
        [one.reward_per_million_tokens / other.reward_per_million_tokens for one, other in pairs],
    )


def _shared_rows(swarm: Swarm, runs: Sequence[SapoResult]) -> tuple[Row, Row]:
    """Gains that sharing must bring, each with its target: the worst seed counts."""
    reward, tokens = (min(ratios, default=None) for ratios in _beside_alone(SHARED, runs))
    return REWARD[swarm.skills].row(reward), PER_TOKEN.row(tokens)


def rows_of(results: Sequence[SapoResult]) -> tuple[Row, ...]:
    """All targets of sharing, beside what these results come to."""
    compared = _compared(results)
    shared = [row for swarm, runs in compared.items() for row in _shared_rows(swarm, runs)]
    return (*shared, ATTACKED.row(Spread.of_any(_attacked_ratios(results))))


def _attacked_ratios(results: Sequence[SapoResult]) -> list[float]:
    return [one.cumulative_reward / other.cumulative_reward for one, other in _attacked_pairs(results)]


def _attacks(results: Sequence[SapoResult]) -> Iterable[tuple[str, ...]]:
    for attacked, quiet in _attacked_pairs(results):
        yield (
            str(attacked.seed),
            _setting(attacked),
            str(quiet.agents),
            str(attacked.attackers),
            f"{attacked.cumulative_reward:.1f}",
            f"{quiet.cumulative_reward:.1f}",
            f"{attacked.cumulative_reward / quiet.cumulative_reward:.3f}",
            _most([attacked]),
        )


def _attacked(results: Sequence[SapoResult]) -> str:
    """Describe the cost of attackers, in one paragraph."""
    row = ATTACKED.row(Spread.of(_attacked_ratios(results)))
    refused: dict[str, int] = {}
    for one, _ in _attacked_pairs(results):
        for reason, count in one.rejected.items():
            refused[reason] = refused.get(reason, 0) + count
    told = ", ".join(f"{reason} {count:,}" for reason, count in sorted(refused.items()))
    assert row.measured is not None
    return (
        f"The honest agents' reward is {row.measured.median:.3f} times that of as many without attackers, in the "
        f"median ({verdict(row)}). Attackers announce wrong answers as right, send garbage, replay, flood "
        f"and copy. Refused, by reason: {told}.\n"
    )


def _attacked_pairs(results: Sequence[SapoResult]) -> list[tuple[SapoResult, SapoResult]]:
    """Attacked runs, each with the run of the same seed in which the honest agents are by themselves."""

    def same(one: SapoResult, other: SapoResult) -> bool:
        names = {"seed", "local", "external", *COMPARED} - {"agents"}
        return all(getattr(one, name) == getattr(other, name) for name in names)

    quiet = [one for one in results if not one.attackers]
    return [
        (one, other)
        for one in results
        if one.attackers
        for other in quiet
        if same(one, other) and other.agents == one.agents - one.attackers
    ]


def _settings(runs: Iterable[SapoResult]) -> list[str]:
    """Settings that occur, the least sharing one first."""
    return sorted({_setting(one) for one in runs}, key=lambda text: -int(text.partition("/")[0]))


def _setting(result: SapoResult) -> str:
    return f"{result.local}/{result.external}"


def _most(runs: Sequence[SapoResult]) -> str:
    """The worst share of bytes pulled; nothing where nothing is."""
    shares = [one.pulled_bytes / one.trained_bytes for one in runs if one.trained_bytes]
    return f"{max(shares):.3f}" if shares else "–"


# -- the command ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoTableOptions(PageOptions):
    """Options of `shoal bench sapo-table`."""

    results: Annotated[
        list[Path], typer.Argument(help="Files of `shoal bench sapo --results`, of any settings.", metavar="FILE…")
    ]


def write_page(options: SapoTableOptions) -> None:
    """Write the page of what sharing rollouts is worth, with curves, beside the paper's figures."""
    results = [one for path in options.results for one in read_results(path)]
    if not results:
        raise ConfigError(
            f"{', '.join(map(str, options.results))}: no results; `shoal bench sapo --results` makes them"
        )
    publish(render(results), options.out)
    if options.out is not None:
        draw(results, options.out.parent)
    end(options.check, rows_of(results))


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
