"""A limit of memory for processes, page cache included: a control group of the kernel's, of version 1 or 2.

Memory counts for the group whose process touched it first, for as long as it is there. So a process is to begin in its
group; what it starts begins there too, and can be moved out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.node.control_groups import MOUNTS, OWN_GROUPS, own_groups
from shoal.protocol.errors import ConfigError


class MemoryLimit:
    """A control group whose processes have so many bytes together. Made by `memory_limit`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def prefix(self) -> list[str]:
        """A command that the words after it are run by, within the limit."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs")]

    def processes(self) -> list[int]:
        """Processes in the group now."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def let_out(self, pid: int) -> None:
        """Have a process count for the group above from now on."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (self._folder.parent / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def memory_limit(name: str, size: int) -> Iterator[MemoryLimit]:
    """A limit of `size` bytes, until the block ends; its processes are to have ended by then.

    Raises ConfigError where this process may make none.
    """
    own = _limited(f"shoal-{os.getpid()}-{name}", size)
    if own is None:
        raise ConfigError("no control group of memory can be made here; run it as root on Linux")
    try:
        yield MemoryLimit(own)
    finally:
        with contextlib.suppress(OSError):  # some are just ending: a group without any costs nothing
            own.rmdir()


def _limited(name: str, size: int) -> Path | None:
    """Make a control group with that limit below one of this process's; None where there can be none."""
    with contextlib.suppress(OSError):
        for _, folder, unified in own_groups("memory", MOUNTS.read_text(), OWN_GROUPS.read_text()):
            own, limit = folder / name, "memory.max" if unified else "memory.limit_in_bytes"
            own.mkdir()
            if (own / limit).exists():
                (own / limit).write_text(str(size))
                return own
            own.rmdir()
    return None
