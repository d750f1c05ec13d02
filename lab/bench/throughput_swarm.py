"""The same nodes as a swarm: real daemons on loopback, as `shoal run` starts them, and what their logs say of it.

They are not in test mode, which would write every round to the disk, and nothing holds them up. Measured are the rounds
after those that warm up; what a node did for a round is what it made since its contribution to the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from shoal.lab.bench.throughput_nodes import Nodes, stretch_of
from shoal.lab.bench.throughput_spec import WARM_UP_ROUNDS, CpuShare, Stretch, ThroughputBench, Together
from shoal.node.reporting.events import Certified, Contributed
from shoal.protocol.errors import NetworkError
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, node_command

TIMEOUT: Final = 10.0
"""So many times what its steps take alone a round may take, and `ROUND_S` more."""
ROUND_S: Final = 60.0


async def run_together(bench: ThroughputBench, folder: Path, *, step_s: float) -> Together:
    """Measure the swarm, in an empty folder. step_s: how long a step takes without it.

    Raises ConfigError, NetworkError (it did not get through it), alone or in groups.
    Cancellation: all processes are killed and reaped.
    """

    def command(launch: Launch) -> list[str]:
        line = node_command(launch)
        line.remove("--test-mode")
        line[line.index("--threads") + 1] = str(bench.threads)
        return [*line, "--device", bench.device_of(int(launch.data_dir.name)), "--log-level", "warning"]

    swarm = Nodes(bench, folder, command)
    round_s = TIMEOUT * step_s * swarm.round_steps + ROUND_S
    async with swarm.running(joined=True):
        await swarm.until(
            lambda: _common_rounds(swarm.journal, bench.nodes) >= WARM_UP_ROUNDS,
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
    """What the logs say of these rounds. Raises NetworkError where a node contributed to none of them."""
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


def _common_rounds(journal: Journal, nodes: int) -> int:
    """How many rounds every node has certified that had contributions of all."""
    return min(sum(event.contributors == nodes for event in journal.of(Certified, node)) for node in range(nodes))


def _is_through(journal: Journal, node: int, round: int) -> bool:
    """Whether the node has certified that round and contributed to it, or a later one where it missed some."""
    kinds: tuple[type[Certified | Contributed], ...] = (Certified, Contributed)
    return all(any(event.round >= round for event in journal.of(kind, node)) for kind in kinds)
