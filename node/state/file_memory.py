"""Memory in nameless files of the data folder, for what is as large as the model and idle most of the time.

The kernel writes its changed pages to the file in time, and may drop them then; whoever reads one has it again. So a
state takes memory as far as there is some to spare. A file goes with its mapping, and has no name: nobody else can open
it or cut it short, and a start finds nothing of it. Another process of the same user sees one if it is given a
descriptor of it, which is for reading alone (`reader_of`).

What is to be there after a crash is synced and then given a name (`give_name`). From then on nothing is written to it
any more, whatever becomes of the name: it may have others, and who opened it reads on in it.

Room on disk is taken beforehand: the kernel kills a process that changes a page for which there is none.

Source: mmap(2), MAP_SHARED, open(2), O_TMPFILE, and linkat(2), AT_SYMLINK_FOLLOW, of the Linux manual.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.memory import F32, VectorPool, own_memory
from shoal.node.state.store import PAGE_BYTES, SYNC_BYTES, disk_errors
from shoal.protocol.errors import StorageError
from shoal.protocol.folders import sync_folder

_UNABLE = (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP)
"""Of file systems whose files cannot be mapped for writing, or take no room beforehand: memory is had otherwise."""
HEAD_BYTES: Final = 4096
"""Room for the head of a file of vectors, beside the hashes of their chunks in it."""
HASH_CHARS: Final = 64
TOUCHED_BYTES: Final = 4 << 20
"""So much gets its pages before who wants the memory may have it."""


class FileMapping(mmap.mmap):
    """A mapping, and a descriptor for reading of what it maps, open for as long as it is there; None if none is had."""

    reader: int | None = None
    is_named = False


def file_memory(folder: Path, size: int) -> memoryview:
    """`size` bytes of zeros in a nameless file of `folder`, writeable. Raises StorageError if the disk has no room."""
    with disk_errors(folder):
        try:
            with _nameless_file(folder) as file:
                _take_room(file, size)
                mapping = FileMapping(file.fileno(), size)
                with suppress(OSError):  # where there is no /proc
                    mapping.reader = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
                    weakref.finalize(mapping, os.close, mapping.reader).atexit = False
                return memoryview(mapping)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
    return own_memory(size)


def _nameless_file(folder: Path) -> IO[bytes]:
    """A new one, which can be given a name where the system has such."""
    with suppress(AttributeError, OSError):
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+b")
    return tempfile.TemporaryFile(dir=folder)


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


def mapping_of(array: npt.NDArray[Any] | memoryview) -> FileMapping | None:
    """Return the mapping in which `array` lies; None if it lies in no nameless file."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, FileMapping) else None


def begin_of(array: npt.NDArray[Any], mapping: FileMapping) -> int:
    """Return at which byte of the file `array` begins."""
    return int(array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data)


def give_name(mapping: FileMapping, path: Path) -> bool:
    """Have a nameless file on disk as `path`; False if it can have no name.

    Nothing is written to it from now on. It is synced in pieces: another file that is synced meanwhile waits for one at
    most. A crash leaves the old file or this one. Raises StorageError, and then it has no name.
    """
    if mapping.reader is None:
        return False
    partial = path.with_name(path.name + ".partial")
    with disk_errors(path.parent):
        for begin in range(0, len(mapping), SYNC_BYTES):
            mapping.flush(begin, min(SYNC_BYTES, len(mapping) - begin))
        partial.unlink(missing_ok=True)
        try:
            # A descriptor is named only if linkat follows /proc's link, which os.link asks for with a folder alone.
            os.link(f"/proc/self/fd/{mapping.reader}", partial, src_dir_fd=mapping.reader, follow_symlinks=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return False
        mapping.is_named = True
        try:
            os.fsync(mapping.reader)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # also where it had that name, of which rename(2) makes nothing
        sync_folder(path.parent)
    return True


def reader_of(vector: F32) -> int | None:
    """Return a new descriptor of the nameless file in which `vector` lies, at its beginning; None if it lies in none.

    It is for reading, so that nobody who is given it can cut the file short. `vector` begins with a page of the file.
    """
    mapping = mapping_of(vector)
    if mapping is None or mapping.reader is None or begin_of(vector, mapping) % mmap.ALLOCATIONGRANULARITY:
        return None
    reader = os.open(f"/proc/self/fd/{mapping.reader}", os.O_RDONLY | os.O_CLOEXEC)
    os.lseek(reader, begin_of(vector, mapping), os.SEEK_SET)
    return reader


class FilePool(VectorPool):
    """Vectors in nameless files: those that are taken together lie in one, behind room for the head of its format.

    So to save them is to give their file its head and a name (`tensor_files.write_tensors`). Memory with a name is not
    given out again. chunk_values: of the grid, for of each chunk the head has a hash. together: how many are mostly
    taken together. kept: files at which no other is made ready.
    """

    def __init__(self, folder: Path, chunk_values: int, *, together: int = 1, kept: int = 3) -> None:
        super().__init__(1, partial(file_memory, folder))
        self._chunk_values = chunk_values
        self._together, self._kept = together, kept
        self._files = weakref.WeakSet[Any]()
        self._readied: memoryview | None = None
        """The spare memory that gets its pages, until it has them or is taken."""
        self._is_awaited = False
        """Somebody waits for the lock to take memory, and a lock is not fair."""
        self._lock = threading.Lock()
        """Of who makes a file or touches a spare one; not of those whose vectors cease to exist."""

    def take(self, numel: int) -> F32:
        """(numel,) float32 of unspecified content, writeable."""
        return self.take_together(numel, 1)[0]

    def take_together(self, numel: int, count: int) -> list[F32]:
        """`count` of these, one behind the other."""
        begin, size = self._place(numel, count)
        self._is_awaited = True
        with self._lock:
            self._is_awaited = False
            memory = self._spare_of(size) or self._new(size)
            self._readied = None if memory is self._readied else self._readied
        vectors = [np.frombuffer(memory[at : at + 4 * numel], np.float32) for at in range(begin, size, 4 * numel)]
        others = deque(range(count - 1))

        def gone() -> None:
            try:
                others.pop()
            except IndexError:  # it was the last
                if not (isinstance(memory.obj, FileMapping) and memory.obj.is_named):
                    self._spare.append(memory)

        for vector in vectors:
            weakref.finalize(vector, gone).atexit = False
        return vectors

    def _place(self, numel: int, count: int) -> tuple[int, int]:
        """Where the first of them begins, and how many bytes the file has."""
        chunks = -(-numel // self._chunk_values)
        room = HEAD_BYTES + chunks * (count + 1) * HASH_CHARS
        begin = -(-room // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return begin, begin + 4 * numel * count

    def _new(self, size: int) -> memoryview:
        memory = self._allocate(size)
        if isinstance(memory.obj, FileMapping):
            self._files.add(memory.obj)
        return memory

    def prepare(self, numel: int) -> None:
        """Have memory, with pages of its own, for what is taken together next; not beyond what is kept.

        Who takes it meanwhile has it as far as it is. Blocks. Raises StorageError.
        """
        _, size = self._place(numel, self._together)
        with self._lock:
            if self._spare or len(self._files) >= self._kept:
                return
            self._readied = memory = self._new(size)
            self._spare.append(memory)
        for begin in range(0, size, TOUCHED_BYTES):
            with self._lock:
                if self._is_awaited or self._readied is not memory:
                    break
                np.frombuffer(memory, np.uint8)[begin : begin + TOUCHED_BYTES : PAGE_BYTES] = 0
        with self._lock:  # it is nobody's but the spare's, which may let it go
            self._readied = None if self._readied is memory else self._readied
