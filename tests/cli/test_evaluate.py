"""`shoal evaluate` refuses what it cannot measure; what it measures is compared with nodes' own in `test_daemon.py`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.node.state import checkpoint_export
from shoal.node.workloads import harness
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.manifest import render_manifest
from tests.cli.test_verify import damage
from tests.node.checkpoint_lab import manifest_of, new_ledger


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return new_ledger().checkpoint(tmp_path, 2)


def test_a_state_that_is_not_the_certified_one_is_not_measured(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    assert execute(["evaluate", str(checkpoint)]) == 2
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
