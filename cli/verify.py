"""`shoal verify`: whether a checkpoint is what the swarm certified, from the founders to the last chunk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import AsJson
from shoal.cli.text import count, in_one_line
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest, load_manifest

if TYPE_CHECKING:
    from shoal.node.state.checkpoint_check import CheckpointReport

BAD = 1
SHOWN_CHUNKS = 8

CheckpointDir = Annotated[
    Path,
    typer.Argument(
        help="A folder of a node's checkpoints/, or its --data-dir for the newest state there.",
        metavar="CHECKPOINT_DIR",
    ),
]
ExpectedManifest = Annotated[
    Path | None,
    Option("--manifest", help="The swarm that it should be of; without, whichever it says it is.", metavar="FILE"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `shoal verify`."""

    checkpoint: CheckpointDir
    manifest: ExpectedManifest = None
    as_json: AsJson = False


def verify(options: VerifyOptions) -> None:
    """Check the certificates from the founders on, and every chunk of the state against them."""
    from shoal.node.state.checkpoint_check import check_checkpoint

    toml = options.checkpoint / "swarm.toml"
    strategy = load_manifest(toml).strategy if toml.exists() else None
    if strategy is not None and strategy.exchanges_models:
        raise ConfigError(
            f"with strategy {strategy.name} nothing is certified; `shoal export` checks whether a state is whole"
        )
    report = check_checkpoint(options.checkpoint, expected=expected_manifest(options.manifest))
    if options.as_json:
        typer.echo(to_json(report))
    else:
        for line in to_lines(report):
            typer.echo(line)
    if report.error is not None:
        typer.echo(f"shoal: {in_one_line(report.error)}", err=True)
        raise typer.Exit(BAD)


def expected_manifest(path: Path | None) -> Manifest | None:
    """The user's own manifest, if one was given. Raises ConfigError."""
    return None if path is None else load_manifest(path)


def to_json(report: CheckpointReport) -> str:
    """Report as one JSON document."""
    return json.dumps(
        {
            "ok": report.ok,
            "term": report.term,
            "round": report.round,
            "digest": report.digest,
            "chunks": report.chunks,
            "bad_chunks": list(report.bad_chunks),
            "bad_files": list(report.bad_files),
            "swarm": report.swarm,
            "error": report.error,
        }
    )


def to_lines(report: CheckpointReport) -> list[str]:
    """Findings of the check, as far as it came."""
    lines = []
    if report.round is not None:
        lines.append(f"swarm {str(report.swarm)[:16]}…, term {report.term}, round {report.round}")
        lines.append(f"digest {report.digest}")
    if report.chunks:
        bad = ", ".join(report.bad_chunks[:SHOWN_CHUNKS]) + (", …" if len(report.bad_chunks) > SHOWN_CHUNKS else "")
        lines.append(f"{count(report.chunks, 'chunk')}, " + (f"bad: {bad}" if bad else "all as certified"))
    return lines
