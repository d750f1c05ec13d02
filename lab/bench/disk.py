"""Disk that a node takes: the files of its data folder, by kind, and the nameless ones that its processes hold open.

A nameless file has room on the disk of the data folder as long as a process has it open or mapped, and no name there
(`shoal.node.state.file_memory`). What counts is what the file system set aside (`st_blocks`), and each file once,
whatever its number of names and of processes that hold it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

NAMELESS: Final = "nameless"
"""The kind of files without a name."""
REST: Final = "other"
"""The kind of files that lie in no folder of the data folder: keys, logs, sockets."""
_BLOCK_BYTES: Final = 512
"""Of `st_blocks`, whatever the file system's own are."""


class OnDisk(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on disk of one node, by kind: the names of folders in its data folder, and two of this module.

    apparent: what all files say that they are long.
    """

    kinds: dict[str, int]
    apparent: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


def on_disk(folder: Path, pids: Sequence[int]) -> OnDisk:
    """Return what a data folder, and the processes that work on it, have on disk now."""
    found: dict[tuple[int, int], tuple[str, os.stat_result]] = {}
    # A checkpoint's files are others' under a second name, as long as those are there.
    for kind, known in sorted((*_nameless(folder, pids), *_named(folder)), key=lambda one: one[0] != "checkpoints"):
        if stat.S_ISREG(known.st_mode):
            found[known.st_dev, known.st_ino] = kind, known
    kinds: dict[str, int] = {}
    for kind, known in found.values():
        kinds[kind] = kinds.get(kind, 0) + known.st_blocks * _BLOCK_BYTES
    return OnDisk(kinds=kinds, apparent=sum(known.st_size for _, known in found.values()))


def _named(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for place, _, names in os.walk(folder):
        within = Path(place).relative_to(folder).parts
        for name in names:
            with suppress(OSError):  # a running node removes files
                yield within[0] if within else REST, os.lstat(os.path.join(place, name))


def _nameless(folder: Path, pids: Sequence[int]) -> Iterator[tuple[str, os.stat_result]]:
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it was just closed
                    if os.readlink(entry.path).startswith(f"{folder}/"):
                        known = os.stat(entry.path)
                        if not known.st_nlink:
                            yield NAMELESS, known
