"""The float32 vectors that the daemon and its trainer both see: the contribution, and the anchors.

The contribution lies in one anonymous file whose descriptor the trainer inherits, so nothing has a name that could be
left behind, and the memory goes when the last of the two processes does. The file exists before its size is known: only
the trainer can build the model and count its parameters. What was read is given back to the system, for most of a round
nobody needs it (`give_back`).

An anchor is lent: a descriptor of the file that it lies in comes with `Apply`, for reading alone, and the trainer maps
it. So both processes look at the same pages, which the kernel can drop. No bug of a workload can touch certified state:
what the trainer writes to its mapping is a copy of its own.

Who writes when is settled by messages alone: an anchor stays as it is until `Applied` answers the `Apply` after it; the
trainer writes the contribution before `Contribution` and leaves it until the next `Train`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile

import numpy as np
import numpy.typing as npt

from shoal.node.state.file_memory import reader_of

Vector = npt.NDArray[np.float32]
"""Shape (numel,), little-endian float32."""

NUMEL_LIMIT = 1 << 36
"""Values per vector: 256 GiB of float32, more than any host this runs on."""

_FLOAT32 = np.dtype("<f4")


def give_back(vector: Vector) -> None:
    """Give the memory of the contribution back to the system: it reads as zeros until it is written again.

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


def create(descriptor: int, numel: int) -> Vector:
    """Size the file for a contribution of `numel` zeros and map it for writing: the daemon's side."""
    os.ftruncate(descriptor, _size_bytes(numel))
    return attach(descriptor, numel)


def attach(descriptor: int, numel: int) -> Vector:
    """Map the file of a contribution that `create` has sized, for writing."""
    return _map(descriptor, numel, mmap.ACCESS_WRITE)


def lend(anchor: Vector) -> int:
    """Return a descriptor of a file that holds `anchor` from its position on, for reading; the caller closes it.

    It is the file that the anchor lies in; without one a copy in memory. Blocks.
    """
    lies_in = reader_of(anchor)
    if lies_in is not None:
        return lies_in
    copy = open_memory()
    os.ftruncate(copy, _size_bytes(anchor.size))
    np.copyto(_map(copy, anchor.size, mmap.ACCESS_WRITE), anchor)
    return copy


def map_lent(descriptor: int, numel: int) -> Vector:
    """Map an anchor that was lent, and close its descriptor. What is written to it changes nobody else's."""
    try:
        return _map(descriptor, numel, mmap.ACCESS_COPY, os.lseek(descriptor, 0, os.SEEK_CUR))
    finally:
        os.close(descriptor)


def _size_bytes(numel: int) -> int:
    if not 0 < numel <= NUMEL_LIMIT:
        raise ValueError(f"{numel} values per vector, expected 1 to {NUMEL_LIMIT}")
    return numel * _FLOAT32.itemsize


def _map(descriptor: int, numel: int, access: int, begin: int = 0) -> Vector:
    return np.frombuffer(mmap.mmap(descriptor, _size_bytes(numel), access=access, offset=begin), dtype=_FLOAT32)
