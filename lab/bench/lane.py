"""`shoal bench lane`: one lane, over sockets alone and within one machine, beside the same sockets in plaintext."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, Spec
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within
from shoal.testnet.lane_rate import LaneSpeed, measure_lane

SHARED: Final = Target(name="one encrypted lane beside plaintext", unit="× plaintext's rate", least=0.8)
SOCKETS: Final = Target(name="one encrypted lane, sockets beside plaintext", unit="× plaintext's rate", least=0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBench(Spec):
    """Options of `shoal bench lane`."""

    repetitions: Annotated[
        int, Option("--repetitions", help="Measured turns of all ways; one more warms up.", check=Within(1, 10_000))
    ] = 9
    frames: Annotated[int, Option("--frames", help="Frames of 512 KiB in each run.", check=Within(1, 10_000))] = 2048


def run(bench: LaneBench, tell: ShowNow) -> LaneSpeed:
    """Send full frames between two processes, sealed, sealed in memory that both see, and in plaintext, in turn."""
    return measure_lane(frames=bench.frames, repetitions=bench.repetitions)


def to_document(speed: LaneSpeed) -> dict[str, object]:
    """Return medians, the rate of every run in the order of measuring, and the ratio of neighbouring runs."""
    return {
        "encrypted_mb_per_s": round(speed.encrypted_mb_per_s, 1),
        "shared_mb_per_s": round(speed.shared_mb_per_s, 1),
        "plaintext_mb_per_s": round(speed.plaintext_mb_per_s, 1),
        "encrypted_runs_mb_per_s": [round(rate, 1) for rate in speed.encrypted],
        "shared_runs_mb_per_s": [round(rate, 1) for rate in speed.shared],
        "plaintext_runs_mb_per_s": [round(rate, 1) for rate in speed.plaintext],
        "ratio": round(statistics.median(speed.ratios), 3),
        "shared_ratio": round(statistics.median(speed.shared_ratios), 3),
    }


def rows(speed: LaneSpeed) -> tuple[Row, ...]:
    """Measured values, each with its target."""
    return SHARED.row(Spread.of(speed.shared_ratios)), SOCKETS.row(Spread.of(speed.ratios))


CASE: Final = Case(spec=LaneBench, run=run, rows=rows, document=to_document)
