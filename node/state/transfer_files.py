"""Unfinished transfers on disk: what has come of a state while the rest is on its way, so that a restart costs little.

    transfer/<rebases>.<rollbacks>-<round>-<first 8 bytes of the digest, in hex>/
        header    the canonical StateHeader
        chunks    the state's vectors in order, (numel,) float32 each, with holes where nothing has come yet

No list says what is there: a chunk read back counts if it has the hash that the certified header wants, and a hole, a
torn write or a bit that has changed does not. So nothing here is ever synced, and a file of another round serves for
the chunks that the two states have alike. The folder goes when its state is complete and on disk as a state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import deque
from pathlib import Path

import trio

from shoal.collectives.state import StateAssembly, StateHeader, StateKind
from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.errors import RemoteError, StorageError
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.frame import SCOPE_BYTES

FOLDER = "transfer"
HEADER_LIMIT_BYTES = 2 << 20
KEEP_AFTER_S = 2.0
"""Seconds after which a transfer goes to disk: a shorter one is repeated sooner than written."""
KEEP_LOOK_S = 0.1

logger = logging.getLogger(__name__)


class TransferFile:
    """The chunks of one unfinished state on disk. All methods block; one thread at a time."""

    def __init__(self, path: Path, header: StateHeader) -> None:
        self.path = path
        self.header = header
        self._grid = header.grid
        self._file: int | None = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self.path / "chunks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._file

    def _offset(self, kind: StateKind, chunk: int) -> int:
        begin = self.header.kinds.index(kind) * self.header.numel
        return 4 * (begin + self._grid.span(chunk)[0])

    def write(self, kind: StateKind, chunk: int, data: memoryview) -> None:
        """Keep a chunk. Raises StorageError."""
        with disk_errors(self.path):
            offset = self._offset(kind, chunk)
            while data:
                written = os.pwrite(self._open(), data, offset)
                data, offset = data[written:], offset + written

    def fill(self, assembly: StateAssembly) -> list[tuple[StateKind, int]]:
        """Give `assembly` what it lacks and this file has; returns what that was."""
        found: list[tuple[StateKind, int]] = []
        if assembly.header.grid != self._grid:
            return found
        for kind, chunk in assembly.missing():
            wanted = assembly.header.chunk_hash(kind, chunk)
            if self.header.chunk_hash(kind, chunk) == wanted:
                with contextlib.suppress(OSError, RemoteError):  # it is not there, or not as it should be
                    data = os.pread(self._open(), 4 * self._grid.length(chunk), self._offset(kind, chunk))
                    if assembly.accept(kind, chunk, data):
                        found.append((kind, chunk))
        return found

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class TransferFolder:
    """The unfinished states of one data folder: at most one, but for the moment in which another takes its place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def unfinished(self) -> list[TransferFile]:
        """List the unfinished transfers, newest round first; remove what is none, or has no readable header."""
        found = []
        for path in list(self._folder.iterdir()) if self._folder.is_dir() else []:
            try:
                header = decode((path / "header").read_bytes(), StateHeader, limit_bytes=HEADER_LIMIT_BYTES)
            except (OSError, RemoteError) as error:
                logger.info("%s is no unfinished transfer (%s)", path, error)
                _remove(path)
            else:
                found.append(TransferFile(path, header))
        return sorted(found, key=lambda file: (file.header.term, file.header.round), reverse=True)

    def begin(self, header: StateHeader) -> TransferFile:
        """A file for the state of `header`, with what is there of it already; those of other states are removed.

        Raises StorageError.
        """
        term = header.term
        name = f"{term.rebases}.{term.rollbacks}-{header.round}-{header.digest[:SCOPE_BYTES].hex()}"
        path = self._folder / name
        with disk_errors(self._folder.parent):
            path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "header", canonical(header))
        for other in self._folder.iterdir():
            if other.name != name:
                _remove(other)
        return TransferFile(path, header)

    def clear(self) -> None:
        """Remove everything: the state has arrived."""
        _remove(self._folder)


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


class PartialDownload:
    """Writes what comes of a state to its file, for as long as there is room on the disk. `note` is for any thread."""

    def __init__(self, folder: TransferFolder, assembly: StateAssembly) -> None:
        self._folder = folder
        self._assembly = assembly
        self._noted: deque[tuple[StateKind, int]] = deque()
        self._file: TransferFile | None = None

    def note(self, kind: StateKind, chunk: int) -> None:
        """A chunk is here that is in no file."""
        self._noted.append((kind, chunk))

    @property
    def behind(self) -> bool:
        """True if something is to be written."""
        return bool(self._noted)

    async def run(self) -> None:
        """Write, from a while on, until cancelled or the disk takes no more. Cancellation: what is written stays."""
        try:
            await trio.sleep(KEEP_AFTER_S)
            while True:
                if self.behind:
                    await trio.to_thread.run_sync(self.keep_next)
                else:
                    await trio.sleep(KEEP_LOOK_S)
        except StorageError as error:
            logger.warning("what comes of the state is not kept for a restart: %s", error)
        finally:
            self.close()

    def keep_next(self) -> None:
        """Write the chunk that was noted first. Raises StorageError. Blocks; one thread at a time."""
        piece = self._noted.popleft()
        data = self._assembly.chunk(*piece)
        if data is not None:
            if self._file is None:
                self._file = self._folder.begin(self._assembly.header)
            self._file.write(*piece, data)

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
