"""A limit of memory for processes, page cache included: a control group of the kernel's, of version 1 or 2.

Memory counts for the group whose process touched it first, for as long as it is there. So a process is to begin in its
group; what it starts begins there too, and can be moved out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.protocol.errors import ConfigError

FILES: Final = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
"""What a limit is written to, by the kind of mount."""


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
    own = _group_of(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text(), name)
    try:
        own.mkdir()
        file = next(own / file for file in FILES.values() if (own / file).exists())
        file.write_text(str(size))
    except (OSError, StopIteration):
        raise ConfigError(f"no control group of memory can be made at {own}; run it as root on Linux") from None
    try:
        yield MemoryLimit(own)
    finally:
        with contextlib.suppress(OSError):  # some are just ending: a group without any costs nothing
            own.rmdir()


def _group_of(mounts: str, own: str, name: str) -> Path:
    """A control group below that of this process. mounts, own: texts of /proc/self/mounts and /proc/self/cgroup."""
    within = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    for line in mounts.splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for names, path in within.items() if "memory" in names.split(",")), "/")
        elif kind == "cgroup2" and "memory" in _controllers(Path(mount)):
            path = within.get("", "/")
        else:
            continue
        return Path(mount + path) / f"shoal-{os.getpid()}-{name}"
    raise ConfigError("this system has no control groups of memory; run it on Linux, as root")


def _controllers(mount: Path) -> list[str]:
    try:
        return (mount / "cgroup.controllers").read_text().split()
    except OSError:
        return []
