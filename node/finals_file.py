"""Finals on disk, served chunk by chunk without being loaded; the layout is that of `shoal.node.state_files`."""

from __future__ import annotations

import mmap
import threading
from itertools import accumulate
from pathlib import Path

from shoal.collectives.finals import FinalFormat
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode

_LENGTH_BYTES = 4


class FinalsFile:
    """The finals of one plan in a file that nobody writes to any more. Safe in any number of threads.

    Raises OSError, ValueError, or a ShoalError if the file holds none. The file may be removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        begin = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "little")
        self.plan = decode(bytes(self._data[_LENGTH_BYTES:begin]), Plan)
        self._form = FinalFormat(self.plan)
        sizes = (self._form.payload_bytes(chunk) for chunk in range(self.plan.chunks))
        self._offsets = list(accumulate(sizes, initial=begin))
        if len(self._data) != self._offsets[-1]:
            raise ValueError(f"{len(self._data)} bytes, not {self._offsets[-1]}")
        self._lock = threading.Lock()
        self._sound: dict[int, bool] = {}

    def payload(self, chunk: int) -> memoryview | None:
        """The final payload of a chunk; None if there is none, or if it is not what its owner signed."""
        if not 0 <= chunk < self.plan.chunks:
            return None
        data = self._data[self._offsets[chunk] : self._offsets[chunk + 1]]
        sound = self._sound.get(chunk)
        if sound is None:
            try:
                self._form.open(chunk, data)
                sound = True
            except RemoteError:  # the disk has changed it: not to be passed on
                sound = False
            with self._lock:
                self._sound[chunk] = sound
        return data if sound else None
