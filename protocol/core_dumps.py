"""Keys stay out of core dumps: a process that crashes, or is made to, writes none with a key in it.

    RLIMIT_CORE 1              no core file, and none for a program that `core_pattern` pipes cores to: of that one
                               value, which is less than any core has, the kernel keeps cores from pipes as well
    coredump_filter 0          where cores are made all the same, nothing of the heap or of stacks is in them

Both hold for what this process starts later, too. `PR_SET_DUMPABLE` would do the same, and would keep processes of this
very user from the memory that lanes share on one machine (`/proc/PID/fd`); `MADV_DONTDUMP` would have to know all
places where a library keeps a copy of a key.

Source: core(5); fs/coredump.c of Linux.
"""

from __future__ import annotations

import contextlib
import resource
from functools import lru_cache
from pathlib import Path

LEAST_CORE_BYTES = 1
FILTER = Path("/proc/self/coredump_filter")


@lru_cache(maxsize=1)
def keep_keys_out() -> None:
    """See above; once for each process, and for good. What the system does not offer is left out."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    wanted = LEAST_CORE_BYTES if hard == resource.RLIM_INFINITY else min(LEAST_CORE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (wanted, hard))
    with contextlib.suppress(OSError):
        FILTER.write_text("0")
