"""Tensors that several processes hold together, each some rows of them; and plain ones, which one process has whole.

Both are taken alike, so that an optimizer is written once. Torch's part for this is imported only where a tensor is
cut: it takes seconds, and a trainer that died should be back soon.
"""

from __future__ import annotations

import math
from typing import cast

import torch


def is_cut(tensor: torch.Tensor) -> bool:
    """True if other processes hold the rest of this tensor."""
    return hasattr(tensor, "to_local")


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this process holds, live. No collective."""
    return cast(torch.Tensor, tensor.to_local()) if is_cut(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows, in every process; of a plain tensor itself. A collective."""
    return cast(torch.Tensor, tensor.full_tensor()) if is_cut(tensor) else tensor  # type: ignore[attr-defined]


def own_rows_of(everything: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Those rows of `everything`, which all processes have alike, that this one holds of `like`. No collective."""
    return own_rows(_cut(everything, like, source=None)) if is_cut(like) else everything


def first_row(tensor: torch.Tensor) -> int:
    """Number of the first of the rows that this process holds. No collective."""
    if not is_cut(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    each = -(-len(tensor) // int(mesh.size()))  # as torch.chunk deals them
    return min(len(tensor), int(mesh.get_local_rank()) * each)


def zeros_beside(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, (rows of `tensor`, *shape), cut as `tensor` is. No collective."""
    own = torch.zeros((len(own_rows(tensor)), *shape), dtype=dtype, device=tensor.device)
    if not is_cut(tensor):
        return own
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    size = torch.Size((len(tensor), *shape))
    return DTensor.from_local(
        own,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=size,
        stride=tuple(math.prod(size[axis + 1 :]) for axis in range(len(size))),
    )


def put(everything: torch.Tensor | None, into: torch.Tensor) -> None:
    """Write what rank 0 has whole into a tensor of every process; the others pass None. A collective."""
    own = own_rows(into)
    if not is_cut(into):
        if everything is not None:
            own.copy_(everything)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(own, src=0)
        return
    given = torch.empty(into.shape, dtype=into.dtype) if everything is None else everything
    own.copy_(own_rows(_cut(given.to(own.device, into.dtype), into, source=0)))


def _cut(everything: torch.Tensor, like: torch.Tensor, *, source: int | None) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(everything, like.device_mesh, like.placements, src_data_rank=source)
