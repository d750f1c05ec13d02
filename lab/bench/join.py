"""A newcomer fetches the state from several donors: how fast, beside what the lanes alone would do, and at what cost.

    this process: the joiner, with the lanes, the chunk exchange and the catching up of a node
      ├── N × `join_donor`     each with the whole state in memory, its cache, its state server and its lanes
      └── N × `join_trainer`   in the second part only

Part 1, in turn, REPETITIONS times and once to warm up: the donors send the state's bytes as bare frames over the same
lanes, a share each, which are opened into memory that is used again and not looked at (`lane_mb_per_s`); and a joiner
without anything asks for the header, and fetches, verifies and assembles the state (`seconds`, `mb_per_s`, from
its first request on). Medians are told; what arrives is compared with the state, bit by bit.

Part 2 is `join_training`: the donors' training rate while they serve under a cap (`donor_rate_ratio`).
"""

from __future__ import annotations

import resource
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np
import trio

from shoal.cli.render import ShowNow
from shoal.collectives.state import CertifiedState
from shoal.lab.bench.join_donor import drawn_state
from shoal.lab.bench.join_joiner import JoinBench, bare_errors, joining
from shoal.lab.bench.join_training import training_rate
from shoal.lab.case import Case
from shoal.lab.targets import Row, Target
from shoal.protocol.errors import LocalError

DONORS = Target(name="training of donors that serve under a cap", unit="× their rate undisturbed", least=0.9)
LANES = Target(name="a verified state", unit="× the lanes' rate", least=0.5)


class JoinSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in MB/s (10^6 bytes), of the state's bytes.

    seconds: from the joiner's first request to the state assembled, the median. lane_ratio: its part of the lanes'
    rate, the median over neighbouring runs. extra_mb: by how much more than the state the joiner's memory grew at its
    peak. by_donor: bytes of the last transfer. cpu_s_per_gb, lane_cpu_s_per_gb: processor time of joiner and donors,
    for a state and for as many bare frames.

    Of the second part, None without it: donor_rate_ratio, and donor_wall_ratio by the clock; capped_donors, how many
    trained and served; capped_mb_per_s, what the joiner got of them together, and cap_mb_per_s, what their caps allow;
    capped_cpu_s_per_gb, the processor time of the donors alone.
    """

    state_mb: float
    donors: int
    seconds: float
    mb_per_s: float
    lane_mb_per_s: float
    donor_rate_ratio: float | None
    lane_ratio: float
    runs_mb_per_s: tuple[float, ...]
    lane_runs_mb_per_s: tuple[float, ...]
    donor_wall_ratio: float | None
    capped_donors: int | None
    capped_mb_per_s: float | None
    cap_mb_per_s: float | None
    capped_cpu_s_per_gb: float | None
    cpu_s_per_gb: float
    lane_cpu_s_per_gb: float
    extra_mb: float
    by_donor: tuple[int, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return LANES.row(self.lane_ratio), DONORS.row(self.donor_rate_ratio)


def run(bench: JoinBench, tell: ShowNow) -> JoinSpeed:
    """Fetch a state from several donor processes over loopback, beside bare frames over the same lanes."""
    with TemporaryDirectory(prefix="shoal-bench-join-") as folder, bare_errors():
        speed = trio.run(_measure, bench, Path(folder))
    if not bench.training:
        return speed
    found = training_rate(bench)
    return msgspec.structs.replace(
        speed,
        donor_rate_ratio=found.ratio,
        donor_wall_ratio=found.wall_ratio,
        capped_donors=found.donors,
        capped_mb_per_s=found.served_mb_per_s,
        cap_mb_per_s=found.cap_mb_per_s,
        capped_cpu_s_per_gb=found.cpu_s_per_gb,
    )


async def _measure(bench: JoinBench, folder: Path) -> JoinSpeed:
    lanes, joins, lane_cpu, join_cpu = [], [], [], []
    async with joining(bench, folder, cap=0) as joiner:
        for repetition in range(bench.repetitions + 1):
            cpu = joiner.cpu_s()
            raw = await joiner.receive_raw()
            lane_spent, before = joiner.cpu_s() - cpu, _peak_bytes()
            state, seconds, join_spent = await joiner.join()
            if repetition == 0:
                extra = _peak_bytes() - before - bench.state_bytes
                _check(state, bench)
            else:
                lanes.append(bench.state_bytes / raw / 1e6)
                joins.append(seconds)
                lane_cpu.append(lane_spent / bench.state_bytes * 1e9)
                join_cpu.append(join_spent / bench.state_bytes * 1e9)
            del state
        by_donor = tuple(joiner.catchup.donated.get(peer, 0) for peer in joiner.peers)
    seconds, lane = statistics.median(joins), statistics.median(lanes)
    ratios = [bench.state_bytes / join / 1e6 / lane for join, lane in zip(joins, lanes, strict=True)]
    return JoinSpeed(
        state_mb=bench.state_mb,
        donors=bench.donors,
        seconds=round(seconds, 4),
        mb_per_s=round(bench.state_bytes / seconds / 1e6, 1),
        lane_mb_per_s=round(lane, 1),
        donor_rate_ratio=None,
        lane_ratio=round(statistics.median(ratios), 3),
        runs_mb_per_s=tuple(round(bench.state_bytes / run / 1e6, 1) for run in joins),
        lane_runs_mb_per_s=tuple(round(run, 1) for run in lanes),
        donor_wall_ratio=None,
        capped_donors=None,
        capped_mb_per_s=None,
        cap_mb_per_s=None,
        capped_cpu_s_per_gb=None,
        cpu_s_per_gb=round(statistics.median(join_cpu), 3),
        lane_cpu_s_per_gb=round(statistics.median(lane_cpu), 3),
        extra_mb=round(extra / 1e6, 1),
        by_donor=by_donor,
    )


def _check(state: CertifiedState, bench: JoinBench) -> None:
    """Raises LocalError unless the state is, bit by bit, what the donors drew."""
    want = drawn_state(bench.numel)
    for mine, theirs in ((state.anchor, want.anchor), (state.momentum, want.momentum)):
        if not np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
            raise LocalError("the benchmark's state arrived changed")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CASE: Final = Case(spec=JoinBench, run=run)
