"""For tests of what a crash leaves behind: whether it does here, and a process that is dumped whole."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

from shoal.protocol.key_file import FILTER

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
EVERYTHING = "0x7f"


def leaves_cores() -> bool:
    """Whether a process that crashes may leave a core in the folder where it runs."""
    if not FILTER.exists() or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        return False
    return CORE_PATTERN.read_text()[:1] not in "|@/"


def as_in_a_shell_that_wants_cores(command: Sequence[str]) -> list[str]:
    """The command line of a program that dumps all: this process may hold keys by now, and what it starts takes after
    it. No function does it between fork and exec, where a lock that another thread has is never given back."""
    prepare = f'ulimit -c "$(ulimit -H -c)"; echo {EVERYTHING} > {FILTER}; exec "$@"'
    return ["sh", "-c", prepare, "sh", *command]
