"""`shoal doctor`: whether this machine is fit to be a node, and what helps where it is not."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.imports import importing
from shoal.cli.joining import given_link, manifest_by
from shoal.cli.options import AllowWorkload, AsJson
from shoal.cli.text import in_one_line
from shoal.node.option import HostPort, Option, check_options, parse_host_port
from shoal.node.options import (
    CHECKPOINTS_KEPT,
    DEFAULT_DATA_DIR,
    NETWORK,
    CheckpointKeep,
    Data,
    DataDir,
    Device,
    check_listen,
)
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import load_manifest
from shoal.protocol.swarm_link import parse_link

if TYPE_CHECKING:
    from shoal.node.doctor import Check

LANE_FRAMES = 256
TRIAL_RANGE_S = (1.0, 3600.0)
FETCH_DEADLINE_S = 20.0
"""For the manifest by a link. Less than `shoal run` waits: a swarm that is not there now is a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `shoal doctor`."""

    manifest: Annotated[
        Path | None,
        typer.Argument(
            help="The swarm to join, or its link; -: a link on standard input. Without one the machine alone is "
            "looked at.",
            metavar="[MANIFEST]",
        ),
    ] = None
    data_dir: DataDir = DEFAULT_DATA_DIR
    listen: Annotated[
        tuple[str, ...],
        Option(
            "--listen",
            help="Where the node would listen, like /ip4/0.0.0.0/tcp/4001. Repeatable.",
            panel=NETWORK,
        ),
    ] = ()
    lane_listen: Annotated[
        HostPort | None,
        Option(
            "--lane-listen",
            help="Where it would listen for bulk data.",
            metavar="HOST:PORT",
            panel=NETWORK,
            parse=parse_host_port,
        ),
    ] = None
    device: Device = "auto"
    data: Data = None
    checkpoint_keep: CheckpointKeep = CHECKPOINTS_KEPT
    allow_workload: AllowWorkload = field(default_factory=list)
    trial: Annotated[
        float,
        Option("--trial", help="How long a trial of the workload may take.", metavar="SECONDS"),
    ] = 14.0
    as_json: AsJson = False


def doctor(options: DoctorOptions) -> None:
    """Look at versions, ports, clock, disk, memory, GPU and speed, and say what to do where something is wrong.

    With a manifest also whether this node may join that swarm, and how fast it would train; with a link, as if it
    started with that, and its members are asked for the manifest. Takes some 20 seconds, longer on a busy machine or
    where no member answers. Code that the manifest names is imported only where --allow-workload names it too. Ends
    with exit code 1 if something keeps the node from taking part.
    """
    with importing():
        from shoal.node.doctor import Examination, examine

    check_options(options)
    check_listen(options.listen, "--listen")
    low, high = TRIAL_RANGE_S
    if not low <= options.trial <= high:
        raise ConfigError(f"--trial: {options.trial:g} is not in {low:g}..{high:g} seconds; leave it out for 14")
    text = None if options.manifest is None else given_link(str(options.manifest))
    link = None if text is None else parse_link(text)
    by_link = partial(manifest_by, data_dir=options.data_dir, tell=_tell, within_s=FETCH_DEADLINE_S)
    checks = []
    for check in examine(
        Examination(
            data_dir=options.data_dir,
            manifest=load_manifest(options.manifest) if options.manifest is not None and link is None else None,
            fetch=None if link is None else partial(by_link, link),
            invite=None if link is None else link.invite,
            listen=options.listen,
            lane_listen=options.lane_listen,
            device=options.device,
            data=options.data,
            allowed=tuple(options.allow_workload),
            trial_deadline_s=options.trial,
            checkpoints=options.checkpoint_keep,
            lane=_lane_bytes_per_s,
        )
    ):
        checks.append(check)
        if not options.as_json:
            print_check(check)
    ok = all(check.ok for check in checks)
    if options.as_json:
        typer.echo(to_json(checks))
    else:
        bad = sum(not check.ok for check in checks)
        typer.echo("all is well" if ok else f"{bad} of {len(checks)} checks failed")
    raise typer.Exit(0 if ok else 1)


def print_check(check: Check) -> None:
    """`ok    disk speed: 212 MB/s`, and the remedy below; the word in colour on a terminal."""
    word = "ok  " if check.ok else "FAIL"
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(word, style="green" if check.ok else "bold red", end="  ")
        typer.echo(f"{check.name}: {in_one_line(check.detail)}")
    else:
        typer.echo(f"{word}  {check.name}: {in_one_line(check.detail)}")
    if check.remedy:
        typer.echo(f"      {'→' if not check.ok else 'note:'} {in_one_line(check.remedy)}")


def to_json(checks: list[Check]) -> str:
    """Report as one JSON document."""
    import msgspec

    return msgspec.json.encode({"ok": all(check.ok for check in checks), "checks": checks}).decode()


def _tell(text: str) -> None:
    """Print what is under way, which is no check."""
    typer.echo(in_one_line(text), err=True)


def _lane_bytes_per_s() -> float:
    from shoal.testnet.lane_rate import measure_lane

    return measure_lane(frames=LANE_FRAMES, repetitions=1).encrypted_mb_per_s * 1e6
