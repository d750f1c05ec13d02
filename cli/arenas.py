"""Number of arenas that the C library keeps for the memory of a node's threads."""

from __future__ import annotations

import ctypes
import os

ARENAS = 2
VARIABLE = "MALLOC_ARENA_MAX"
"""Of glibc's own; who sets it knows better."""
_M_ARENA_MAX = -8  # <malloc.h>


def share_arenas() -> None:
    """Have all threads of this process allocate from ARENAS arenas, where the C library is glibc; before there are any.

    Left alone it gives each thread an arena of its own, up to eight for a processor, and what a thread frees stays in
    its arena. Threads come and go here, so each arena would in time hold what the busiest of them ever needed. Nothing
    is lost by sharing: Python's threads take turns, and allocate almost only in theirs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and VARIABLE not in os.environ:
        mallopt(_M_ARENA_MAX, ARENAS)
