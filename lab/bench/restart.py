"""How long a node that was killed takes until it trains again, from its own disk.

One node alone, founder of its swarm, is killed (SIGKILL) in the middle of a round's training and started again with the
same data folder, some times over. A restart begins when its process is started and ends when the first inner step
begins: the trainer has its orders by then, and steps as soon as it has evaluated the state that it goes on from, which
the event `evaluated` tells. Importing torch is timed inside the trainer process and reported beside it, and taken off;
what the node does beside the import costs nothing then.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import trio

from shoal.lab.fleet import Swarm, end
from shoal.lab.targets import Row, Target
from shoal.node.reporting.event_files import LOG_NAME, lines_of
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Launch, Runtime, node_command

INPUTS = 256
STEPS = 1000
"""Inner steps of a round, by the MB of state: steps of large models take longer. From 2 to STEPS_LIMIT."""
STEPS_LIMIT = 100
BYTES_PER_PARAMETER = 8
"""Of a saved state: anchor and momentum."""
DEADLINE_S = 300.0
INEXACT = Target(name="restarts that did not go on exactly where the node was", most=0)


class _Event(msgspec.Struct, frozen=True):
    at: float
    event: str
    round: int = 0
    import_s: float = 0.0
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart: seconds from process start to training, those of importing torch among them, and how it resumed."""

    total_s: float
    import_torch_s: float
    exact: bool

    @property
    def net_s(self) -> float:
        """Without importing torch."""
        return self.total_s - self.import_torch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpeed:
    """All restarts, in order."""

    state_bytes: int
    restarts: tuple[Restart, ...]

    @property
    def net_s(self) -> float:
        """The median without importing torch."""
        return statistics.median(restart.net_s for restart in self.restarts)

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was measured beside its target."""
        return (INEXACT.row(sum(not restart.exact for restart in self.restarts)),)


def measure_restart(*, state_mb: int, repetitions: int) -> RestartSpeed:
    """Measure with a regression whose saved state has about so many MB. Raises NetworkError if a node fails."""
    return trio.run(_measure, state_mb, repetitions)


async def _measure(state_mb: int, repetitions: int) -> RestartSpeed:
    outputs = max(1, state_mb * 1_000_000 // (BYTES_PER_PARAMETER * (INPUTS + 1)))
    steps = min(STEPS_LIMIT, max(2, STEPS // state_mb))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        node = LoneNode(Path(scratch), outputs=outputs, steps=steps)
        async with node.owned():
            await node.start()
            await node.wait("round_started", round=3)
            restarts = []
            for _ in range(repetitions):
                restarts.append(await node.restart())
                await node.wait("round_started", round=1 + max(event.round for event in node.events("contributed")))
    return RestartSpeed(state_bytes=BYTES_PER_PARAMETER * (INPUTS + 1) * outputs, restarts=tuple(restarts))


class LoneNode(Swarm):
    """A node that is all of its swarm, as `shoal run` starts it."""

    def __init__(self, folder: Path, *, outputs: int, steps: int) -> None:
        super().__init__(folder, 1, partial(_manifest, outputs, steps), runtime=Runtime(command=_command))

    async def restart(self) -> Restart:
        """Kill the node and start it again; returns once it has trained and contributed."""
        node = self.node(0)
        await end(node)
        await self.launch(node)
        await self.wait("contributed")
        trained_from = max(self.first("evaluated").at, self.first("round_started").at)
        return Restart(
            total_s=trained_from - node.lives[-1].started_at,
            import_torch_s=self.first("trainer_started").import_s,
            exact=self.first("resumed").exact,
        )

    def events(self, kind: str) -> list[_Event]:
        """Those of that kind of this life, whose lines are whole."""
        found = (msgspec.json.decode(line, type=_Event) for line in lines_of(self.home(0) / LOG_NAME))
        return [event for event in found if event.event == kind and event.at >= self.node(0).lives[-1].started_at]

    def first(self, kind: str) -> _Event:
        """The first such event of this life, which is there."""
        return self.events(kind)[0]

    async def wait(self, kind: str, *, round: int = 0) -> None:
        """Return once there is such an event of this life, of that round or a later one. Raises NetworkError."""
        await self.until(
            lambda: any(event.round >= round for event in self.events(kind)), f"the node comes to {kind!r}", DEADLINE_S
        )


def _command(launch: Launch) -> list[str]:
    command = node_command(launch)
    command.remove("--test-mode")
    return command


def _manifest(outputs: int, steps: int, founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "bench", "founders": founders, "admission": "open"},
        "workload": {"name": "regression", "options": {"inputs": INPUTS, "outputs": outputs}},
        "sync": {"inner_steps": steps, "balance": False},
    }
    return validate_manifest(tables, source="the benchmark")
