"""`shoal bench uneven`: what a slow node costs.

Real nodes train, one of them several times slower, with shares by speed and with equal ones. Steps wait instead of
computing (`waiting_workload`), so that each node has its speed whatever else the machine does. The swarm's speed is
compared with the sum of what its nodes' steps make by themselves: 1 would be no cost at all. With equal shares all wait
for the slow one in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.train_swarm import Speeds, speeds_of
from shoal.lab.case import Case, Spec
from shoal.lab.targets import Row, Target, missed
from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.node.option import Option, Within
from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest_workload import Option as WorkloadOption
from shoal.testnet.nodes import Launch, Runtime, node_command
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import ROUND_LIMIT, Scenario
from shoal.testnet.swarm import run_testnet

MODEL: Final[Mapping[str, WorkloadOption]] = {"inputs": 256, "outputs": 128}
CHUNK_VALUES: Final = 4096
"""Nine chunks: enough for the fragments of streaming."""
SPEED: Final = Target(name="speed with a slow node, shares by speed", unit="× the sum of its nodes'", least=0.9)
WRONG: Final = Target(name="runs with wrong values, or not all verified", most=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenBench(Spec):
    """Options of `shoal bench uneven`. slow: of the last node; step_s: of the others."""

    nodes: Annotated[int, Option("--nodes", help="How many nodes, each a process of its own.", check=Within(2, 16))] = 4
    slow: Annotated[float, Option("--slow", help="How many times slower the last of them is.", check=Within(1, 10))] = (
        4.0
    )
    inner_steps: Annotated[int, Option("--inner-steps", help="H: optimizer steps between two rounds.")] = 200
    step_s: Annotated[
        float, Option("--step-s", help="What a step of the others takes, in seconds.", check=Within(0.001, 1))
    ] = 0.02
    rounds: Annotated[
        int,
        Option(
            "--rounds",
            help="How many rounds, of each kind.",
            check=Within(3, ROUND_LIMIT, "in the first, no node knows another's speed"),
        ),
    ] = 8
    strategy: Annotated[str, Option("--strategy", help="How nodes synchronise.")] = "diloco"
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1

    def scenario(self, *, fair: bool) -> Scenario:
        """The swarm, with shares by speed or equal ones. Raises ConfigError."""
        return Scenario(
            nodes=self.nodes,
            rounds=self.rounds,
            seed=self.seed,
            workload=WORKLOAD_NAME,
            options=dict(MODEL),
            round={"chunk_values": CHUNK_VALUES},
            inner_steps=self.inner_steps,
            strategy=self.strategy,
            sync={"balance": fair},
        )


class UnevenResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench uneven`, with shares by speed and with equal ones."""

    bench: UnevenBench
    fair: Speeds
    equal: Speeds
    sound: bool

    @property
    def holds(self) -> bool:
        """True if the slow node costs no more than it may, and every value is right."""
        return not missed(self.rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return SPEED.row(self.fair.ratio), WRONG.row(not self.sound)


def run(bench: UnevenBench, tell: ShowNow) -> UnevenResult:
    """Train with one node slower than the others: with shares of the steps by speed, and with equal ones.

    The steps wait instead of computing, so that the machine's own load does not count. The command ends with exit code
    1 if the swarm makes less than 0.9 of the sum of its nodes' speeds, or any value is wrong.
    """
    return trio.run(_measure, bench)


async def _measure(bench: UnevenBench) -> UnevenResult:
    with TemporaryDirectory(prefix="shoal-bench-uneven-") as name:
        folder = Path(name)
        runtime = Runtime(command=_command(bench, folder))
        found = []
        for fair in (True, False):
            out = folder / ("fair" if fair else "equal")
            report = await run_testnet(bench.scenario(fair=fair), out, runtime=runtime)
            if report.trouble is not None:
                raise NetworkError(f"the nodes did not get through it: {report.trouble}")
            found.append((speeds_of(out, bench.nodes), _sound(report)))
    (fair_speeds, one), (equal_speeds, other) = found
    return UnevenResult(bench=bench, fair=fair_speeds, equal=equal_speeds, sound=one and other)


def _command(bench: UnevenBench, folder: Path) -> Callable[[Launch], list[str]]:
    """The command line of a node, with a file that says how long its steps take."""
    files = []
    for index in range(bench.nodes):
        files.append(folder / f"step{index}")
        files[index].write_text(str(bench.step_s * (bench.slow if index == bench.nodes - 1 else 1.0)))
    return lambda launch: [*node_command(launch), "--data", str(files[int(launch.data_dir.name)])]


def _sound(report: Report) -> bool:
    return not (report.forks or report.wrong_values or report.unverified) and report.digests_equal is True


def to_lines(result: UnevenResult) -> list[str]:
    """The result for people."""

    def line(speeds: Speeds) -> str:
        rate = f"{speeds.tokens_per_s:.0f} of {speeds.ideal_tokens_per_s:.0f} tokens/s: {speeds.ratio:.2f}"
        return rate if speeds.blocked_fraction is None else f"{rate}; blocked {100 * speeds.blocked_fraction:.1f} %"

    bench = result.bench
    return [
        f"nodes      {bench.nodes}, one {bench.slow:g} times slower; {bench.strategy}, {bench.inner_steps} steps of "
        f"{bench.step_s:g} s, {bench.rounds} rounds",
        f"by speed   {line(result.fair)}",
        f"equal      {line(result.equal)}",
        "all is as it should be" if result.holds else "FAILED     this is not as it should be",
    ]


def to_document(result: UnevenResult) -> dict[str, object]:
    """The result under the names of its fields, and whether it holds."""
    return {**msgspec.to_builtins(result), "holds": result.holds}


CASE: Final = Case(spec=UnevenBench, run=run, lines=to_lines, document=to_document, sound=attrgetter("holds"))
