"""The processes of one measurement: inner loops side by side on this machine, or the same nodes as a swarm.

*Alone* they have nobody to exchange anything with, and train on and on. Measured are, of each, the stretches that began
when all had warmed up: as many as rounds are measured of the swarm, and more where these are over in no time.

*Together* they are real daemons on loopback, as `shoal run` starts them, and nothing holds them up. Measured are the
rounds after those that warm up; what a node did for a round is what it made since its contribution to the one before.

An event `contributed` stands for what a node did since the one before: its steps, how long they took by themselves, and
how long all took. That is so of a node in a swarm and of a loop alone (`throughput_loop`), which are measured alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from shoal.lab.bench.throughput_loop import DEVICE, WRONG_USAGE
from shoal.lab.bench.throughput_spec import WARM_UP_ROUNDS, Alone, CpuShare, Stretch, ThroughputBench, Together
from shoal.lab.fleet import START_DEADLINE_S, Swarm, cpu_s, output_of, untested_command
from shoal.node.reporting.events import Certified, Contributed
from shoal.protocol.errors import ConfigError, NetworkError, ShoalError
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

VALUES_PER_S: Final = 1_000_000
"""Deadlines grow with the size at this pace."""
LEAST_S: Final = 1.0
"""Of warming up, and of measuring, alone: a shorter look shows chance."""
STEP_DEADLINE_S: Final = 120.0
TIMEOUT: Final = 10.0
"""So many times what its steps take alone a round may take, and `ROUND_S` more."""
ROUND_S: Final = 60.0


def stretch_of(made: Iterable[Contributed], bench: ThroughputBench) -> Stretch:
    """Add up these contributions of one node."""
    made = list(made)
    steps = sum(event.steps for event in made)
    return Stretch(
        tokens=steps * bench.tokens_per_step,
        steps=steps,
        wall_s=sum(event.wall_s for event in made),
        steps_s=sum(event.seconds for event in made),
        blocked_s=sum(event.blocked_s for event in made),
    )


class Cpu(NamedTuple):
    """Seconds of processor time that trainers, and those who start them, have had at a moment."""

    at: float
    trainers_s: float
    daemons_s: float

    def share_since(self, earlier: Cpu) -> CpuShare:
        """Processor time per second since `earlier`."""
        took_s = self.at - earlier.at
        return CpuShare(
            trainers=(self.trainers_s - earlier.trainers_s) / took_s,
            daemons=(self.daemons_s - earlier.daemons_s) / took_s,
        )


class Nodes(Swarm):
    """Processes of the nodes of `bench`, in an empty folder; `command` makes the command line of each."""

    def __init__(self, bench: ThroughputBench, folder: Path, command: Callable[[Launch], list[str]]) -> None:
        super().__init__(folder, bench.nodes, bench.manifest, runtime=Runtime(command=command))
        self.round_steps = self.manifest.sync.round_steps
        self.start_s = START_DEADLINE_S + bench.shape.parameters / VALUES_PER_S
        """Time limit for the nodes to start."""

    @asynccontextmanager
    async def running(self, *, joined: bool) -> AsyncIterator[None]:
        """Start all of them, and yield them. joined: by the address of the first, as soon as it has one.

        Raises ConfigError, NetworkError; whatever happens, no process is left.
        """
        async with self.owned():
            if joined:
                await self.start(deadline_s=self.start_s)
            else:
                for node in self.nodes:
                    await self.launch(node)
            yield

    def error_of(self, node: NodeProcess) -> ShoalError:
        """Return the error for a node that ended by itself: wrong usage may be its user's fault."""
        if node.lives[-1].exit_code == WRONG_USAGE and (words := output_of(node).strip()):
            return ConfigError(words.splitlines()[-1])
        return super().error_of(node)

    def made(self, node: int) -> list[Contributed]:
        """Contributions that the node made, in order."""
        return self.journal.of(Contributed, node)

    def cpu(self) -> Cpu:
        """Return the processor time so far, and now."""
        nodes = list(self.daemons().values())
        trainers = [child for node in nodes for child in node.children(recursive=True)]
        return Cpu(at=time.monotonic(), trainers_s=cpu_s(trainers), daemons_s=cpu_s(nodes))


# -- the loops alone -----------------------------------------------------------------------------------------


