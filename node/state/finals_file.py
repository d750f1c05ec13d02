"""Finals as files: how they are laid out, written such that a crash cannot hurt, read back, and served.

    length of the plan (u32) ‖ canonical plan ‖ payload of chunk 0 ‖ payload of chunk 1 ‖ …

The plan's length and each payload begin on a page of 4096 bytes, with zeros between. Payloads carry their owners'
signatures, and are of the plan whose hash is in the file's name. Numbers are little-endian.

The disk takes them from the memory in which they lie, past the page cache. A write copies into the cache, whose pages
are fresh: 27 ms of CPU for 100 MB, on the path on which the others wait for a report. Straight from huge pages it is
1 ms, and the disk is done sooner. It takes whole pages of memory and of the file, so each payload begins on a page of
the file; what does not lie on pages, as its end, is copied. Where the file system takes nothing of the kind, the cache
is written through instead, and synced along the way.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shoal.collectives.codecs import U8
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.memory import own_array
from shoal.node.state.store import PAGE_BYTES, SYNC_BYTES, disk_errors, set_direct, sync_and_release
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.folders import sync_folder
from shoal.protocol.messages import Plan
from shoal.protocol.wire import canonical, decode

PARTS_LIMIT = 512
"""Of one call; the system takes 1024."""
_LENGTH_BYTES = 4


class FinalsWriter:
    """Writes finals in a thread of its own, beside what is computed of them; the file is there after `finish`.

    Nothing of an unfinished file is ever believed: it has another name, and each writer's is its own.
    """

    _numbers = itertools.count()

    def __init__(self, path: Path, finals: Finals) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{next(self._numbers)}.partial")
        self._finals = finals
        self._abandoned = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] = self._thread.submit(self._write)
        self._thread.shutdown(wait=False)

    def writes(self, finals: Finals) -> bool:
        """True if these very finals are what it writes."""
        mine, plan = self._finals.chunks, finals.plan
        return self._finals.plan == plan and all(ours is other for ours, other in zip(mine, finals.chunks, strict=True))

    def finish(self) -> None:
        """Return when the file is there for good, and the finals lie in it: their memory is free.

        Raises StorageError, and then nothing is there.
        """
        try:
            self._written.result()
            with disk_errors(self._path.parent):
                self._partial.replace(self._path)
                sync_folder(self._path.parent)
        finally:
            self.abandon()
        with contextlib.suppress(OSError):  # then they stay where they are
            data = _mapped(self._path)
            for final, place in zip(self._finals.chunks, _layout(data)[1], strict=True):
                final.move_to(np.frombuffer(data[place], np.uint8))

    def abandon(self) -> None:
        """Write no more, and remove what was written of a file that is not finished. Does not wait for the disk."""
        self._abandoned.set()
        self._written.add_done_callback(self._remove)

    def _write(self) -> None:
        head = canonical(self._finals.plan)
        head = len(head).to_bytes(_LENGTH_BYTES, "little") + head
        with disk_errors(self._path.parent), self._partial.open("wb", buffering=0) as opened:
            file = DirectFile(opened.fileno())
            file.append(np.frombuffer(head, np.uint8))
            for chunk in self._finals.chunks:
                if self._abandoned.is_set():
                    raise LocalError("the finals are not wanted any more")
                file.append(chunk.payload)
            file.finish()

    def _remove(self, _: Future[None]) -> None:
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)


def read_finals(path: Path) -> Finals:
    """Read finals and check every signature. Raises OSError, ValueError, or a ShoalError if the file holds none."""
    data = _mapped(path)
    final_format, places = _layout(data)
    return Finals.open(final_format.plan, [data[place] for place in places])


class FinalsFile:
    """The finals of one plan in a file that nobody writes to any more, served chunk by chunk without being loaded.

    Safe in any number of threads. Raises OSError, ValueError, or a ShoalError if the file holds none. The file may be
    removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._data = _mapped(path)
        self._final_format, self._places = _layout(self._data)
        self._lock = threading.Lock()
        self._sound: dict[int, bool] = {}

    @property
    def plan(self) -> Plan:
        """Plan whose finals they are."""
        return self._final_format.plan

    def payload(self, chunk: int) -> memoryview | None:
        """The final payload of a chunk; None if there is none, or if it is not what its owner signed."""
        if not 0 <= chunk < self.plan.chunks:
            return None
        data = self._data[self._places[chunk]]
        sound = self._sound.get(chunk)
        if sound is None:
            try:
                self._final_format.open(chunk, data)
                sound = True
            except RemoteError:  # the disk has changed it: not to be passed on
                sound = False
            with self._lock:
                self._sound[chunk] = sound
        return data if sound else None


def _mapped(path: Path) -> memoryview:
    """All of a file. Raises OSError, ValueError if it is empty."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _layout(data: memoryview) -> tuple[FinalFormat, list[slice]]:
    """The form of what a file holds, and where each payload lies.

    Earlier releases put one behind the other without anything between: what is exactly as long as that is read so.

    Raises ValueError or a ShoalError for anything else than finals of a plan that can be.
    """
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    final_format = FinalFormat(decode(bytes(data[_LENGTH_BYTES:begin]), Plan))
    sizes = [final_format.payload_bytes(chunk) for chunk in range(final_format.grid.chunks)]
    *starts, _ = itertools.accumulate(map(paged, sizes), initial=paged(begin))
    *packed, packed_end = itertools.accumulate(sizes, initial=begin)
    end = starts[-1] + sizes[-1]
    if len(data) == packed_end:
        starts = packed
    elif len(data) != end:
        raise ValueError(f"{len(data)} bytes, not {end}")
    return final_format, [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


# --- past the page cache ---


def paged(size: int) -> int:
    """Bytes of the file that a payload of `size` bytes takes: whole pages."""
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
        """Write from the front of `parts`; return the bytes written, 0 where direct writing was refused."""
        try:
            return os.writev(self._file, parts)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            # The file system has larger pages than ours, or what was written last ended within one.
            self._direct = set_direct(self._file, False)
            return 0


def _without(parts: Sequence[memoryview], size: int) -> list[memoryview]:
    """Drop the first `size` bytes of `parts`, and return the rest."""
    left = []
    for part in parts:
        if size < len(part):
            left.append(part[size:])
        size = max(0, size - len(part))
    return left
