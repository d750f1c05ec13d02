"""`shoal evaluate` refuses what it cannot measure; what it measures is compared with nodes' own in `test_daemon.py`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.state import checkpoint_export
from shoal.node.workloads import harness
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.manifest import render_manifest
from tests import manifests
from tests.cli.test_verify import damage
from tests.node.checkpoint_lab import CheckpointLedger, manifest_of, new_ledger


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return new_ledger().checkpoint(tmp_path, 2)


def test_a_state_that_is_not_the_certified_one_is_not_measured(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    assert execute(["evaluate", str(checkpoint)]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("shoal: nothing is evaluated: ")


def test_a_state_of_another_swarm_is_not_measured(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(render_manifest(manifest_of()).replace('name = "', 'name = "another-', 1))
    assert execute(["evaluate", str(checkpoint), "--manifest", str(other)]) == 2
    assert capsys.readouterr().err.startswith("shoal: nothing is evaluated: ")


def test_a_model_of_other_parameters_is_not_filled_with_these(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["evaluate", str(checkpoint)]) == 2
    assert capsys.readouterr().err == (
        "shoal: the workload builds a model of other parameters than the checkpoint's; install its version\n"
    )


def test_loss_has_the_digits_that_matter(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_export, "evaluate_by_workload", lambda *given, **more: 0.00045670237)
    assert execute(["evaluate", str(checkpoint)]) == 0
    assert capsys.readouterr().out.startswith("0.0004567 mean squared error: round 2, digest ")


def test_loss_that_is_no_number_is_null_in_the_document(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_export, "evaluate_by_workload", lambda *given, **more: float("nan"))
    assert execute(["evaluate", str(checkpoint), "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["round"], told["metric"], told["loss"]) == (2, "mean squared error", None)


def checkpoint_of(folder: Path, workload: str) -> Path:
    founders = list(manifest_of().swarm.founders)
    manifest = manifests.manifest_of(
        founders, {"workload": {"name": workload}, "round": {"chunk_values": 4096}}, name="swarm", admission="open"
    )
    ledger = CheckpointLedger(manifest=manifest)
    ledger.certify(3)
    return ledger.checkpoint(folder, 2)


def test_loop_of_ones_own_measures_its_loss_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint_of(tmp_path, OWN_LOOP)
    assert execute(["evaluate", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"shoal: {folder} is of a swarm of its users' own loops, which measure their held-out loss themselves; "
        "`shoal status` shows it, and `shoal export` writes the model\n"
    )


@pytest.mark.parametrize("by", ["folder", "data_dir", "checkpoint"])
def test_code_that_this_user_founded_the_swarm_with_needs_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    folder, data_dir = checkpoint_of(tmp_path, "nowhere:Shapes"), tmp_path / "data"
    evaluate = ["evaluate", str(folder), "--data-dir", str(data_dir)]
    assert execute(evaluate) == 2
    assert "pass --allow-workload nowhere:Shapes" in capsys.readouterr().err
    founder = {"folder": folder, "data_dir": data_dir, "checkpoint": folder.resolve().parent.parent}[by]
    monkeypatch.setattr("shoal.node.founded.founded_here", lambda manifest, folder: folder == founder)
    assert execute(evaluate) == 2
    assert "nowhere" in (told := capsys.readouterr().err)
    assert "--allow-workload" not in told


def test_without_a_folder_it_is_the_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["evaluate", "--data-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"shoal: there is no folder {tmp_path / 'none'}; ")


def test_task_is_measured_where_the_harness_is_and_the_state_is_a_language_models(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "fish.yaml"
    evaluate = ["evaluate", str(checkpoint), "--task", str(task)]
    assert execute(evaluate) == 2
    assert capsys.readouterr().err == f"shoal: --task: there is no {task}; check the path\n"
    task.write_text("task: fish\n")
    refused = (
        "shoal: --task: workload 'regression' writes no model of transformers, as 'causal-lm' does; leave --task out "
        "for its held-out loss\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert execute(evaluate) == 2
    assert capsys.readouterr().err == refused, "what to install would be of no use"
    monkeypatch.undo()
    monkeypatch.setattr(RegressionWorkload, "export", lambda workload, model, folder: None, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    assert execute(evaluate) == 2
    assert capsys.readouterr().err == "shoal: --task lacks accelerate here: pip install lm-eval 'shoal[hf]'\n"
    monkeypatch.setattr(harness, "check_harness", lambda: None)
    monkeypatch.setattr(checkpoint_export, "export_by_workload", lambda workload, manifest, model: True)
    assert execute(evaluate) == 2
    assert capsys.readouterr().err == refused, "it writes something else"
    assert [path.name for path in Path(tempfile.gettempdir()).glob("shoal-evaluate-*")] == []
