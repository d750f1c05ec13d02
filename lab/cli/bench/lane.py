"""`shoal bench lane`: one lane, over sockets alone and within one machine, beside the same sockets in plaintext."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import AsJson
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.testnet.lane_rate import LaneSpeed

REPETITIONS = 9
FRAMES = 2048
LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """What the user asked `shoal bench lane` for."""

    repetitions: Annotated[int, Option("--repetitions", help="Measured turns of all ways; one more warms up.")] = (
        REPETITIONS
    )
    frames: Annotated[int, Option("--frames", help="Frames of 512 KiB in each run.")] = FRAMES
    as_json: AsJson = False


def lane(options: LaneOptions) -> None:
    """Send full frames between two processes, sealed, sealed in memory that both see, and in plaintext, in turn."""
    for name, value in (("--repetitions", options.repetitions), ("--frames", options.frames)):
        if not 1 <= value <= LIMIT:
            raise ConfigError(f"{name} must be 1 to {LIMIT}, not {value}")
    from shoal.testnet.lane_rate import measure_lane

    speed = measure_lane(frames=options.frames, repetitions=options.repetitions)
    typer.echo(to_json(speed) if options.as_json else "\n".join(to_lines(speed)))


def to_json(speed: LaneSpeed) -> str:
    """One document: medians, the rate of every run in the order of measuring, and the ratio of neighbouring runs."""
    return json.dumps(
        {
            "encrypted_mb_per_s": round(speed.encrypted_mb_per_s, 1),
            "shared_mb_per_s": round(speed.shared_mb_per_s, 1),
            "plaintext_mb_per_s": round(speed.plaintext_mb_per_s, 1),
            "encrypted_runs_mb_per_s": [round(rate, 1) for rate in speed.encrypted],
            "shared_runs_mb_per_s": [round(rate, 1) for rate in speed.shared],
            "plaintext_runs_mb_per_s": [round(rate, 1) for rate in speed.plaintext],
            "ratio": round(speed.ratio, 3),
            "shared_ratio": round(speed.shared_ratio, 3),
        }
    )


def to_lines(speed: LaneSpeed) -> list[str]:
    """Medians and ranges."""
    lines = [
        f"{name:<10} {median:.0f} MB/s ({min(runs):.0f}–{max(runs):.0f})"
        for name, median, runs in (
            ("encrypted", speed.encrypted_mb_per_s, speed.encrypted),
            ("shared", speed.shared_mb_per_s, speed.shared),
            ("plaintext", speed.plaintext_mb_per_s, speed.plaintext),
        )
    ]
    return [
        *lines,
        f"{'ratio':<10} {speed.ratio:.2f} over sockets, {speed.shared_ratio:.2f} in shared memory, "
        f"medians of {len(speed.encrypted)} turns",
    ]
