"""The processes of one measurement, their logs, and what these say of the tokens that were trained on.

An event `contributed` stands for what a node did since the one before: its steps, how long they took by themselves, and
how long all took. That is so of a node in a swarm and of a loop alone (`throughput_loop`), which are measured alike.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil  # type: ignore[import-untyped]

from shoal.lab.bench.throughput_loop import WRONG_USAGE
from shoal.lab.bench.throughput_spec import CpuShare, Stretch, ThroughputBench
from shoal.lab.fleet import START_DEADLINE_S, Swarm, output_of
from shoal.protocol.errors import ConfigError, ShoalError
from shoal.testnet.journal import Contributed
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

VALUES_PER_S: Final = 1_000_000
"""Deadlines grow with the size at this pace."""


def stretch_of(made: Iterable[Contributed], bench: ThroughputBench) -> Stretch:
    """All these of one node together."""
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
        """Per second."""
        took_s = self.at - earlier.at
        return CpuShare(
            trainers=(self.trainers_s - earlier.trainers_s) / took_s,
            daemons=(self.daemons_s - earlier.daemons_s) / took_s,
        )


class Nodes(Swarm):
    """As many processes as `bench` has nodes, in an empty folder; `command` makes the command line of each."""

    def __init__(self, bench: ThroughputBench, folder: Path, command: Callable[[Launch], list[str]]) -> None:
        super().__init__(folder, bench.nodes, bench.manifest, runtime=Runtime(command=command))
        self.round_steps = self.manifest.sync.round_steps
        self.start_s = START_DEADLINE_S + bench.shape.parameters / VALUES_PER_S
        """How long they may take to start."""

    @asynccontextmanager
    async def running(self, *, joined: bool) -> AsyncIterator[None]:
        """All of them, started. joined: by the address of the first, as soon as it has one.

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
        """What it means that a node ended by itself: wrong usage may be its user's fault."""
        if node.lives[-1].exit_code == WRONG_USAGE and (words := output_of(node).strip()):
            return ConfigError(words.splitlines()[-1])
        return super().error_of(node)

    def made(self, node: int) -> list[Contributed]:
        """What that node did, in order."""
        return self.journal.of(Contributed, node)

    def cpu(self) -> Cpu:
        """Processor time so far, and now."""
        nodes = [psutil.Process(node.lives[-1].pid) for node in self.nodes]
        trainers = [child for node in nodes for child in node.children(recursive=True)]
        return Cpu(at=time.monotonic(), trainers_s=_cpu_s(trainers), daemons_s=_cpu_s(nodes))


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a helper that ended this moment
            total += sum(process.cpu_times()[:2])
    return total
