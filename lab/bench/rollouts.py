"""`shoal bench rollouts`: whether policies of real nodes get better, and what sharing rollouts adds to it.

For each seed and each I/J a swarm of real nodes, with the manifest that `shoal init --strategy rollouts` writes but for
I/J, the reward at which the warm-up ends, and the seed of the first policy. Nodes run until each has made its rounds
and has answered the held-out tasks after them.

    reward          the mean over a node's own completions, drawn by chance, of one round
    greedy reward   on the 200 held-out tasks, the most probable token each time (`shoal.node.sapo.held_out`)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.sapo_spec import pairs_of
from shoal.lab.case import Case, LongCaseOptions, Numbers, Spec, parse_numbers
from shoal.lab.fleet import Swarm, untested_command
from shoal.lab.page import table
from shoal.lab.results_file import add_result, read_results
from shoal.lab.shipped import init_tables
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.events import AgentStarted, HeldOutReward, Rollouts
from shoal.node.sapo.policies import BUILT_IN
from shoal.node.sapo.warm_up import WarmUpSettings
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Runtime

BEGIN_DEADLINE_S: Final = 600.0
"""Until all are warmed up, in which all share the machine."""
STRETCH_ROUNDS: Final = 20
"""Rounds of which the mean reward is told."""
STRETCH_DEADLINE_S: Final = 600.0
SHARED, ALONE = (4, 4), (8, 0)
SEEDS: Final = Numbers((1, 2, 3))
SELDOM: Final = 0.1
"""Right answers are rarer than this where sharing is to be worth more."""
RISE: Final = Target(name="greedy reward after the rounds, with 4/4", unit="× that before", least=1.3, aim=1.9)
RISE_LEAST: Final = Target(name="the same, of the worst seed", unit="× that before", least=1.0)
OFTEN_LEAST, SELDOM_LEAST = 1.1, 1.25
WORTHS: Final = {
    least: (
        Target(name="greedy reward after the rounds of 4/4", unit="× that of 8/0", least=least, aim=1.9),
        Target(name="reward in all rounds of 4/4", unit="× that of 8/0", least=least, aim=1.9),
    )
    for least in (OFTEN_LEAST, SELDOM_LEAST)
}
"""What sharing adds, by how much it is to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsBench(Spec):
    """Options of `shoal bench rollouts`. Raises ConfigError for what cannot be run."""

    nodes: Annotated[int, Option("--nodes", help="How many nodes.", check=Within(1, 64))] = 4
    rounds: Annotated[int, Option("--rounds", help="Rounds that each node makes.", check=Within(2, 100_000))] = 200
    settings: Annotated[
        str, Option("--settings", help="Own and others' groups of a round, one after the other.", metavar="I/J,…")
    ] = "4/4,8/0"
    warm_up_reward: Annotated[
        float, Option("--warm-up-reward", help="Reward at which the warm-up ends.", check=Within(0, 1))
    ] = WarmUpSettings().reward
    seeds: Annotated[
        Numbers, Option("--seeds", help="Seeds of the first policies, like 1,2,3.", metavar="S,S…", parse=parse_numbers)
    ] = SEEDS
    results: Annotated[
        Path | None,
        Option("--results", help="Add each run to this file, a document a line; do not repeat what is in it."),
    ] = None

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if not all(local for local, _ in self.pairs):
            raise ConfigError(f"--settings: {self.settings!r} gives a node no groups of its own; write pairs like 4/4")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """I and J of each swarm."""
        return pairs_of(self.settings)


class HeldOutPoint(msgspec.Struct, frozen=True, array_like=True):
    """The greedy reward after so many rounds, in all and by family."""

    round: int
    reward: float
    by_family: Mapping[str, float] = {}


class NodeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One node's rounds. warm_up_reward: where its warm-up ended; rewards: by round; informative: groups, on average.

    held_out: the first before any round, the last after all of them. external: groups of others, by round, on average.
    """

    warm_up_reward: float | None
    rewards: tuple[float, ...]
    held_out: tuple[HeldOutPoint, ...]
    informative: float
    external: float


class RolloutsRun(msgspec.Struct, frozen=True, kw_only=True):
    """One swarm: its settings, its nodes, and the time from the first round of any to the last of all."""

    local: int
    external: int
    warm_up_reward: float
    rounds: int
    seed: int
    learning_rate: float
    took_s: float
    nodes: tuple[NodeRun, ...]

    @property
    def reward(self) -> float:
        """Reward in all rounds, of all nodes."""
        return math.fsum(reward for node in self.nodes for reward in node.rewards)

    def greedy(self, at: int) -> float:
        """The greedy reward before all rounds, 0, or after them, -1: the mean of the nodes."""
        return statistics.fmean(node.held_out[at].reward for node in self.nodes)

    def sampled(self, first: bool) -> float:
        """The reward of a round's own completions, over the first or the last stretch: the mean of the nodes."""
        stretch = slice(0, STRETCH_ROUNDS) if first else slice(-STRETCH_ROUNDS, None)
        return statistics.fmean(reward for node in self.nodes for reward in node.rewards[stretch])


class RolloutsSwarm(Swarm):
    """Nodes that share rollouts until each has made its rounds, in an empty `folder`."""

    ends_by_itself = True

    def __init__(self, folder: Path, bench: RolloutsBench, pair: tuple[int, int], seed: int) -> None:
        manifest = partial(rollouts_manifest, pair=pair, reward=bench.warm_up_reward, seed=seed)
        runtime = Runtime(command=lambda launch: untested_command(replace(launch, rounds=bench.rounds)))
        super().__init__(folder, bench.nodes, manifest, runtime=runtime)

    def warmed_up(self) -> bool:
        """True once every agent is ready."""
        return all(self.journal.of(AgentStarted, node.index) for node in self.nodes)

    def has_made(self, rounds: int) -> bool:
        """True once every node has made so many rounds."""
        return all(len(self.journal.of(Rollouts, node.index)) >= rounds for node in self.nodes)

    def is_through(self, rounds: int) -> bool:
        """True once every node was tried after its last round."""
        return all(
            any(one.round == rounds for one in self.journal.of(HeldOutReward, node.index)) for node in self.nodes
        )

    def run_of(self, index: int, rounds: int) -> NodeRun:
        """Everything that a node did in its `rounds` rounds."""
        made = self.journal.of(Rollouts, index)
        points = [HeldOutPoint(one.round, one.reward, one.by_family) for one in self.journal.of(HeldOutReward, index)]
        if (len(made), points[-1].round) != (rounds, rounds):
            raise NetworkError(f"node {index} made {len(made)} of {rounds} rounds; see its log")
        return NodeRun(
            warm_up_reward=self.journal.of(AgentStarted, index)[0].warm_up_reward,
            rewards=tuple(round(one.reward or 0.0, 4) for one in made),
            held_out=tuple(points),
            informative=round(statistics.fmean(one.informative for one in made), 3),
            external=round(statistics.fmean(one.external for one in made), 3),
        )


def rollouts_manifest(founders: list[PeerId], *, pair: tuple[int, int], reward: float, seed: int) -> Manifest:
    """The manifest of `shoal init --strategy rollouts`, but for I/J, the warm-up's end and the seed."""
    tables = init_tables("rollouts", founders, next(iter(BUILT_IN)), strategy="rollouts")
    written = validate_manifest(tables, source="the benchmark").workload.options
    tables["workload"] |= {"seed": seed, "options": {**written, "warm_up_reward": reward}}
    tables["rollouts"] |= {"local": pair[0], "external": pair[1]}
    return validate_manifest(tables, source="the benchmark")


def run(bench: RolloutsBench, tell: ShowNow) -> Iterator[RolloutsRun]:
    """Train policies on real nodes that share rollouts, and on real nodes that do not."""
    known = [] if bench.results is None else read_results(bench.results, RolloutsRun)
    for seed in bench.seeds:
        for pair in bench.pairs:
            found = next((one for one in known if _is_of(one, bench, pair, seed)), None)
            if found is None:
                found = trio.run(_measure, bench, pair, seed, tell)
                if bench.results is not None:
                    add_result(bench.results, found)
            yield found


