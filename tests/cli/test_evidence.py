"""`shoal evidence`: says what a file proves, and of one that proves nothing why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.protocol.certificate import genesis
from shoal.protocol.evidence import DoubleVote, digest_of, pack
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import load_manifest, render_manifest
from shoal.protocol.messages import VOTE_DOMAIN, step_preimage
from tests.node.lab import assert_one_line, manifest_of
from tests.protocol.lab import plan_hash, value_of

LIAR = Identity.from_seed(bytes([1]) * 32)


def write_evidence(folder: Path) -> tuple[Path, Path]:
    """A manifest, and a file of two votes of its founder."""
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(manifest_of([LIAR.peer_id])))
    base = genesis(load_manifest(manifest).swarm_id, [LIAR.peer_id])
    both = sorted((value_of(base, plan_hash(name), LIAR.peer_id) for name in "ab"), key=lambda value: value.hash)
    signed = [LIAR.sign(VOTE_DOMAIN, step_preimage(0, value.hash)) for value in both]
    values, signatures = (both[0], both[1]), (signed[0], signed[1])
    file = folder / "proof"
    file.write_bytes(pack(DoubleVote(base=base, peer=LIAR.peer_id, view=0, values=values, signatures=signatures)))
    return manifest, file


def test_evidence_that_holds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, file = write_evidence(tmp_path)
    assert execute(["evidence", str(file), "--manifest", str(manifest)]) == 0
    told = capsys.readouterr().out
    assert LIAR.peer_id in told
    assert "two votes in one view" in told
    assert execute(["evidence", str(file), "--manifest", str(manifest), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["peer_id"], document["round"], document["kind"]) == (LIAR.peer_id, 1, "doublevote")
    assert document["digest"] == digest_of(file.read_bytes()).hex()


def test_what_several_files_prove_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, file = write_evidence(tmp_path)
    other = tmp_path / "none\n"
    other.write_bytes(b"no proof")
    assert execute(["evidence", str(file), str(other), str(file), "--manifest", str(manifest), "--json"]) == 1
    out, err = capsys.readouterr()
    first, second, third = json.loads(out)
    assert first == third
    assert (first["file"], first["kind"], second["file"]) == (str(file), "doublevote", str(other))
    assert_one_line(err, second["error"])
    assert execute(["evidence", str(other), "--manifest", str(manifest), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == second


def test_evidence_that_proves_nothing_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, file = write_evidence(tmp_path)
    file.write_bytes(file.read_bytes().replace(LIAR.peer_id.encode(), LIAR.peer_id[::-1].encode()))
    assert execute(["evidence", str(file), "--manifest", str(manifest)]) == 1
    assert_one_line(capsys.readouterr().err, "proves nothing")
    assert execute(["evidence", str(tmp_path / "none"), "--manifest", str(manifest)]) == 2
    assert_one_line(capsys.readouterr().err, "none")
