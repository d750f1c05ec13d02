"""The same nodes as a swarm: real daemons on loopback, as `shoal run` starts them, and what their logs say of it.

They are not in test mode, which would write every round to the disk, and nothing holds them up. Measured are the rounds
after those that warm up; what a node did for a round is what it made since its contribution to the one before.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest import render_manifest
from shoal.testnet.bench.throughput_spec import WARM_UP_ROUNDS, Stretch, ThroughputBench, Together
from shoal.testnet.journal import Certified, Contributed, Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command

START_DEADLINE_S: Final = 180.0
VALUES_PER_S: Final = 1_000_000
"""Deadlines grow with the size at this pace."""
PATIENCE: Final = 10.0
"""So many times what its steps take alone a round may take, and `ROUND_S` more."""
ROUND_S: Final = 30.0
LOG_SHOWN_CHARS: Final = 600


async def run_together(bench: ThroughputBench, folder: Path, *, step_s: float) -> Together:
    """Measure the swarm, in an empty folder. step_s: how long a step takes without it.

    Raises ConfigError, NetworkError (it did not get through it), alone or in groups.
    Cancellation: all processes are killed and reaped.
    """
    swarm = _Swarm(bench, folder)
    round_s = PATIENCE * step_s * swarm.round_steps + ROUND_S + bench.shape.parameters / VALUES_PER_S
    async with swarm.running():
        await swarm.until(
            lambda: swarm.common_rounds() >= WARM_UP_ROUNDS,
            "all nodes train together",
            START_DEADLINE_S + 2 * WARM_UP_ROUNDS * round_s,
        )
        began, cpu_s, warm = time.monotonic(), swarm.daemons_cpu_s(), swarm.newest_round()
        last = warm + bench.rounds
        await swarm.until(
            lambda: swarm.contributed(last) and swarm.certified(last),
            "the rounds are certified",
            bench.rounds * round_s,
        )
        daemons_cpu = (swarm.daemons_cpu_s() - cpu_s) / (time.monotonic() - began)
    return together_of(swarm.journal, bench, range(warm + 1, last + 1), daemons_cpu)


def together_of(journal: Journal, bench: ThroughputBench, rounds: Sequence[int], daemons_cpu: float) -> Together:
    """What the logs say of these rounds. Raises NetworkError where a node contributed to none of them."""
    stretches, sound = [], True
    for node in range(bench.nodes):
        made = [event for event in journal.of(Contributed, node) if event.round in rounds]
        if not made:
            raise NetworkError(f"node {node} contributed to no measured round; give it more --rounds")
        sound &= {event.round for event in made} == set(rounds)
        stretches.append(
            Stretch(
                tokens=sum(event.steps for event in made) * bench.tokens_per_step,
                steps=sum(event.steps for event in made),
                wall_s=sum(event.wall_s for event in made),
                steps_s=sum(event.seconds for event in made),
                blocked_s=sum(event.blocked_s for event in made),
            )
        )
    certified: dict[int, list[Certified]] = {number: [] for number in (rounds[0] - 1, *rounds)}
    for event in journal.of(Certified):
        certified.get(event.round, []).append(event)
    for number in rounds:
        found = certified[number]
        sound &= len(found) == bench.nodes and len({event.digest for event in found}) == 1
        sound &= all(event.contributors == bench.nodes for event in found)
    firsts = [min(event.at for event in found) for found in certified.values() if found]
    return Together(
        nodes=tuple(stretches),
        first_round=rounds[0],
        rounds_s=tuple(round(later - earlier, 6) for earlier, later in pairwise(firsts)),
        daemons_cpu=daemons_cpu,
        sound=sound,
    )


class _Swarm:
    """The nodes, in a folder of theirs."""

    def __init__(self, bench: ThroughputBench, folder: Path) -> None:
        self._bench = bench
        self.journal = Journal()
        runtime = Runtime(command=self._command)
        self._nodes: list[NodeProcess] = []
        for index in range(bench.nodes):
            home = folder / str(index)
            home.mkdir(mode=0o700)
            self._nodes.append(NodeProcess(index, home, self.journal, runtime))
        manifest = bench.manifest([node.peer_id for node in self._nodes])
        self.round_steps = manifest.sync.round_steps
        self._manifest = folder / "swarm.toml"
        self._manifest.write_text(render_manifest(manifest), encoding="utf-8")

    def _command(self, launch: Launch) -> list[str]:
        command = node_command(launch)
        command.remove("--test-mode")
        command[command.index("--threads") + 1] = str(self._bench.threads)
        return [*command, "--device", self._bench.device(int(launch.data_dir.name)), "--log-level", "warning"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All nodes, started. Raises NetworkError; whatever happens, no process is left."""
        first, *others = self._nodes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run, Launch(manifest=self._manifest, data_dir=first.folder))
            await self.until(lambda: bool(first.addresses), "the first node listens", START_DEADLINE_S)
            for node in others:
                launch = Launch(manifest=self._manifest, data_dir=node.folder, join=first.addresses)
                nursery.start_soon(node.run, launch)
            yield
            nursery.cancel_scope.cancel()

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait for what the nodes' logs must show. Raises NetworkError at the deadline, or as soon as a node ended."""

        def met() -> bool:
            for node in self._nodes:
                if node.lives and not node.alive:
                    raise NetworkError(f"node {node.index} ended: …{_last_words(node)}")
            return condition()

        with trio.move_on_after(deadline_s) as scope:
            await self.journal.until(met)
        if scope.cancelled_caught:
            words = "; ".join(f"node {node.index}: …{_last_words(node)}" for node in self._nodes)
            raise NetworkError(f"{what}: not within {deadline_s:.0f} s. {words}")

    def common_rounds(self) -> int:
        """How many rounds every node has certified that had contributions of all."""
        nodes = range(self._bench.nodes)
        return min(
            sum(event.contributors == len(nodes) for event in self.journal.of(Certified, node)) for node in nodes
        )

    def newest_round(self) -> int:
        """The newest one that any node has contributed to: what comes after it was begun after now."""
        return max(event.round for event in self.journal.of(Contributed))

    def contributed(self, round: int) -> bool:
        """Whether all nodes did to that round."""
        nodes = range(self._bench.nodes)
        return all(any(event.round == round for event in self.journal.of(Contributed, node)) for node in nodes)

    def certified(self, round: int) -> bool:
        """Whether all nodes did."""
        return all(node.certified(round) for node in self._nodes)

    def daemons_cpu_s(self) -> float:
        """Processor time of all daemons so far, without their trainers'."""
        return sum(sum(psutil.Process(node.lives[-1].pid).cpu_times()[:2]) for node in self._nodes)


def _last_words(node: NodeProcess) -> str:
    path = node.folder / "log.txt"
    return " ".join(path.read_text(errors="replace")[-LOG_SHOWN_CHARS:].split()) if path.exists() else ""
