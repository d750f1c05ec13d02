"""`shoal verify` and `shoal export` from the command line: documents, lines and exit codes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.cli.main import execute
from shoal.collectives.outer import OuterSettings
from shoal.node import workload
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.manifest import render_manifest
from tests.node.checkpoint_lab import LAYOUT, CheckpointLedger, manifest_of, new_ledger
from tests.node.ledger import state_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return new_ledger().checkpoint(tmp_path, 2)


def damage(checkpoint: Path, at: int = -1) -> None:
    path = checkpoint / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_prints_one_document(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["verify", str(checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    digest = new_ledger().chain.value(2).digest.hex()
    assert json.loads(out) == {
        "ok": True,
        "term": "0.0",
        "round": 2,
        "digest": digest,
        "chunks": 6,
        "bad_chunks": [],
        "bad_files": [],
        "swarm": manifest_of().swarm_id.hex(),
        "error": None,
    }
    assert out.count("\n") == 1


def test_verify_of_damage_is_one_document_one_line_and_exit_code_1(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    assert execute(["verify", str(checkpoint), "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["ok"], found["round"], found["bad_chunks"]) == (False, 2, ["momentum/2"])
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert execute(["verify", str(checkpoint)]) == 1
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1] == "6 chunks, bad: momentum/2"


def test_verify_of_a_state_that_covers_its_image_and_was_cut_short_is_one_document_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [dataclasses.replace(state_of(0, layout=LAYOUT.digest), imaged=True)]
    ledger = CheckpointLedger(states=states, outer=OuterSettings(imaged=True))
    ledger.certify(2)
    checkpoint = ledger.checkpoint(tmp_path, 2)
    assert execute(["verify", str(checkpoint), "--json"]) == 0
    whole = (checkpoint / "state.safetensors").read_bytes()
    for lost in (1, 2, 3, 4, 5, len(whole) // 3, len(whole) // 2 + 1, len(whole) - 9, len(whole) - 1, len(whole)):
        (checkpoint / "state.safetensors").write_bytes(whole[: len(whole) - lost])
        capsys.readouterr()
        assert execute(["verify", str(checkpoint), "--json"]) == 1
        out, err = capsys.readouterr()
        assert (json.loads(out)["ok"], out.count("\n")) == (False, 1)
        assert (err.startswith("shoal: "), err.count("\n")) == (True, 1), err


def test_verify_for_people(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["verify", str(checkpoint)]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[0].endswith("…, term 0.0, round 2")
    assert out.splitlines()[-1] == "6 chunks, all as certified"


def test_verify_against_ones_own_manifest(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.toml"
    own.write_text(render_manifest(manifest_of("another")))
    assert execute(["verify", str(checkpoint), "--json", "--manifest", str(own)]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["ok"]
    assert "of another swarm" in err


def test_verify_of_nothing_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["verify", str(tmp_path / "none"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "there is no folder" in err


def test_verify_where_nothing_is_certified_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, toml = tmp_path / "node", tmp_path / "node" / "swarm.toml"
    folder.mkdir(mode=0o700)
    assert execute(["init", "--strategy", "rollouts", "--data-dir", str(folder), "-o", str(toml)]) == 0
    capsys.readouterr()
    assert execute(["verify", str(folder)]) == 2
    assert capsys.readouterr().err == (
        "shoal: with strategy rollouts nothing is certified; `shoal export` checks whether a policy is whole\n"
    )


def test_verify_without_the_manifest_beside_it_does_not_advise_to_found_a_swarm(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "swarm.toml").unlink()
    assert execute(["verify", str(checkpoint)]) == 1
    assert capsys.readouterr().err == (
        f"shoal: there is no {checkpoint / 'swarm.toml'}; put the swarm's manifest there, or use another checkpoint\n"
    )


def test_verify_does_not_import_torch(checkpoint: Path) -> None:
    code = "import sys; from shoal.cli.main import execute; print(execute(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(checkpoint)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_export_refuses_what_is_not_certified(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    assert execute(["export", str(checkpoint), "--out", str(tmp_path / "out")]) == 1
    assert "nothing is exported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["state.safetensors", "chain", "layout.json"])
def test_every_command_that_reads_a_checkpoint_ends_alike_where_a_file_of_it_is_damaged(
    checkpoint: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-3])
    for command in (["verify"], ["export", "--out", str(tmp_path / "out")], ["evaluate"]):
        assert execute([*command, str(checkpoint)]) == 1, command
        assert str(path) in capsys.readouterr().err


class Exporting(RegressionWorkload):
    """Writes a format of its own, of a model that is another than the checkpoint's."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        raise AssertionError("its parameters are looked at before")


def test_export_says_that_the_format_of_the_workload_is_not_beside_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "load_workload", lambda name, options, data: Exporting())
    assert execute(["export", str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"wrote {tmp_path / 'out' / 'model.safetensors'}: round 2, digest ")
    assert err == (
        "shoal: the format of 'regression' is not beside it: the workload builds a model of other parameters than the "
        "checkpoint's; install its version; export again with --force then\n"
    )
