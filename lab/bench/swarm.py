"""The swarm that a benchmark measures: the nodes a user starts, with contributions that cost nothing.

    BenchSwarm: a `Swarm`, and gates/<round>: held locked here until a round may begin
                                      └─ the synthetic workload of every node waits for it

The nodes run as with `shoal run`. Only one that has to stop at a point exactly (a fault, a look at its memory) is in
test mode. While the gate of a round is closed, all nodes stand in its TRAIN phase with nothing to do.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final

import psutil  # type: ignore[import-untyped]

from shoal.lab.bench.synthetic import WORKLOAD_NAME
from shoal.lab.fleet import Swarm, untested_command
from shoal.node.options import Hold
from shoal.node.reporting.events import Certified
from shoal.node.state.disk_need import bytes_at_least
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import CHUNK_VALUES_STEP, Manifest, RoundSection, validate_manifest
from shoal.testnet.links.namespaces import Network
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command

START_DEADLINE_S: Final = 120.0
ROUND_DEADLINE_S: Final = 60.0
SLOW_VALUES_PER_S: Final = 250_000
"""Deadlines grow with the size at this pace; a machine slower than that is not worth measuring."""
GRACE_S: Final = 30.0
CHUNKS_PER_PEER: Final = 8
NODE_BYTES: Final = 300_000_000
"""Of a daemon and its trainer without any model, at least."""
NODE_BYTES_PER_VALUE: Final = 16
"""Of what the kernel cannot drop, at least: four of the daemon, and of the trainer parameters, those that it
contributed, and a batch that is as large."""
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """Specification of a swarm to measure.

    holds: by node, where it stops; a node that has any, and every node with `test_mode`, is in test mode.
    environment: settings of the nodes' processes, each NAME=VALUE. prefixes: by node, what runs its command. sockets:
    nodes share no memory: all that moves goes through the kernel's sockets. manifest: makes another than the usual one,
    for the synthetic workload, of the founders. sites: by node, of which it says that it is.
    """

    peers: int
    numel: int
    codec: str
    rounds: int
    test_mode: bool = False
    holds: Mapping[int, tuple[Hold, ...]] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    prefixes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    sockets: bool = False
    manifest: Callable[[list[PeerId]], Manifest] | None = None
    sites: Mapping[int, str] = field(default_factory=dict)

    @property
    def chunk_values(self) -> int:
        """The manifest's default, or less where the peers would own only a few chunks each."""
        default: int = RoundSection().chunk_values
        steps = self.numel // (self.peers * CHUNKS_PER_PEER * CHUNK_VALUES_STEP)
        return min(default, CHUNK_VALUES_STEP * max(1, steps))

    @property
    def round_deadline_s(self) -> float:
        """Seconds after which a round has failed."""
        return ROUND_DEADLINE_S + self.numel * self.peers / SLOW_VALUES_PER_S


class BenchSwarm(Swarm):
    """The nodes of one swarm in `folder`, which must be empty. Made by `running_swarm`."""

    def __init__(self, spec: BenchSpec, folder: Path, gates: ExitStack, network: Network | None) -> None:
        self.spec = spec
        runtime = Runtime(command=self._command)
        manifest = spec.manifest or partial(_manifest, spec)
        super().__init__(folder, spec.peers, manifest, runtime=runtime, network=network)
        self.sites = spec.sites
        self._gates = _closed_gates(folder / "gates", spec.rounds, gates)

    def _command(self, launch: Launch) -> list[str]:
        tested = self.spec.test_mode or launch.holds
        command = node_command(launch) if tested else untested_command(launch)
        command += ["--data", str(self.folder / "gates"), "--log-level", "warning"]
        if self.spec.sockets:
            command.append("--no-shared-memory")
        return [*self.spec.prefixes.get(int(launch.data_dir.name), ()), "env", *self.spec.environment, *command]

    async def begin(self) -> None:
        """Start all nodes and have each linked with each, in front of the gate of round 1. Raises NetworkError."""
        await self.start()
        await self.until(
            lambda: all(self.began_round(node, 1) for node in self.nodes) and self.all_linked(),
            "all nodes are linked and in round 1",
            START_DEADLINE_S,
        )

    async def launch(
        self,
        node: NodeProcess,
        *,
        join: tuple[str, ...] = (),
        rounds: int | None = None,
        holds: tuple[Hold, ...] = (),
        after: int = 0,
    ) -> None:
        """Start a process of `node`, which holds where its holds of rounds later than `after` say, too."""
        own = tuple(hold for hold in self.spec.holds.get(node.index, ()) if hold.round > after)
        await super().launch(node, join=join, rounds=rounds, holds=(*holds, *own))

    def open_gate(self, round: int) -> None:
        """Let the nodes contribute to `round`."""
        self._gates.pop(round).close()

    async def play(self, round: int) -> None:
        """Open the gate of a round and return once every node has certified it, and begun the next."""
        self.open_gate(round)
        await self.until_certified(round, self.nodes)

    async def until_certified(self, round: int, nodes: list[NodeProcess]) -> None:
        """Return once these nodes have certified `round` and begun the next. Raises NetworkError."""
        await self.until(
            lambda: all(self.began_round(node, round + 1) for node in nodes),
            f"round {round} is certified",
            self.spec.round_deadline_s,
        )
        without = [node.index for node in nodes if not node.certified(round)]
        if without:
            raise NetworkError(f"node {without[0]} went on after round {round} without having taken part in its end")

    async def until_back(self, node: NodeProcess, round: int) -> None:
        """Return once a node that was away has begun `round` and is linked with all others. Raises NetworkError."""
        await self.until(
            lambda: self.began_round(node, round) and self.all_linked(),
            f"node {node.index} is back in round {round}",
            START_DEADLINE_S + self.spec.round_deadline_s,
        )

    async def until_holding(self, round: int, phase: str, nodes: list[NodeProcess]) -> None:
        """Return once these nodes hold there. Raises NetworkError."""
        await self.until(
            lambda: all(self.holding(node, round, phase) for node in nodes),
            f"all hold in round {round}, {phase}",
            self.spec.round_deadline_s,
        )

    def certified_by(self, round: int) -> dict[int, Certified]:
        """Certificates of that round, by the index of the node that logged it."""
        found = {node.index: self.certificate(node, round) for node in self.nodes}
        return {index: event for index, event in found.items() if event is not None}