async def run_alone(bench: ThroughputBench, folder: Path) -> Alone:
    """Measure the inner loops, in an empty folder.

    Raises ConfigError (no such device), NetworkError (a trainer died), alone or in groups.
    Cancellation: all processes are killed and reaped.
    """

    def command(launch: Launch) -> list[str]:
        node = int(launch.data_dir.name)
        arguments = [launch.manifest, launch.data_dir, node, bench.device_of(node), bench.threads]
        return [sys.executable, "-m", "shoal.lab.bench.throughput_loop", *map(str, arguments)]

    loops = Nodes(bench, folder, command)
    deadline_s = loops.start_s + STEP_DEADLINE_S * loops.round_steps
    async with loops.running(joined=False):
        await loops.until(
            lambda: all(enough(loops.made(node), WARM_UP_ROUNDS) for node in range(bench.nodes)),
            "all inner loops are warm",
            deadline_s,
        )
        warm, before = time.time(), loops.cpu()
        await loops.until(
            lambda: all(enough(since(loops.made(node), warm), bench.rounds) for node in range(bench.nodes)),
            "all inner loops are measured",
            deadline_s * bench.rounds,
        )
        cpu = loops.cpu().share_since(before)
    found = tuple(stretch_of(since(loops.made(node), warm), bench) for node in range(bench.nodes))
    return Alone(loops=found, cpu=cpu, device=(loops.home(0) / DEVICE).read_text(encoding="utf-8"))


def since(made: list[Contributed], moment: float) -> list[Contributed]:
    """Contributions that were begun at `moment` or later."""
    return [event for event in made if event.at - event.wall_s >= moment]


def enough(made: list[Contributed], rounds: int) -> bool:
    """True if these contributions are enough to measure by: so many, and so long."""
    return len(made) >= rounds and sum(event.wall_s for event in made) >= LEAST_S


# -- the swarm -----------------------------------------------------------------------------------------------


async def run_together(bench: ThroughputBench, folder: Path, *, step_s: float) -> Together:
    """Measure the swarm, in an empty folder. step_s: how long a step takes without it.

    Raises ConfigError, NetworkError (it did not get through it), alone or in groups.
    Cancellation: all processes are killed and reaped.
    """

    def command(launch: Launch) -> list[str]:
        line = untested_command(launch)
        line[line.index("--threads") + 1] = str(bench.threads)
        return [*line, "--device", bench.device_of(int(launch.data_dir.name)), "--log-level", "warning"]

    swarm = Nodes(bench, folder, command)
    round_s = TIMEOUT * step_s * swarm.round_steps + ROUND_S
    async with swarm.running(joined=True):
        await swarm.until(
            lambda: all(swarm.common_rounds(node) >= WARM_UP_ROUNDS for node in swarm.nodes),
            "all nodes train together",
            swarm.start_s + 2 * WARM_UP_ROUNDS * round_s,
        )
        before = swarm.cpu()
        warm = max(event.round for event in swarm.journal.of(Contributed))  # what comes after it, begins after now
        last = warm + bench.rounds
        await swarm.until(
            lambda: all(_is_through(swarm.journal, node, last) for node in range(bench.nodes)),
            f"{bench.rounds} more rounds are certified",
            (1 + bench.rounds) * round_s,
        )
        cpu = swarm.cpu().share_since(before)
    return together_of(swarm.journal, bench, range(warm + 1, last + 1), cpu)


def together_of(journal: Journal, bench: ThroughputBench, rounds: Sequence[int], cpu: CpuShare) -> Together:
    """Measure these rounds by the logs. Raises NetworkError where a node contributed to none of them."""
    stretches = list[Stretch]()
    missed = 0
    for node in range(bench.nodes):
        made = [event for event in journal.of(Contributed, node) if event.round in rounds]
        if not made:
            raise NetworkError(f"node {node} contributed to no measured round; give it more --rounds")
        missed += len(rounds) - len({event.round for event in made})
        stretches.append(stretch_of(made, bench))
    certified: dict[int, list[Certified]] = {number: [] for number in (rounds[0] - 1, *rounds)}
    for event in journal.of(Certified):
        certified.get(event.round, []).append(event)
    states = [{event.digest for event in certified[number]} for number in rounds]
    firsts = [min(event.at for event in found) for found in certified.values() if found]
    return Together(
        nodes=tuple(stretches),
        first_round=rounds[0],
        rounds_s=tuple(round(later - earlier, 6) for earlier, later in pairwise(firsts)),
        cpu=cpu,
        missed=missed,
        sound=all(len(digests) == 1 for digests in states),
    )


def _is_through(journal: Journal, node: int, round: int) -> bool:
    """True if the node has certified that round and contributed to it, or to a later one where it missed some."""
    kinds: tuple[type[Certified | Contributed], ...] = (Certified, Contributed)
    return all(any(event.round >= round for event in journal.of(kind, node)) for kind in kinds)
