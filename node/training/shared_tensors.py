"""Two float32 vectors that the daemon and its trainer both see: the anchor and the contribution.

They lie in one anonymous file whose descriptor the trainer inherits, so nothing has a name that could be
left behind, and the memory goes when the last of the two processes does. The file exists before its size is
known: only the trainer can build the model and count its parameters. The trainer maps the anchor read-only,
so that no bug of a workload can touch certified state.

Who writes when is settled by messages alone: the daemon writes the anchor before `Apply` and leaves it until
`Applied`; the trainer writes the contribution before `Contribution` and leaves it until the next `Train`. What was read
is given back to the system, for most of a round nobody needs either (`give_back`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
"""Shape (numel,), little-endian float32."""

NUMEL_LIMIT = 1 << 36
"""Values per vector: 256 GiB of float32, more than any host this runs on."""

_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """The two vectors, mapped. They stay valid while referenced, whatever becomes of the descriptor."""

    anchor: Vector
    contribution: Vector


def give_back(vector: Vector) -> None:
    """Give the memory of one of the two back to the system: it reads as zeros until it is written again.

    Where the system cannot, nothing happens. Blocks.
    """
    memory: object = vector.base
    if isinstance(memory, memoryview):
        memory = memory.obj
    if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_REMOVE)


def open_memory() -> int:
    """Return the descriptor of a new, empty, nameless file in memory; the caller closes it."""
    if sys.platform == "linux":
        return os.memfd_create("shoal-trainer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def create(descriptor: int, numel: int) -> SharedTensors:
    """Size the file for two vectors of `numel` zeros and map both for writing: the daemon's side."""
    os.ftruncate(descriptor, 2 * _stride_bytes(numel))
    return SharedTensors(
        anchor=_map(descriptor, numel, place=0, writable=True),
        contribution=_map(descriptor, numel, place=1, writable=True),
    )


def attach(descriptor: int, numel: int) -> SharedTensors:
    """Map a file that `create` has sized, the anchor read-only: the trainer's side."""
    return SharedTensors(
        anchor=_map(descriptor, numel, place=0, writable=False),
        contribution=_map(descriptor, numel, place=1, writable=True),
    )


def _stride_bytes(numel: int) -> int:
    """Bytes of one vector, rounded up to where a mapping may begin."""
    if not 0 < numel <= NUMEL_LIMIT:
        raise ValueError(f"{numel} values per vector, expected 1 to {NUMEL_LIMIT}")
    granularity = mmap.ALLOCATIONGRANULARITY
    return -(-numel * _FLOAT32.itemsize // granularity) * granularity


def _map(descriptor: int, numel: int, *, place: int, writable: bool) -> Vector:
    stride = _stride_bytes(numel)
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    memory = mmap.mmap(descriptor, stride, access=access, offset=place * stride)
    return np.frombuffer(memory, dtype=_FLOAT32, count=numel)
