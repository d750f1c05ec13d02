"""The ranks of one node in processes of their own, joined by torch.distributed, with the test as their daemon.

A rank is a script that trains between `PRELUDE` and its end; what it notes is in `Ranks.noted`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tests.node.forks import Copy, prepare_copies, start_copy

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0

PRELUDE = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from shoal.node import own_loop
from shoal.node.own_loop import join
from tests.node.loop_ends import StandIn

folder, kind = Path(sys.argv[1]), sys.argv[2]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=size)
own_loop.found_or_started = lambda *args, **settings: StandIn(folder)
noted, parts = {{}}, {{}}


def wrapped(model):
    if kind == "ddp":
        parts.update(model.named_parameters())
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (size,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "parts"))
    for layer in model:
        if kind == "fsdp" and isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts.update(model.named_parameters())
    return model


def whole(model):
    "All values by name, as this rank sees them; nothing of the model is touched, which may have whole parameters."
    values = parts | dict(getattr(model, "module", model).named_buffers())
    every = ((name, v.full_tensor() if hasattr(v, "full_tensor") else v) for name, v in values.items())
    return {{name: value.detach().clone() for name, value in every}}


def note(name, value):
    noted[name] = value
    torch.save(noted, folder / f"noted{{rank}}.new")
    os.replace(folder / f"noted{{rank}}.new", folder / f"noted{{rank}}")

"""


class Ranks:
    """A context: `size` ranks run a script, and are gone after it."""

    def __init__(self, folder: Path, script: str, kind: str, *, size: int = 2) -> None:
        prepare_copies()
        self.folder = folder
        self.ranks: list[Copy] = []
        self._script, self._kind, self._size = script, kind, size

    def __enter__(self) -> Self:
        path = self.folder / "rank.py"
        path.write_text(PRELUDE + self._script)
        command = [sys.executable, str(path), str(self.folder), self._kind]
        for rank in range(self._size):
            settings = {"RANK": str(rank), "WORLD_SIZE": str(self._size), "GLOO_SOCKET_IFNAME": "lo"}
            copy = start_copy(command, self._log(rank), self.folder, settings)
            assert copy is not None
            self.ranks.append(copy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.send_signal(9)
        for rank in self.ranks:
            rank.wait(DEADLINE_S)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def said(self) -> str:
        """What all ranks wrote."""
        return "\n".join(self._log(rank).read_text() for rank in range(len(self.ranks)))

    def ended(self) -> list[int]:
        """Their exit codes, once all have ended."""
        return [rank.wait(DEADLINE_S) for rank in self.ranks]

    def noted(self, name: str) -> list[Any]:
        """What each rank noted under a name."""
        return [torch.load(self.folder / f"noted{rank}")[name] for rank in range(len(self.ranks))]


def flat_of(values: dict[str, torch.Tensor], *, chunk_values: int) -> np.ndarray:
    """The vector of a model: what needs a gradient sorted by name, and floating buffers from a chunk's begin on."""
    buffers = sorted(name for name in values if "running" in name)
    parameters = sorted(values.keys() - set(buffers) - {name for name in values if "num_batches" in name})
    front = np.concatenate([values[name].numpy().reshape(-1) for name in parameters])
    if not buffers:
        return front
    gap = np.zeros(-len(front) % chunk_values, np.float32)
    return np.concatenate([front, gap, *(values[name].numpy().reshape(-1) for name in buffers)])
