"""The inner loops of some nodes side by side on this machine, with nobody to exchange anything with.

They train on and on. Measured are, of each, the stretches that began when all had warmed up: as many as rounds are
measured of the swarm, and more where these are over in no time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from shoal.lab.bench.throughput_loop import DEVICE
from shoal.lab.bench.throughput_nodes import Nodes, stretch_of
from shoal.lab.bench.throughput_spec import WARM_UP_ROUNDS, Alone, ThroughputBench
from shoal.node.reporting.events import Contributed
from shoal.testnet.nodes import Launch

LEAST_S: Final = 1.0
"""Of warming up, and of measuring: a shorter look shows chance."""
STEP_DEADLINE_S: Final = 120.0


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
    """Those stretches that were begun at `moment` or later."""
    return [event for event in made if event.at - event.wall_s >= moment]


def enough(made: list[Contributed], rounds: int) -> bool:
    """Whether these say something: so many stretches, and so long."""
    return len(made) >= rounds and sum(event.wall_s for event in made) >= LEAST_S
