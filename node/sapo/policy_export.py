"""The export of what a node that shares rollouts has learnt: its policy as safetensors, and in its own format.

The trained parameters go to `model.safetensors` under the names that the policy's module has for them, which
`safetensors.torch.load_file` reads; of a model with adapters these are the adapters alone. A policy with a format of
its own writes that beside it, whole: a causal language model the layout of Hugging Face.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from shoal.node.sapo.learner_state import restore_values, saved_files, tensor_bytes
from shoal.node.sapo.policies import PolicyLimits, load_policy
from shoal.node.sapo.policy import Policy, trained_parameters
from shoal.node.state.checkpoint_export import MODEL
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import TensorFile, write_tensors
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest

AGENT_FOLDER = Path("rollouts") / "agent"
"""In a node's data folder: the files of `learner_state`."""


@runtime_checkable
class ExportingPolicy(Protocol):
    """A policy that has a format of its own for a trained model, which engines read."""

    def export(self, folder: Path) -> None:
        """Write the model into `folder`/huggingface, in the layout of Hugging Face."""


def export_policy(
    folder: Path, manifest: Manifest, out: Path, *, data: str | None = None, force: bool = False
) -> tuple[Path, int, bool]:
    """Write the newest policy of the node on the data folder `folder` into `out`.

    data: what the policy reads, as `shoal run` has it. Returns the file of tensors, how many rounds were made, and
    whether there is a format of the policy's own beside it. Raises ConfigError, StorageError.
    """
    target = out / MODEL
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; choose another --out, or replace it with --force")
    if not saved_files(folder / AGENT_FOLDER):
        raise ConfigError(f"{folder} has no policy yet; give the --data-dir of a node that has made rounds")
    policy = build_policy(manifest, data=data)
    round = restore_values(policy, folder / AGENT_FOLDER, policy_name=manifest.workload.name)
    with disk_errors(out, option="--out"):
        out.mkdir(parents=True, exist_ok=True)
    tensors = [tensor_bytes(name, parameter) for name, parameter in trained_parameters(policy).items()]
    write_tensors(target, tensors, {"format": "pt", "round": str(round)}, option="--out")
    return target, round, _export_own_format(policy, out)


def export_averaged(model_file: Path, manifest: Manifest, *, data: str | None = None) -> bool:
    """Write the policy's own format beside a file of certified parameters; False if it has none. Raises ConfigError."""
    policy = build_policy(manifest, data=data)
    parameters, file = trained_parameters(policy), TensorFile(model_file)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if {name: file.array(name).shape for name in file.names} != shapes:
        raise ConfigError("the policy has other parameters than the checkpoint; install the version that was trained")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(file.array(name).copy()))
    return _export_own_format(policy, model_file.parent)


def build_policy(manifest: Manifest, *, data: str | None) -> Policy:
    """The manifest's policy on the CPU, in its initial state. Raises ConfigError."""
    section = manifest.rollouts
    if section is None:
        raise ConfigError(
            "this swarm shares no rollouts, so it has no policy; give a manifest with a section [rollouts]"
        )
    workload = manifest.workload
    limits = PolicyLimits.of(section, seed=workload.seed, device="cpu", data=data)
    return load_policy(workload.name, workload.options).build(limits)


def _export_own_format(policy: Policy, folder: Path) -> bool:
    if not isinstance(policy, ExportingPolicy):
        return False
    policy.export(folder)
    return True
