"""The processes of one measurement, their logs, and what these say of the tokens that were trained on.

An event `contributed` stands for what a node did since the one before: its steps, how long they took by themselves, and
how long all took. That is so of a node in a swarm and of a loop alone (`throughput_loop`), which are measured alike.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import psutil  # type: ignore[import-untyped]
import trio

from shoal.lab.bench.node_logs import ended_early, output_of, until_logged
from shoal.lab.bench.throughput_loop import WRONG_USAGE
from shoal.lab.bench.throughput_spec import WORKLOAD_NAME, CpuShare, Stretch, ThroughputBench
from shoal.node.reporting.events import Contributed
from shoal.protocol.errors import ConfigError, ShoalError
from shoal.protocol.manifest import render_manifest
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

START_DEADLINE_S: Final = 180.0
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


class Nodes:
    """As many processes as `bench` has nodes, in an empty folder; `command` makes the command line of each."""

    def __init__(self, bench: ThroughputBench, folder: Path, command: Callable[[Launch], list[str]]) -> None:
        self.journal = Journal()
        self.nodes: list[NodeProcess] = []
        for index in range(bench.nodes):
            home = folder / str(index)
            home.mkdir(mode=0o700)
            self.nodes.append(NodeProcess(index, home, self.journal, Runtime(command=command)))
        manifest = bench.manifest([node.peer_id for node in self.nodes])
        self.round_steps = manifest.sync.round_steps
        self.start_s = START_DEADLINE_S + bench.shape.parameters / VALUES_PER_S
        """How long they may take to start."""
        self._manifest = folder / "swarm.toml"
        self._manifest.write_text(render_manifest(manifest), encoding="utf-8")

    @asynccontextmanager
    async def running(self, *, joined: bool) -> AsyncIterator[None]:
        """All of them, started. joined: by the address of the first, as soon as it has one.

        Raises ConfigError, NetworkError; whatever happens, no process is left.
        """
        first, *others = self.nodes
        launch = partial(Launch, manifest=self._manifest, workload=WORKLOAD_NAME)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run, launch(data_dir=first.folder))
            if joined:
                await self.until(lambda: bool(first.addresses), "the first node listens", self.start_s)
            for node in others:
                nursery.start_soon(node.run, launch(data_dir=node.folder, join=first.addresses))
            yield
            nursery.cancel_scope.cancel()

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait for what the logs must show. Raises NetworkError at the deadline, that or ConfigError when one ends."""
        await until_logged(
            condition, what, nodes=self.nodes, journal=self.journal, deadline_s=deadline_s, error_of=_error_of
        )

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


def _error_of(node: NodeProcess) -> ShoalError:
    if node.lives[-1].exit_code == WRONG_USAGE and (words := output_of(node).strip()):
        return ConfigError(words.splitlines()[-1])
    return ended_early(node)
