"""`shoal evidence`: whether files of evidence prove that somebody lied, and what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson
from shoal.cli.text import in_one_line
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.evidence import EVIDENCE_LIMIT_BYTES, Verdict, describe
from shoal.protocol.manifest import load_manifest

BAD = 1

Files = Annotated[
    list[Path], typer.Argument(help="Files, such as those in `evidence/` of a node's --data-dir.", metavar="FILE…")
]
SwarmManifest = Annotated[Path, Option("--manifest", help="Of the swarm that it is about.", metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions:
    """Options of `shoal evidence`."""

    files: Files
    manifest: SwarmManifest = Path("swarm.toml")
    as_json: AsJson = False


def evidence(options: EvidenceOptions) -> None:
    """Check evidence against a member: signatures, and where it takes that, sums. Needs nothing but the manifest.

    Exit code 1 if one of the files proves nothing. With --json it is an object, of several files a list of them.
    """
    from shoal.collectives.proofs import verify_evidence

    swarm = load_manifest(options.manifest).swarm_id
    found: list[dict[str, object]] = []
    bad = False
    for path in options.files:
        try:
            verdict = verify_evidence(_read(path), swarm)
        except RemoteError as error:
            bad = True
            found.append({"file": str(path), "error": str(error)})
            typer.echo(in_one_line(f"shoal: {path} proves nothing: {error}"), err=True)
        else:
            found.append(_facts(path, verdict))
            if not options.as_json:
                typer.echo(_line(path, verdict))
    if options.as_json:
        typer.echo(json.dumps(found if len(found) > 1 else found[0]))
    if bad:
        raise typer.Exit(BAD)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(EVIDENCE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give files of evidence") from None


def _line(path: Path, verdict: Verdict) -> str:
    term, round = verdict.done
    return in_one_line(f"{path}: {verdict.accused}, round {round} of term {term}: {describe(verdict.kind)}")


def _facts(path: Path, verdict: Verdict) -> dict[str, object]:
    term, round = verdict.done
    return {
        "file": str(path),
        "peer_id": verdict.accused,
        "term": str(term),
        "round": round,
        "kind": verdict.kind,
        "digest": verdict.digest.hex(),
    }
