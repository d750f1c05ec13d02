"""`shoal bench find`: how long a newcomer takes to find and join a swarm, by its link alone, and where that time goes.

Real nodes on loopback train together; then `shoal link` is asked at one, and `shoal run LINK` with an empty data folder
is timed, some times over, one newcomer after the other. The members run at the lowest priority, so that they take less
from the newcomer than the machines stand for that they would have of their own.

    started       imports, the link read, the manifest fetched and checked
    listening     host, lanes and control socket are up
    linked        the first member admitted it
    linked_all    so did all others
    contributed   it trained in a round
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, Spec
from shoal.lab.fleet import Swarm, end, untested_command
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.events import Contributed, Linked, Listening, Started
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

DEADLINE_S = 180.0
MEMBERS_NICENESS = 19
STAGES = ("started", "listening", "linked", "linked_all", "contributed")
LINKED = Target(name="a newcomer is linked after", unit="s", most=5.5)
LINKED_ALL = Target(name="a newcomer is linked with all after", unit="s", most=7.6)
"""Twice what eight nodes took on two cores: beyond that something waits that should not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindBench(Spec):
    """Options of `shoal bench find`."""

    nodes: Annotated[int, Option("--nodes", help="Members of the swarm, all on this machine.", check=Within(1, 64))] = 8
    repetitions: Annotated[
        int, Option("--repetitions", help="Newcomers, one after the other.", check=Within(1, 100))
    ] = 5


class FindSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the start of the command: the medians, and those of each newcomer by stage."""

    nodes: int
    linked_s: float
    linked_all_s: float
    contributed_s: float
    newcomers: tuple[dict[str, float], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return LINKED.row(self.linked_s), LINKED_ALL.row(self.linked_all_s)


class LinkedSwarm(Swarm):
    """Members that train in `folder`, and newcomers: whoever comes after the first has nothing but a link."""

    def __init__(self, folder: Path, members: int) -> None:
        self.members = members
        super().__init__(folder, members, _manifest, runtime=Runtime(command=self._command))

    def _command(self, launch: Launch) -> list[str]:
        niceness = MEMBERS_NICENESS if int(launch.data_dir.name) < self.members else 0
        command = untested_command(launch)
        for link in launch.join:
            command[command.index(str(launch.manifest))] = link
            at = command.index("--join")
            del command[at : at + 2]
        return ["env", "OMP_NUM_THREADS=1", "nice", "-n", str(niceness), *command]

    async def begin(self) -> None:
        """Start all members; returns once all are linked and have contributed. Raises NetworkError."""
        first, *others = self.nodes
        await self.launch(first)
        await self.until(lambda: bool(first.addresses), "the first node listens", DEADLINE_S)
        link = await self.link(first)
        for node in others:
            await self.launch(node, join=(link,))
        await self.until(lambda: all(map(self._takes_part, self.nodes)), "all members train together", DEADLINE_S)

    def _takes_part(self, node: NodeProcess) -> bool:
        return self._linked_at(node, self.members - 1) is not None and bool(self.journal.of(Contributed, node.index))

    def _linked_at(self, node: NodeProcess, peers: int) -> float | None:
        """Time at which a node was linked with so many others; None if it is not yet."""
        seen: dict[str, float] = {}
        for event in self.journal.of(Linked, node.index):
            seen.setdefault(event.peer, event.at)
        if not peers:
            return 0.0
        return sorted(seen.values())[peers - 1] if len(seen) >= peers else None

    async def link(self, node: NodeProcess) -> str:
        """Return the link that `shoal link` prints for a node. Raises NetworkError."""
        command = [sys.executable, "-m", "shoal.cli.main", "link", "--data-dir", str(node.folder)]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode:
            raise NetworkError(f"no link: {' '.join(done.stderr.decode().split())}")
        return done.stdout.decode().strip()

    async def newcomer(self, index: int, link: str) -> dict[str, float]:
        """Let one join, with an empty folder, until it has contributed; its seconds by stage. Then it is ended."""
        node = self.add(index)
        await self.launch(node, join=(link,))
        await self.until(lambda: bool(self.journal.of(Contributed, index)), "a newcomer contributes", DEADLINE_S)
        await self.until(
            lambda: self._linked_at(node, self.members) is not None, "a newcomer is linked with all", DEADLINE_S
        )
        at = {
            "started": self.journal.of(Started, index)[0].at,
            "listening": self.journal.of(Listening, index)[0].at,
            "linked": self._linked_at(node, 1) or 0.0,
            "linked_all": self._linked_at(node, self.members) or 0.0,
            "contributed": self.journal.of(Contributed, index)[0].at,
        }
        await end(node)
        return {stage: round(at[stage] - node.lives[0].started_at, 3) for stage in STAGES}


def _manifest(founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "bench", "founders": founders, "admission": "open"},
        "workload": {"name": "regression"},
        "sync": {"inner_steps": 100},
    }
    return validate_manifest(tables, source="the benchmark")


def run(bench: FindBench, tell: ShowNow) -> FindSpeed:
    """Start a swarm on loopback, and time `shoal run LINK` from its start to its links and its first contribution."""
    newcomers = trio.run(_measure, bench)
    median = {stage: statistics.median(times[stage] for times in newcomers) for stage in STAGES}
    return FindSpeed(
        nodes=bench.nodes,
        linked_s=round(median["linked"], 3),
        linked_all_s=round(median["linked_all"], 3),
        contributed_s=round(median["contributed"], 3),
        newcomers=newcomers,
    )


async def _measure(bench: FindBench) -> tuple[dict[str, float], ...]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        swarm = LinkedSwarm(Path(scratch), bench.nodes)
        async with swarm.owned():
            await swarm.begin()
            link = await swarm.link(swarm.nodes[-1])
            found = [await swarm.newcomer(bench.nodes + number, link) for number in range(bench.repetitions)]
    return tuple(found)


CASE: Final = Case(spec=FindBench, run=run)
