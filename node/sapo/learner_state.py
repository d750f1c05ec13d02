"""The files of what an agent knows: policy, optimizer and the next round, in one safetensors file each.

    <folder>/<next round>.safetensors    tensors `policy.<n>`, `<moment>.<n>` for the n-th trained parameter;
                                         metadata `agent`: the fields of `Progress` as JSON

A file is written beside its place and moved there, and its hash is checked when it is read: one that a crash or a disk
has damaged is passed over for the one before it. Parameters that are not trained are not in it: they follow from the
policy's name, options and seed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch

from shoal.node.sapo.learner import Learner
from shoal.node.sapo.policy import Policy, trained_parameters
from shoal.node.sapo.policy_optimizer import has_moments
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.protocol.errors import StorageError
from shoal.protocol.folders import make_folder

KEPT_FILES = 2
METADATA = "agent"
_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.safetensors")


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """round: the next one. shapes: of the trained parameters, in their order. moments: names, none before a step."""

    round: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    policy: str
    shapes: tuple[tuple[int, ...], ...]
    moments: tuple[str, ...]


def save(learner: Learner, folder: Path, *, policy: str) -> None:
    """Write what `learner` knows between two rounds; only the newest KEPT_FILES files remain. Raises StorageError."""
    parameters = _parameters(learner)
    state = learner.optimizer.state_dict()["state"]
    moments = tuple(sorted({moment for kept in state.values() for moment in kept}))
    tensors = [tensor_bytes(f"policy.{at}", parameter) for at, parameter in enumerate(parameters)]
    tensors += [
        tensor_bytes(f"{moment}.{at}", value) for at in sorted(state) for moment, value in sorted(state[at].items())
    ]
    progress = Progress(
        round=learner.round,
        policy=policy,
        shapes=tuple(tuple(parameter.shape) for parameter in parameters),
        moments=moments,
    )
    with disk_errors(folder):
        make_folder(folder)
    metadata = {METADATA: msgspec.json.encode(progress).decode()}
    write_tensors(folder / f"{learner.round}.safetensors", tensors, metadata)
    with disk_errors(folder):
        for path in (*saved_files(folder)[KEPT_FILES:], *folder.glob("*.partial")):  # which nobody lived to write
            path.unlink(missing_ok=True)


def restore(learner: Learner, folder: Path, *, policy: str) -> tuple[int | None, list[str]]:
    """Let `learner` go on from the newest file that is whole and of this policy.

    Returns the file's round, None if there is none such, and why newer ones were passed over.
    """
    return _newest(folder, lambda file: _take_over(learner, file, policy))


def restore_values(policy: Policy, folder: Path, *, policy_name: str) -> int:
    """Give `policy` the parameters of the newest file that is whole, and return the round of that.

    Raises DamagedFile if there is none that is whole and of this policy.
    """
    parameters = trained_parameters(policy).values()

    def take_over(file: TensorFile) -> int:
        progress, values = _read_values(file, parameters, policy_name)
        _give(parameters, values)
        return progress.round

    round, refused = _newest(folder, take_over)
    if round is None:
        raise DamagedFile("; ".join(refused) or f"{folder} has no file of a policy; give the folder of another node")
    return round


def saved_files(folder: Path) -> list[Path]:
    """The files in `folder`, the newest first."""
    found = [path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


def _newest(folder: Path, take_over: Callable[[TensorFile], int]) -> tuple[int | None, list[str]]:
    """Take over the newest file that can be; return its round, None if there is none, and why others could not be."""
    refused: list[str] = []
    for path in saved_files(folder):
        try:
            return take_over(TensorFile(path)), refused
        except (StorageError, FileNotFoundError) as error:
            refused.append(str(error))
    return None, refused


def _take_over(learner: Learner, file: TensorFile, policy: str) -> int:
    """Raises DamagedFile, StorageError; the learner is as it was then."""
    parameters = _parameters(learner)
    # All is read before anything is changed.
    names = set(file.names)
    progress, values = _read_values(file, parameters, policy)
    moments = {
        at: {
            moment: _moment(file, f"{moment}.{at}", parameter)
            for moment in progress.moments
            if f"{moment}.{at}" in names
        }
        for at, parameter in enumerate(parameters)
        if progress.moments and has_moments(learner.optimizer, progress.moments)
    }
    _give(parameters, values)
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    learner.round = progress.round
    return progress.round


def _read_values(
    file: TensorFile, parameters: Collection[torch.nn.Parameter], policy: str
) -> tuple[Progress, list[torch.Tensor]]:
    """Read what the file says of itself, and its values of these parameters. Raises DamagedFile, StorageError."""
    file.check_whole()
    try:
        progress = msgspec.json.decode(file.metadata.get(METADATA, ""), type=Progress)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"{file.path} is not an agent's: {error}; remove it to begin anew") from error
    if progress.policy != policy or progress.shapes != tuple(tuple(parameter.shape) for parameter in parameters):
        raise StorageError(f"{file.path} is of another policy; choose another --data-dir for this one")
    return progress, [_tensor(file, f"policy.{at}", parameter.dtype) for at, parameter in enumerate(parameters)]


@torch.no_grad()
def _give(parameters: Iterable[torch.nn.Parameter], values: Iterable[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _parameters(learner: Learner) -> Sequence[torch.nn.Parameter]:
    """Parameters that are trained, in the optimizer's order."""
    return list(trained_parameters(learner.policy).values())


def tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """A tensor on its way into a file, from any device."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        bits = plain.view(torch.int16).numpy()
        return TensorBytes(name, "BF16", tuple(plain.shape), bits.reshape(-1).view(np.uint8).data)
    # A count has no dimension, and numpy would give it one.
    return dataclasses.replace(TensorBytes.of(name, plain.numpy()), shape=tuple(plain.shape))


def _tensor(file: TensorFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the file's tensor. Raises DamagedFile if it is not there, or of another type."""
    array = file.array(name)
    tensor = torch.from_numpy(np.array(array.view(np.int16) if file.dtype(name) == "BF16" else array))
    if file.dtype(name) == "BF16":
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype is not dtype:
        raise DamagedFile(f"{file.path} holds {name} as {tensor.dtype}, not {dtype}; remove it to begin anew")
    return tensor


def _moment(file: TensorFile, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A moment of a parameter, of its shape and type, or a count, which is one float32."""
    single = file.shape(name) == ()
    tensor = _tensor(file, name, torch.float32 if single else parameter.dtype)
    if not single and tensor.shape != parameter.shape:
        raise DamagedFile(f"{file.path} holds {name} in another shape than its parameter's; remove it to begin anew")
    return tensor
