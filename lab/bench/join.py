"""`shoal bench join`: how soon a newcomer has a swarm's state, beside what one lane carries, and what it costs donors.

    founders ─► round 1 ─► all stand in round 2 ─► a newcomer links ─► it stands in round 2, too ─► it goes; the next

Real nodes as a user starts them, on one machine, with no memory in common, and with updates that are made up
(`synthetic`). Newcomers come one after the other, each with an empty folder; the first of them warms up. A state is two
vectors of four bytes a parameter.

    seconds            from when a newcomer is linked and has its model until it begins the round, on the state
    lane               one lane between two processes that do nothing else, as `shoal bench lane` has it
    donor_rate_ratio   what serving CAP_MB_PER_S leaves a donor of a core, by the processor time of founders' daemons
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.swarm import START_DEADLINE_S, BenchSpec, BenchSwarm, check_memory, running_swarm
from shoal.lab.case import Case, Spec
from shoal.lab.fleet import cpu_s, end
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.events import Linked, RoundStarted, TrainerStarted
from shoal.testnet.lane_rate import measure_lane

STATE_BYTES_PER_VALUE: Final = 8
CAP_MB_PER_S: Final = 100.0
LANE_FRAMES, LANE_REPETITIONS = 512, 3
READY: Final = (Linked, TrainerStarted)

DONORS: Final = Target(name="a core that serves 100 MB/s, left to training", unit="× the core", least=0.9)
LANES: Final = Target(name="a verified state", unit="× the rate of one lane")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBench(Spec):
    """Options of `shoal bench join`."""

    state_mb: Annotated[
        int, Option("--state-mb", help="Size of the state: 8 bytes per parameter.", check=Within(1, 16_000))
    ] = 1000
    donors: Annotated[int, Option("--donors", help="Founders, who serve it.", check=Within(1, 16))] = 3
    repetitions: Annotated[
        int, Option("--repetitions", help="Newcomers, one after the other; one more warms up.", check=Within(1, 100))
    ] = 3

    @property
    def swarm(self) -> BenchSpec:
        """Swarm of the donors."""
        numel = self.state_mb * 1_000_000 // STATE_BYTES_PER_VALUE
        return BenchSpec(peers=self.donors, numel=numel, codec="int8", rounds=1, sockets=True)


class Joined(NamedTuple):
    """Seconds that a newcomer took, and processor time of all donors meanwhile, in seconds."""

    seconds: float
    donors_cpu_s: float


class JoinSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the newcomers. Rates are of the state's bytes, in MB/s (10^6 bytes), of all donors together."""

    state_mb: int
    donors: int
    seconds: float
    mb_per_s: float
    lane_mb_per_s: float
    lane_ratio: float
    donor_cpu_s_per_gb: float
    donor_rate_ratio: float
    runs_s: tuple[float, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return LANES.row(self.lane_ratio), DONORS.row(self.donor_rate_ratio)


def speed_of(bench: JoinBench, joined: Sequence[Joined], lane_mb_per_s: float) -> JoinSpeed:
    """Sum up what newcomers took."""
    seconds = statistics.median(one.seconds for one in joined)
    cpu_s_per_gb = statistics.median(one.donors_cpu_s for one in joined) / bench.state_mb * 1000
    return JoinSpeed(
        state_mb=bench.state_mb,
        donors=bench.donors,
        seconds=round(seconds, 4),
        mb_per_s=round(bench.state_mb / seconds, 1),
        lane_mb_per_s=round(lane_mb_per_s, 1),
        lane_ratio=round(bench.state_mb / seconds / lane_mb_per_s, 3),
        donor_cpu_s_per_gb=round(cpu_s_per_gb, 3),
        donor_rate_ratio=round(1 - cpu_s_per_gb * CAP_MB_PER_S / 1000, 3),
        runs_s=tuple(round(one.seconds, 4) for one in joined),
    )


def run(bench: JoinBench, tell: ShowNow) -> JoinSpeed:
    """Let newcomers fetch the state of real nodes, one after the other, beside what one lane carries."""
    check_memory(replace(bench.swarm, peers=bench.donors + 1), psutil.virtual_memory().available)
    with TemporaryDirectory(prefix="shoal-bench-join-") as folder:
        joined = trio.run(_measure, bench, Path(folder), tell)
    lane = measure_lane(frames=LANE_FRAMES, repetitions=LANE_REPETITIONS)
    return speed_of(bench, joined, lane.encrypted_mb_per_s)


async def _measure(bench: JoinBench, folder: Path, tell: ShowNow) -> list[Joined]:
    async with running_swarm(bench.swarm, folder) as swarm:
        await swarm.play(1)
        joined = []
        for number in range(bench.repetitions + 1):
            tell(f"newcomer {number} of {bench.repetitions}", number / (bench.repetitions + 1))
            joined.append(await _join(swarm, bench.donors + number))
        return joined[1:]


async def _join(swarm: BenchSwarm, index: int) -> Joined:
    donors = swarm.nodes[: swarm.spec.peers]
    newcomer, journal = swarm.add(index), swarm.journal
    await swarm.launch(newcomer, join=tuple(address for donor in donors for address in donor.addresses))
    await swarm.until(
        lambda: all(journal.of(kind, index) for kind in READY),
        "the newcomer is linked and has its model",
        START_DEADLINE_S + swarm.spec.round_deadline_s,
    )
    processes = [psutil.Process(donor.lives[-1].pid) for donor in donors]
    before = cpu_s(processes)
    await swarm.until(
        lambda: bool(journal.of(RoundStarted, index)), "the newcomer has the state", swarm.spec.round_deadline_s
    )
    spent = cpu_s(processes) - before
    seconds = journal.of(RoundStarted, index)[0].at - max(journal.of(kind, index)[0].at for kind in READY)
    await end(newcomer)
    return Joined(seconds, spent)


CASE: Final = Case(spec=JoinBench, run=run)
