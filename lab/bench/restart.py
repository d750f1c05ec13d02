"""`shoal bench restart`: how long a node that was killed takes until it trains again, from its own disk.

One node alone, founder of its swarm, is killed (SIGKILL) in the middle of a round's training and started again with the
same data folder, some times over. A restart begins when its process is started and ends when the first inner step
begins: the trainer has its orders by then, and steps as soon as it has evaluated the state that it goes on from, which
the event `evaluated` tells. Importing torch is timed inside the trainer process and reported beside it, and taken off;
what the node does beside the import costs nothing then.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import trio

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, Spec
from shoal.lab.fleet import Swarm, end, untested_command
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_kind
from shoal.node.reporting.events import Contributed, Evaluated, Event, Resumed, RoundStarted, TrainerStarted, name_of
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Runtime

INPUTS = 256
STEPS = 1000
"""Inner steps of a round, by the MB of state: steps of large models take longer. From 2 to STEPS_LIMIT."""
STEPS_LIMIT = 100
BYTES_PER_PARAMETER = 8
"""Of a saved state: anchor and momentum."""
DEADLINE_S = 300.0
INEXACT = Target(name="restarts that did not go on exactly where the node was", most=0)


E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBench(Spec):
    """Options of `shoal bench restart`: a regression whose saved state has about so many MB."""

    state_mb: Annotated[
        int, Option("--state-mb", help="MB (10^6 bytes) of the certified state on disk.", check=Within(1, 1_000_000))
    ] = 10
    repetitions: Annotated[int, Option("--repetitions", help="Kills and restarts.", check=Within(1, 1000))] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart: seconds from process start to training, those of importing torch among them, and how it resumed."""

    total_s: float
    import_torch_s: float
    exact: bool

    @property
    def net_s(self) -> float:
        """Seconds without those of importing torch."""
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
        """Measured value, with its target."""
        return (INEXACT.row(sum(not restart.exact for restart in self.restarts)),)


def run(bench: RestartBench, tell: ShowNow) -> RestartSpeed:
    """Kill a node in the middle of its training, and start it again."""
    return trio.run(_measure, bench)


async def _measure(bench: RestartBench) -> RestartSpeed:
    outputs = max(1, bench.state_mb * 1_000_000 // (BYTES_PER_PARAMETER * (INPUTS + 1)))
    steps = min(STEPS_LIMIT, max(2, STEPS // bench.state_mb))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        node = LoneNode(Path(scratch), outputs=outputs, steps=steps)
        async with node.owned():
            await node.start()
            await node.wait_round(3)
            restarts = []
            for _ in range(bench.repetitions):
                restarts.append(await node.restart())
                await node.wait_round(1 + max(event.round for event in node.events(Contributed)))
    return RestartSpeed(state_bytes=BYTES_PER_PARAMETER * (INPUTS + 1) * outputs, restarts=tuple(restarts))


class LoneNode(Swarm):
    """A node that is all of its swarm, as `shoal run` starts it."""

    def __init__(self, folder: Path, *, outputs: int, steps: int) -> None:
        super().__init__(folder, 1, partial(_manifest, outputs, steps), runtime=Runtime(command=untested_command))

    async def restart(self) -> Restart:
        """Kill the node and start it again; returns once it has trained and contributed."""
        node = self.node(0)
        await end(node)
        await self.launch(node)
        await self.wait(Contributed)
        trained_from = max(self.first(Evaluated).at, self.first(RoundStarted).at)
        return Restart(
            total_s=trained_from - node.lives[-1].started_at,
            import_torch_s=self.first(TrainerStarted).import_s,
            exact=self.first(Resumed).exact,
        )

    def events(self, kind: type[E]) -> list[E]:
        """Events of that kind of this life."""
        began = self.node(0).lives[-1].started_at
        return [event for event in read_kind(self.home(0) / LOG_NAME, kind) if event.at >= began]

    def first(self, kind: type[E]) -> E:
        """The first such event of this life, which is there."""
        return self.events(kind)[0]

    async def wait_round(self, round: int) -> None:
        """Return once that round, or a later one, began in this life. Raises NetworkError."""
        await self.wait(RoundStarted, lambda event: event.round >= round)

    async def wait(self, kind: type[E], match: Callable[[E], bool] = lambda event: True) -> None:
        """Return once there is such an event of this life that matches. Raises NetworkError."""
        what = f"the node comes to {name_of(kind)!r}"
        await self.until(lambda: any(map(match, self.events(kind))), what, DEADLINE_S)


def _manifest(outputs: int, steps: int, founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "bench", "founders": founders, "admission": "open"},
        "workload": {"name": "regression", "options": {"inputs": INPUTS, "outputs": outputs}},
        "sync": {"inner_steps": steps, "balance": False},
    }
    return validate_manifest(tables, source="the benchmark")


def to_document(speed: RestartSpeed) -> dict[str, object]:
    """Return medians, and every restart in order."""
    return {
        "state_bytes": speed.state_bytes,
        "restart_s": round(statistics.median(one.total_s for one in speed.restarts), 3),
        "import_torch_s": round(statistics.median(one.import_torch_s for one in speed.restarts), 3),
        "net_s": round(speed.net_s, 3),
        "exact": all(one.exact for one in speed.restarts),
        "runs": [
            {
                "restart_s": round(one.total_s, 3),
                "import_torch_s": round(one.import_torch_s, 3),
                "net_s": round(one.net_s, 3),
                "exact": one.exact,
            }
            for one in speed.restarts
        ],
    }


def to_lines(speed: RestartSpeed) -> list[str]:
    """Medians and ranges."""
    net = [one.net_s for one in speed.restarts]
    imports = [one.import_torch_s for one in speed.restarts]
    exact = "all exact" if all(one.exact for one in speed.restarts) else "not all exact"
    return [
        f"{len(net)} restarts from a state of {speed.state_bytes / 1e6:.0f} MB, {exact}",
        f"process start to training {speed.net_s:.2f} s ({min(net):.2f}–{max(net):.2f})",
        f"and importing torch        {statistics.median(imports):.2f} s ({min(imports):.2f}–{max(imports):.2f})",
    ]


CASE: Final = Case(spec=RestartBench, run=run, lines=to_lines, document=to_document)
