"""Limit on the files that a node may have open: each peer takes some, and each one that waits takes one."""

from __future__ import annotations

import contextlib
import resource

FILES = 16384


def allow_files() -> None:
    """Raise this process's soft limit to FILES, or as far as its hard limit goes. It is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a bound of its own below what it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
