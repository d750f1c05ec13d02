"""Exporting: the certified values under their names, loaded by the library that everyone has."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shoal.node.state.checkpoint_export import export_by_workload, export_model
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import Layout
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.errors import ConfigError, StorageError
from tests.node.checkpoint_lab import CheckpointLedger, manifest_of, new_ledger

DIGEST = "ab" * 32


@dataclass(frozen=True)
class Exporting(RegressionWorkload):
    """Keeps its bias beside it, in a format of its own."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        assert not model.training
        (folder / "bias.txt").write_text(" ".join(str(value) for value in model.get_parameter("bias").tolist()))


@pytest.fixture
def ledger() -> CheckpointLedger:
    return new_ledger()


def test_parameters_have_their_names_and_shapes(ledger: CheckpointLedger, tmp_path: Path) -> None:
    model = export_model(ledger.checkpoint(tmp_path, 2), tmp_path / "deep" / "out", digest=DIGEST)
    assert model == tmp_path / "deep" / "out" / "model.safetensors"
    loaded = load_file(model)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {
        "first.weight": (96, 100),
        "last.bias": (400,),
    }
    anchor = ledger.states[2].anchor
    np.testing.assert_array_equal(loaded["first.weight"].numpy().ravel(), anchor[:9600])
    np.testing.assert_array_equal(loaded["last.bias"].numpy(), anchor[9600:])
    with safe_open(model, framework="pt") as file:
        assert file.metadata() | {"blake3": ""} == {
            "format": "pt",
            "round": "2",
            "rebases": "0",
            "rollbacks": "0",
            "tokens": str(ledger.states[2].tokens),
            "shoal_digest": DIGEST,
            "blake3": "",
        }


def test_existing_model_is_kept_unless_told(ledger: CheckpointLedger, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    checkpoint = ledger.checkpoint(tmp_path, 2)
    with pytest.raises(ConfigError, match="exists; choose another --out, or replace it with --force"):
        export_model(checkpoint, tmp_path, digest=DIGEST)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert len(load_file(export_model(checkpoint, tmp_path, digest=DIGEST, force=True))) == 2


def test_model_that_does_not_fit_the_disk_leaves_the_one_before(ledger: CheckpointLedger, tmp_path: Path) -> None:
    checkpoint, out = ledger.checkpoint(tmp_path, 2), tmp_path / "out"
    before = export_model(checkpoint, out, digest=DIGEST).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StorageError, match=r"model\.safetensors was not written: .* choose another --out"):
            export_model(checkpoint, out, digest=DIGEST, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("model.safetensors", before)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(names=("a",), shapes=((10_000,),), numel=10_000),
        Layout(names=("a", "b"), shapes=((-100, -96), (400,)), numel=10_000),
    ],
)
def test_layout_of_another_model_is_refused(ledger: CheckpointLedger, tmp_path: Path, layout: Layout) -> None:
    checkpoint = ledger.checkpoint(tmp_path, 2)
    (checkpoint / "layout.json").write_bytes(msgspec.json.encode(layout))
    with pytest.raises(ConfigError, match=r"layout\.json does not fit the state; use another checkpoint"):
        export_model(checkpoint, tmp_path / "out", digest=DIGEST)


def test_workload_writes_its_own_format_beside_it(tmp_path: Path) -> None:
    trained = RegressionWorkload().build()
    save_file(dict(trained.state_dict()), tmp_path / "model.safetensors")
    assert export_by_workload(Exporting(), manifest_of(), tmp_path / "model.safetensors")
    written = [float(text) for text in (tmp_path / "bias.txt").read_text().split()]
    assert written == trained.get_parameter("bias").tolist()
    assert not export_by_workload(RegressionWorkload(), manifest_of(), tmp_path / "model.safetensors")
    assert FlatParameters(trained).layout.names == ("bias", "weight")


def test_workload_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(4, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="builds a model of other parameters"):
        export_by_workload(Exporting(), manifest_of(), tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(4, 15), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="builds a model of other parameters"):
        export_by_workload(Exporting(), manifest_of(), tmp_path / "model.safetensors")