def _is_of(run: RolloutsRun, bench: RolloutsBench, pair: tuple[int, int], seed: int) -> bool:
    return (run.local, run.external, run.seed, run.rounds, run.warm_up_reward, len(run.nodes)) == (
        *pair,
        seed,
        bench.rounds,
        bench.warm_up_reward,
        bench.nodes,
    )


async def _measure(bench: RolloutsBench, pair: tuple[int, int], seed: int, tell: ShowNow) -> RolloutsRun:
    what = f"{pair[0]}/{pair[1]}, seed {seed}"
    with TemporaryDirectory(prefix="shoal-rollouts-") as name:
        swarm = RolloutsSwarm(Path(name), bench, pair, seed)
        async with swarm.owned():
            tell(f"{what}: {bench.nodes} nodes are warmed up")
            await swarm.start()
            await swarm.until(swarm.warmed_up, "all are warmed up", BEGIN_DEADLINE_S)
            began = time.monotonic()
            for reached in range(STRETCH_ROUNDS, bench.rounds, STRETCH_ROUNDS):
                await swarm.until(partial(swarm.has_made, reached), f"round {reached}", STRETCH_DEADLINE_S)
                tell(f"{what}: round {reached} of {bench.rounds}")
            await swarm.until(partial(swarm.is_through, bench.rounds), "the last round", STRETCH_DEADLINE_S)
            return RolloutsRun(
                local=pair[0],
                external=pair[1],
                warm_up_reward=bench.warm_up_reward,
                rounds=bench.rounds,
                seed=seed,
                learning_rate=swarm.manifest.inner.lr,
                took_s=round(time.monotonic() - began, 1),
                nodes=tuple(swarm.run_of(node.index, bench.rounds) for node in swarm.nodes),
            )


def rows_of(runs: Sequence[RolloutsRun]) -> list[Row]:
    """Rows of the runs together: medians over the seeds."""
    rises = [one.greedy(-1) / one.greedy(0) for one in runs if _pair(one) == SHARED and one.greedy(0)]
    alone = {(one.seed, one.warm_up_reward): one for one in runs if _pair(one) == ALONE and one.reward}
    pairs = [(one, alone.get((one.seed, one.warm_up_reward))) for one in runs if _pair(one) == SHARED]
    worth = [one.reward / other.reward for one, other in pairs if other is not None]
    greedy = [one.greedy(-1) / other.greedy(-1) for one, other in pairs if other is not None and other.greedy(-1)]
    of_greedy, of_all = WORTHS[SELDOM_LEAST if any(one.warm_up_reward < SELDOM for one in runs) else OFTEN_LEAST]
    return [
        RISE.row(Spread.of_any(rises)),
        RISE_LEAST.row(min(rises, default=None)),
        of_greedy.row(Spread.of_any(greedy)),
        of_all.row(Spread.of_any(worth)),
    ]


def _pair(run: RolloutsRun) -> tuple[int, int]:
    return run.local, run.external


def to_lines(runs: Sequence[RolloutsRun]) -> Iterable[str]:
    """A row for each run, and the targets."""
    heads = ("I/J", "seed", "greedy before", "after", "own reward, first 20", "last 20", "in all", "seconds")
    yield table(
        heads,
        [
            (
                f"{one.local}/{one.external}",
                str(one.seed),
                f"{one.greedy(0):.3f}",
                f"{one.greedy(-1):.3f}",
                f"{one.sampled(first=True):.3f}",
                f"{one.sampled(first=False):.3f}",
                f"{one.reward:.1f}",
                f"{one.took_s:.0f}",
            )
            for one in runs
        ],
    )
    yield from map(str, rows_of(runs))


CASE: Final = Case(spec=RolloutsBench, run=run, lines=to_lines, rows=rows_of, in_parts=True, options=LongCaseOptions)
