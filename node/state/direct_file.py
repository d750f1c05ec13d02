"""Files of large payloads, written past the page cache: the disk takes them from the memory in which they lie.

A write copies into the cache, whose pages are fresh: 27 ms of CPU for 100 MB, on the path on which the others wait for
a report. Straight from huge pages it is 1 ms, and the disk is done sooner. It takes whole pages of memory and of
the file, so each payload begins on a page of the file; what does not lie on pages, as its end, is copied.

Where the file system takes nothing of the kind, the cache is written through instead, and synced along the way.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import numpy as np

from shoal.collectives.codecs import U8
from shoal.collectives.memory import own_array
from shoal.node.state.store import PAGE_BYTES, SYNC_BYTES, set_direct, sync_and_release

PARTS_LIMIT = 512
"""Of one call; the system takes 1024."""


def paged(size: int) -> int:
    """How many bytes of the file `size` bytes take."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class DirectFile:
    """Payloads, one behind the other, into the open file `file`, each from a page on and with zeros up to the next.

    The file ends where the last one does.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._parts: list[memoryview] = []
        self._unwritten_bytes = 0
        self._begun_bytes = 0  # of the file, with what fills the last page
        self._end = 0
        self._direct = set_direct(file, True)

    def append(self, payload: U8) -> None:
        """Write (n,) uint8, now or with what comes next. Raises OSError."""
        whole = payload.size - payload.size % PAGE_BYTES if payload.ctypes.data % PAGE_BYTES == 0 else 0
        rest: U8 = own_array(paged(payload.size - whole), np.uint8)
        rest[: payload.size - whole] = payload[whole:]
        self._parts += [part.data for part in (payload[:whole], rest) if part.size]
        self._unwritten_bytes += whole + rest.size
        self._end = self._begun_bytes + payload.size
        self._begun_bytes += whole + rest.size
        if self._unwritten_bytes >= SYNC_BYTES or len(self._parts) >= PARTS_LIMIT:
            self._write()
            if not self._direct:
                sync_and_release(self._file)

    def finish(self) -> None:
        """Return when all of it is on disk. Raises OSError."""
        self._write()
        os.ftruncate(self._file, self._end)
        sync_and_release(self._file)

    def _write(self) -> None:
        parts, self._parts, self._unwritten_bytes = self._parts, [], 0
        while parts:
            parts = _without(parts, self._write_some(parts))

    def _write_some(self, parts: Sequence[memoryview]) -> int:
        """How many bytes of `parts` were written."""
        try:
            return os.writev(self._file, parts)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            # The file system has larger pages than ours, or what was written last ended within one.
            self._direct = set_direct(self._file, False)
            return 0


def _without(parts: Sequence[memoryview], size: int) -> list[memoryview]:
    """What is left of `parts` without the first `size` bytes."""
    left = []
    for part in parts:
        if size < len(part):
            left.append(part[size:])
        size = max(0, size - len(part))
    return left
