"""What a slow node costs: real nodes, one of them several times slower, with shares by speed and with equal ones.

Steps wait instead of computing (`waiting_workload`), so that each node has its speed whatever else the machine does.
The swarm's speed is compared with the sum of what its nodes' steps make by themselves: 1 would be no cost at all. With
equal shares all wait for the slow one in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import trio

from shoal.lab.bench.train_swarm import Speeds, speeds_of
from shoal.lab.targets import Row, Target, missed
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.manifest_workload import Option
from shoal.testnet.nodes import Launch, Runtime, node_command
from shoal.testnet.progress import OnProgress, ignore_progress
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Scenario
from shoal.testnet.swarm import run_testnet

WORKLOAD_NAME: Final = "shoal.lab.bench.waiting_workload:WaitingWorkload"
MODEL: Final[Mapping[str, Option]] = {"inputs": 256, "outputs": 128}
CHUNK_VALUES: Final = 4096
"""Nine chunks: enough for the fragments of streaming."""
SPEED: Final = Target(name="speed with a slow node, shares by speed", unit="× the sum of its nodes'", least=0.9)
WRONG: Final = Target(name="runs with wrong values, or not all verified", most=0)
NODES: Final = (2, 16)
SLOW_LIMIT: Final = 10.0
STEP_S: Final = (0.001, 1.0)


class UnevenBench(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. slow: of the last node, how many times slower; step_s: of the others, per step."""

    nodes: int = 4
    slow: float = 4.0
    inner_steps: int = 200
    step_s: float = 0.02
    rounds: int = 8
    strategy: str = "diloco"
    seed: int = 1

    def __post_init__(self) -> None:
        if not NODES[0] <= self.nodes <= NODES[1]:
            raise ConfigError(f"--nodes must be {NODES[0]} to {NODES[1]}")
        if not 1 <= self.slow <= SLOW_LIMIT:
            raise ConfigError(f"--slow says how many times slower one node is: 1 to {SLOW_LIMIT:g}")
        if not STEP_S[0] <= self.step_s <= STEP_S[1]:
            raise ConfigError(f"--step-s must be {STEP_S[0]:g} to {STEP_S[1]:g}")
        if self.rounds < 3:
            raise ConfigError("--rounds must be 3 or more: in the first, no node knows another's speed")

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
    """What was measured, with shares by speed and with equal ones."""

    bench: UnevenBench
    fair: Speeds
    equal: Speeds
    sound: bool

    @property
    def holds(self) -> bool:
        """Whether the slow node costs no more than it may, and every value is right."""
        return not missed(self.rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was measured beside its targets."""
        return SPEED.row(self.fair.ratio), WRONG.row(not self.sound)


def bench_uneven(bench: UnevenBench, on_progress: OnProgress = ignore_progress) -> UnevenResult:
    """Run both swarms, one after the other. Raises ConfigError, StorageError, NetworkError."""
    return trio.run(_run, bench, on_progress)


async def _run(bench: UnevenBench, on_progress: OnProgress) -> UnevenResult:
    with TemporaryDirectory(prefix="shoal-bench-uneven-") as name:
        folder = Path(name)
        runtime = Runtime(command=_command(bench, folder))
        found = []
        for fair in (True, False):
            out = folder / ("fair" if fair else "equal")
            report = await run_testnet(bench.scenario(fair=fair), out, on_progress, runtime=runtime)
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
