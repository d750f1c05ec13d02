"""Arrays in mappings of their own: what a thread works in between calls, and what goes to disk from where it lies.

Fresh pages cost more than the arithmetic in them, so threads keep their working arrays. Threads come and go all the
same, and what was allocated and freed in the usual way stays in the arena of the C library that the thread had: there
may be eight of those for each processor, and in time each comes to hold a whole thread's arrays that nobody
uses. A mapping is the system's again the moment nobody refers to it. And it begins with a page, as what is written to
disk past the page cache has to (`shoal.node.state.store`).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20
HUGE_BYTES = 16 << 20
"""From so many bytes on an array asks for huge pages."""


def own_array(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(numel,) of `dtype`, in a mapping of its own: zeros, whose pages are taken when they are first written.

    It begins with a page; large ones ask for huge pages, one fault for each of those where ordinary ones take 512.
    """
    size = numel * np.dtype(dtype).itemsize
    whole = 1 if size < HUGE_BYTES else HUGE_PAGE_BYTES  # of a whole number of them the kernel aligns the beginning
    mapping = mmap.mmap(-1, -(-max(size, 1) // whole) * whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE, 0, size - size % HUGE_PAGE_BYTES)
    return np.frombuffer(mapping, dtype, numel)
