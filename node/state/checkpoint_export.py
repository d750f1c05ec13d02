"""Exporting and evaluating a checkpoint: its values under their names and in their shapes.

These are the parameters, and the buffers that travel. `safetensors.torch.load_file` reads it anywhere, and the result
fits the `state_dict` of the workload's model, tied parameters under their first name; counters are not in it. A
workload may have a format of its own; that needs its code, and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.node.state.checkpoint_check import CheckpointFiles
from shoal.node.state.checkpoints import LAYOUT, read_layout
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import TensorBytes, TensorFile, write_tensors
from shoal.node.training.trainer_messages import Layout
from shoal.node.workload import ExportingWorkload, Workload
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest

if TYPE_CHECKING:
    import torch

MODEL = "model.safetensors"


def export_model(folder: Path, out: Path, *, digest: str, force: bool = False) -> Path:
    """Write the anchor of the checkpoint in `folder`, which was checked to have `digest`, to `out`/model.safetensors.

    Raises ConfigError if there is such a file already and not `force`, or names and shapes are missing; StorageError.
    """
    files = CheckpointFiles.find(folder)
    target = out / MODEL
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; choose another --out, or replace it with --force")
    layout = read_layout(folder / LAYOUT)
    state = TensorFile(files.state)
    metadata = {key: state.metadata[key] for key in ("rebases", "rollbacks", "round", "tokens")}
    with disk_errors(out, option="--out"):
        out.mkdir(parents=True, exist_ok=True)
    told = {"format": "pt", "shoal_digest": digest, **metadata}
    write_tensors(target, _parameters(layout, state), told, option="--out")
    return target


def _parameters(layout: Layout, state: TensorFile) -> list[TensorBytes]:
    begin, end = state.span("anchor")
    if layout.digest.hex() != state.metadata["layout"] or 4 * layout.numel != end - begin:
        raise ConfigError(f"{state.path.with_name(LAYOUT)} does not fit the state; use another checkpoint")
    places = zip(layout.places().items(), layout.shapes, strict=True)
    return [
        TensorBytes(name, "F32", tuple(shape), state.data[begin + 4 * place.start : begin + 4 * place.stop])
        for (name, place), shape in places
    ]


def export_by_workload(workload: Workload, manifest: Manifest, model_file: Path) -> bool:
    """Have the workload write its own format beside `model_file`; False if it has none.

    Raises ConfigError if its model has other parameters than the checkpoint. Whatever its code raises passes through.
    """
    if not isinstance(workload, ExportingWorkload):
        return False
    file = TensorFile(model_file)
    model = _model_of(workload, manifest, {name: file.array(name) for name in file.names})
    workload.export(model.eval(), model_file.parent)
    return True


def evaluate_by_workload(workload: Workload, manifest: Manifest, folder: Path, *, device: str) -> float:
    """The held-out loss, as the workload measures it, of the state in `folder`, which was checked.

    Raises ConfigError if the workload's model has other parameters. Whatever its code raises passes through.
    """
    import torch

    from shoal.node.training.devices import pick_device

    layout, state = read_layout(folder / LAYOUT), TensorFile(CheckpointFiles.find(folder).state)
    values = {
        tensor.name: np.asarray(tensor.data).view(np.float32).reshape(tensor.shape)
        for tensor in _parameters(layout, state)
    }
    model = _model_of(workload, manifest, values).to(pick_device(device)).eval()
    with torch.no_grad():
        return float(workload.evaluate(model))


def _model_of(workload: Workload, manifest: Manifest, values: Mapping[str, npt.NDArray[np.generic]]) -> torch.nn.Module:
    """The workload's model with these parameters and buffers. Raises ConfigError where its own are others."""
    import torch

    from shoal.node.training.flat_parameters import FlatParameters

    torch.manual_seed(manifest.workload.seed)
    model = workload.build()
    flat = FlatParameters(model)
    shapes = dict(zip(flat.layout.names, flat.layout.shapes, strict=True))
    if {name: array.shape for name, array in values.items()} != shapes:
        raise ConfigError("the workload builds a model of other parameters than the checkpoint's; install its version")
    vector = flat.new_vector()
    for name, place in flat.layout.places().items():
        vector[place].copy_(torch.tensor(values[name]).reshape(-1))
    flat.scatter(vector)
    return model
