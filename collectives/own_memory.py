"""Memory that a thread keeps between calls, and that goes back to the system when the thread ends.

Fresh pages cost more than the arithmetic in them, so threads keep their working arrays. Threads come and go all the
same, and what was allocated and freed in the usual way stays in the arena of the C library that the thread had: there
may be eight of those for each processor, and in time each comes to hold a whole thread's arrays that nobody
uses. A mapping is the system's again the moment nobody refers to it.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def own_array(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(numel,) of `dtype`, in a mapping of its own: zeros, whose pages are taken when they are first written."""
    size = numel * np.dtype(dtype).itemsize
    mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype, numel)
