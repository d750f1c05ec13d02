"""A batch cut into smaller ones along its first dimension, for devices that cannot hold the whole at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import blake3
import torch

from shoal.protocol.errors import ConfigError

_SHARED = (type(None), bool, int, float, str)
"""Types of what goes along with every part of a batch as it is."""


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of the batch, in tuples, lists and dicts, into `count` parts of its rows, as equal as can be.

    Raises ConfigError if that cannot be: no tensors, different numbers of rows, or too few.
    """
    available = _rows(batch, "--accumulate")
    if available < count:
        raise ConfigError(f"--accumulate {count}: the workload's batches have {available} rows; give at most that many")
    return [_part(batch, number, count) for number in range(count)]


def deal_batch(batch: Any, count: int) -> tuple[list[Any], int]:
    """Cut a batch into parts for several processes; returns `count` of them, and how many are to be counted.

    Where the batch has fewer rows than that, the last ones are copies of the first. Raises ConfigError if it cannot be
    cut: no tensors, or different numbers of rows.
    """
    counted = min(count, max(1, _rows(batch, "--processes")))
    parts = [_part(batch, number, counted) for number in range(counted)]
    return parts + parts[:1] * (count - counted), counted


def _rows(batch: Any, option: str) -> int:
    """Number of rows that all tensors of the batch have. option: what asks for cutting it."""
    rows = {len(tensor) if tensor.dim() else 0 for tensor in _tensors(batch, option)}
    if len(rows) != 1:
        what = "no tensors" if not rows else f"tensors of {', '.join(map(str, sorted(rows)))} rows"
        raise ConfigError(f"{option}: the workload's batches hold {what}, so they cannot be split; leave it out")
    return rows.pop()


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, in tuples, lists and dicts; leave everything else alone."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        items = [to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, dict):
        return {key: to_device(item, device) for key, item in batch.items()}
    return batch


def batch_digest(batch: Any) -> bytes:
    """A hash of the values of a batch on the host, by which two of one process are told apart."""
    digest = blake3.blake3()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            add([*item.items()])
        elif isinstance(item, tuple | list):
            for part in item:
                add(part)
        else:
            digest.update(repr(item).encode(errors="replace"))

    add(batch)
    return digest.digest()


def _tensors(batch: Any, option: str) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from _tensors(item, option)
    elif isinstance(batch, dict):
        yield from _tensors(list(batch.values()), option)
    elif not isinstance(batch, _SHARED):
        kind = type(batch).__name__
        raise ConfigError(f"{option}: the workload's batches hold a {kind}, which cannot be split; leave it out")


def _part(batch: Any, number: int, count: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tensor_split(count)[number]
    if isinstance(batch, tuple | list):
        items = [_part(item, number, count) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, dict):
        return {key: _part(item, number, count) for key, item in batch.items()}
    return batch
