"""`shoal bench checkpoint`, `shoal bench restart`: what a snapshot costs a trainer, how soon a node trains again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.checkpoint import CheckpointSpeed
    from shoal.lab.bench.restart import RestartSpeed

REPETITIONS = 5
REPETITIONS_LIMIT = 1000
STATE_LIMIT_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(CaseOptions):
    """What the user asked `shoal bench checkpoint` for."""

    state_mb: Annotated[int, Option("--state-mb", help="MB (10^6 bytes) of optimizer state in a snapshot.")] = 1000
    repetitions: Annotated[int, Option("--repetitions", help="Measured pairs; one more warms up.")] = REPETITIONS
    folder: Annotated[
        Path | None, Option("--folder", help="Whose disk to write to; by default the temporary folder's.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions(CaseOptions):
    """What the user asked `shoal bench restart` for."""

    state_mb: Annotated[int, Option("--state-mb", help="MB (10^6 bytes) of the certified state on disk.")] = 10
    repetitions: Annotated[int, Option("--repetitions", help="Kills and restarts.")] = REPETITIONS


def _run_checkpoint(options: CheckpointOptions, tell: ShowNow) -> CheckpointSpeed:
    """Take snapshots of a trainer, and copy as many bytes in memory in between."""
    _check("--state-mb", options.state_mb, STATE_LIMIT_MB)
    _check("--repetitions", options.repetitions, REPETITIONS_LIMIT)
    if options.folder is not None and not options.folder.is_dir():
        raise ConfigError(f"--folder: there is no folder {options.folder}")
    from shoal.lab.bench.checkpoint import measure_checkpoint

    return measure_checkpoint(state_mb=options.state_mb, repetitions=options.repetitions, folder=options.folder)


def _run_restart(options: RestartOptions, tell: ShowNow) -> RestartSpeed:
    """Kill a node in the middle of its training, and start it again."""
    _check("--state-mb", options.state_mb, STATE_LIMIT_MB)
    _check("--repetitions", options.repetitions, REPETITIONS_LIMIT)
    from shoal.lab.bench.restart import measure_restart

    return measure_restart(state_mb=options.state_mb, repetitions=options.repetitions)


def _check(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} must be 1 to {limit}, not {value}")


def checkpoint_document(speed: CheckpointSpeed) -> dict[str, object]:
    """Return medians, and every run in the order of measuring."""
    return {
        "state_bytes": speed.state_bytes,
        "blocked_s": round(statistics.median(speed.blocked_s), 6),
        "copy_s": round(statistics.median(speed.copy_s), 6),
        "ratio": round(speed.ratio, 3),
        "write_mb_per_s": round(speed.write_mb_per_s, 1),
        "blocked_runs_s": [round(seconds, 6) for seconds in speed.blocked_s],
        "copy_runs_s": [round(seconds, 6) for seconds in speed.copy_s],
        "write_runs_s": [round(seconds, 6) for seconds in speed.write_s],
    }


def checkpoint_lines(speed: CheckpointSpeed) -> list[str]:
    """Medians and ranges."""
    lines = [
        f"{name:<16} {statistics.median(runs):.4f} s ({min(runs):.4f}–{max(runs):.4f})"
        for name, runs in (
            ("trainer blocked", speed.blocked_s),
            ("one memory copy", speed.copy_s),
            ("written beside", speed.write_s),
        )
    ]
    return [
        f"{speed.state_bytes / 1e6:.0f} MB of optimizer state",
        *lines,
        f"{'ratio':<16} {speed.ratio:.2f} copies, {speed.write_mb_per_s:.0f} MB/s to disk",
    ]


def restart_document(speed: RestartSpeed) -> dict[str, object]:
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


def restart_lines(speed: RestartSpeed) -> list[str]:
    """Medians and ranges."""
    net = [one.net_s for one in speed.restarts]
    imports = [one.import_torch_s for one in speed.restarts]
    exact = "all exact" if all(one.exact for one in speed.restarts) else "not all exact"
    return [
        f"{len(net)} restarts from a state of {speed.state_bytes / 1e6:.0f} MB, {exact}",
        f"process start to training {speed.net_s:.2f} s ({min(net):.2f}–{max(net):.2f})",
        f"and importing torch        {statistics.median(imports):.2f} s ({min(imports):.2f}–{max(imports):.2f})",
    ]


checkpoint: Final = Case(
    spec=CheckpointOptions,
    run=_run_checkpoint,
    lines=checkpoint_lines,
    document=checkpoint_document,
)
restart: Final = Case(spec=RestartOptions, run=_run_restart, lines=restart_lines, document=restart_document)
