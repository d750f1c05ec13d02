"""Finals as files: how they are laid out, written such that a crash cannot hurt, read back, and served.

    length of the plan (u32) ‖ canonical plan ‖ payload of chunk 0 ‖ payload of chunk 1 ‖ …

The plan's length and each payload begin on a page of 4096 bytes, with zeros between (`direct_file`). Payloads carry
their owners' signatures, and are of the plan whose hash is in the file's name. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shoal.collectives.finals import FinalFormat, Finals
from shoal.node.state.direct_file import DirectFile, paged
from shoal.node.state.store import disk_errors, sync_folder
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Plan
from shoal.protocol.wire import canonical, decode

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
        """Whether these very finals are what it writes."""
        mine, plan = self._finals.chunks, finals.plan
        return self._finals.plan == plan and all(ours is other for ours, other in zip(mine, finals.chunks, strict=True))

    def finish(self) -> None:
        """Return when the file is there for good. Raises StorageError, and then nothing is there."""
        try:
            self._written.result()
            with disk_errors(self._path.parent):
                self._partial.replace(self._path)
                sync_folder(self._path.parent)
        finally:
            self.abandon()

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
    data = memoryview(path.read_bytes())
    final_format, places = _layout(data)
    return Finals.open(final_format.plan, [data[place] for place in places])


class FinalsFile:
    """The finals of one plan in a file that nobody writes to any more, served chunk by chunk without being loaded.

    Safe in any number of threads. Raises OSError, ValueError, or a ShoalError if the file holds none. The file may be
    removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._final_format, self._places = _layout(self._data)
        self._lock = threading.Lock()
        self._sound: dict[int, bool] = {}

    @property
    def plan(self) -> Plan:
        """Whose finals they are."""
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
