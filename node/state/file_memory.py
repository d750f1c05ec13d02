"""Memory in nameless files of the data folder, for what is as large as the model and idle most of the time.

The kernel writes its changed pages to the file in time, and may drop them then; whoever reads one has it again. So a
state takes memory as far as there is some to spare. A file goes with its mapping, and has no name: nobody else can open
it or cut it short, and a start finds nothing of it. So nothing here outlives the process that wrote it, and what is to
be there after a crash is written as a file of its own, as before. Another process of the same user sees one if it is
given a descriptor of it, which is for reading alone (`descriptor_of`).

Room on disk is taken beforehand: the kernel kills a process that changes a page for which there is none.

Source: mmap(2), MAP_SHARED, and open(2), O_TMPFILE, of the Linux manual.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from shoal.collectives.memory import F32, own_memory
from shoal.node.state.store import PAGE_BYTES, disk_errors
from shoal.protocol.errors import StorageError

_UNABLE = (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP)
"""Of file systems whose files cannot be mapped for writing, or take no room beforehand: memory is had otherwise."""


class _FileMapping(mmap.mmap):
    """A mapping, and a descriptor for reading of what it maps, open for as long as it is there; None if none is had."""

    reader: int | None = None


def file_memory(folder: Path, size: int) -> memoryview:
    """`size` bytes of zeros in a nameless file of `folder`, writeable. Raises StorageError if the disk has no room."""
    with disk_errors(folder):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _take_room(file, size)
                mapping = _FileMapping(file.fileno(), size)
                with suppress(OSError):  # where there is no /proc
                    mapping.reader = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
                    weakref.finalize(mapping, os.close, mapping.reader).atexit = False
                return memoryview(mapping)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
    return own_memory(size)


def _take_room(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


class Unmappable(StorageError):
    """A file system whose files cannot be mapped for writing, or take no room beforehand."""


class NamedMemory:
    """Memory that is the content of a file, for whoever gives the file its name once it is whole."""

    def __init__(self, path: Path, size: int) -> None:
        """`size` bytes of zeros in the new file `path`.

        Raises OSError if the disk has no room, and then no file is there; Unmappable.
        """
        self.path = path
        try:
            with path.open("w+b") as file:
                _take_room(file, size)
                self._mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in _UNABLE:
                raise Unmappable(f"{path.parent} has files that cannot be mapped; choose another --data-dir") from None
            raise
        self.data = memoryview(self._mapping)

    def touch(self) -> None:
        """Have pages for all of it, which who writes is spared to wait for."""
        np.frombuffer(self.data, np.uint8)[::PAGE_BYTES] = 0

    def fit(self, path: Path, size: int) -> bool:
        """Have it under another name and no longer than this; False, and nothing changed, if it is shorter.

        Raises OSError.
        """
        if len(self.data) < size:
            return False
        os.truncate(self.path, size)
        self.path = self.path.replace(path)
        self.data = self.data[:size]
        return True

    def sync(self, piece_bytes: int) -> None:
        """Have all of it on disk, in pieces: another file that is synced meanwhile waits for one at most.

        Raises OSError.
        """
        for begin in range(0, len(self.data), piece_bytes):
            self._mapping.flush(begin, min(piece_bytes, len(self.data) - begin))


def descriptor_of(vector: F32) -> int | None:
    """Return a descriptor of the nameless file that `vector` is the beginning of, open while it is; None without one.

    It is for reading, so that nobody who is given it can cut the file short.
    """
    memory = vector.base.obj if isinstance(vector.base, memoryview) else None
    if not isinstance(memory, _FileMapping) or vector.ctypes.data != np.frombuffer(memory, np.uint8).ctypes.data:
        return None
    return memory.reader
