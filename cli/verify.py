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
    if strategy is not None and not strategy.certifies:
        what = "a policy" if strategy.shares_rollouts else "a state"
        raise ConfigError(
            f"with strategy {strategy.name} nothing is certified; `shoal export` checks whether {what} is whole"
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


def check_state(folder: Path, expected: Manifest | None, *, nothing: str) -> tuple[Manifest, int, str]:
    """The manifest, round and digest of a state that was checked, in a checkpoint or a data folder.

    It is what the swarm certified; where a swarm certifies none, a node's own that is whole. nothing: what is not done
    otherwise, as `nothing is exported`. Raises ConfigError, and BadCheckpoint where `shoal verify` ends with BAD.
    """
    from shoal.node.gossip.export import check_own_state
    from shoal.node.state.checkpoint_check import BadCheckpoint, check_checkpoint

    toml = folder / "swarm.toml"
    own = load_manifest(toml) if toml.exists() else None
    if own is not None:
        check_same_swarm(own, expected, folder, nothing=nothing)
        if own.strategy.exchanges_models:
            header = check_own_state(folder)
            return own, header.round, header.digest.hex()
    report = check_checkpoint(folder, expected=expected)
    if own is None or report.digest is None or report.round is None or not report.ok:
        raise BadCheckpoint(f"{nothing}: {report.error}")
    return own, report.round, report.digest


def check_same_swarm(own: Manifest, expected: Manifest | None, folder: Path, *, nothing: str) -> None:
    """Raise ConfigError unless a folder is of the swarm that is expected, if any is."""
    if expected is not None and own.swarm_id != expected.swarm_id:
        raise ConfigError(f"{nothing}: {folder} is of another swarm than --manifest; give that one's manifest")


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