def check_memory(spec: BenchSpec, available: int) -> None:
    """Raises ConfigError for a swarm that cannot fit in so many bytes of memory, with what would."""
    room = available // spec.peers - NODE_BYTES
    if NODE_BYTES_PER_VALUE * spec.numel > room:
        needed = spec.peers * (NODE_BYTES + NODE_BYTES_PER_VALUE * spec.numel)
        fits = max(0, room) // NODE_BYTES_PER_VALUE
        raise ConfigError(
            f"{spec.peers} nodes of {spec.numel:,} values need {needed / 1e9:.1f} GB of memory, and "
            f"{available / 1e9:.1f} GB are available; take at most {fits:,} values, or fewer nodes"
        )


def check_disk(spec: BenchSpec, free: int) -> None:
    """Raises ConfigError for a swarm that cannot fit in so many bytes of disk, with what would."""
    needed = spec.peers * bytes_at_least(spec.numel, spec.codec)
    if needed > free:
        fits = int(spec.numel * max(0, free) / needed)
        raise ConfigError(
            f"{spec.peers} nodes of {spec.numel:,} values need {needed / 1e9:.1f} GB of disk at least, and "
            f"{free / 1e9:.1f} GB are free; take at most {fits:,} values, fewer nodes, or a larger disk (TMPDIR)"
        )


@asynccontextmanager
async def running_swarm(spec: BenchSpec, folder: Path, network: Network | None = None) -> AsyncIterator[BenchSwarm]:
    """A swarm in front of the gate of round 1, in these namespaces or on loopback.

    Raises ConfigError if it cannot fit, NetworkError; whatever happens, no process is left.
    """
    check_memory(spec, psutil.virtual_memory().available)
    check_disk(spec, shutil.disk_usage(folder).free)
    with ExitStack() as gates:
        swarm = BenchSwarm(spec, folder, gates, network)
        async with swarm.owned():
            await swarm.begin()
            yield swarm


def _manifest(spec: BenchSpec, founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "bench", "founders": founders, "admission": "open"},
        "workload": {"name": WORKLOAD_NAME, "seed": SEED, "options": {"numel": spec.numel}},
        "sync": {"inner_steps": 1, "codec": spec.codec, "balance": False, "norm_clip": False},
        "round": {"chunk_values": spec.chunk_values, "grace_s": GRACE_S},
    }
    return validate_manifest(tables, source="the benchmark")


def _closed_gates(folder: Path, rounds: int, held: ExitStack) -> dict[int, IO[str]]:
    """A file per round, each locked until it is closed. The round after the last has one too: the nodes wait there."""
    folder.mkdir()
    gates: dict[int, IO[str]] = {}
    for round in range(1, rounds + 2):
        gates[round] = held.enter_context((folder / str(round)).open("w"))
        fcntl.flock(gates[round], fcntl.LOCK_EX)
    return gates
