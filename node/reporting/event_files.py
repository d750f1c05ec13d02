"""The two files of an event log: the one that grows, and the one before it.

    events.jsonl      grows up to EVENT_LOG_LIMIT_BYTES
    events.1.jsonl    what was in it before; what was before that is gone

When the first is full it takes the second's name, and another begins. Whoever reads a log reads both, oldest first, and
may do so while the node writes: a file is known by its inode and how it begins, whatever its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

LOG_NAME = "events.jsonl"
EVENT_LOG_LIMIT_BYTES = 64 << 20
"""Of one of the two files."""
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 32
"""Of a file, which hold the time of its first event, to the microsecond."""


def earlier_of(log: Path) -> Path:
    """The file before the one that grows."""
    return log.with_name(f"{log.stem}.1{log.suffix}")


def start_anew(log: Path) -> BinaryIO:
    """Give the log the name of the one before it, and open an empty one to append to.

    Raises OSError; the log is then as it was.
    """
    partial = log.with_name(f"{log.name}.partial")
    file = partial.open("wb")
    try:
        with suppress(FileNotFoundError):  # somebody removed it
            log.replace(earlier_of(log))
        partial.replace(log)
    except OSError:
        file.close()
        partial.unlink(missing_ok=True)
        raise
    return file


def blocks_of(log: Path) -> Iterator[bytes]:
    """Yield what both files hold, in pieces, with a line break after the first. Raises OSError if there is none."""
    with ExitStack() as opened:
        files = _open(log, opened)
        if not files:
            raise FileNotFoundError(2, os.strerror(2), str(log))
        last = b"\n"
        for file in files:
            if last != b"\n":
                yield b"\n"
            while block := file.read(BLOCK_BYTES):
                last = block[-1:]
                yield block


def read_end(log: Path, limit_bytes: int) -> bytes:
    """The last whole lines of both files, `limit_bytes` at most. Raises OSError if there is no log."""
    with ExitStack() as opened:
        pieces: list[bytes] = []
        for file in reversed(_open(log, opened) or [opened.enter_context(log.open("rb"))]):
            size = file.seek(0, 2)
            start = max(0, size - limit_bytes)
            file.seek(start)
            piece = file.read(limit_bytes)
            limit_bytes -= len(piece)
            pieces.append(piece if not pieces or piece.endswith(b"\n") else piece + b"\n")
            if start:
                pieces[-1] = pieces[-1].partition(b"\n")[2]
                break
        return b"".join(reversed(pieces))


def _open(log: Path, opened: ExitStack) -> list[BinaryIO]:
    """Open those of the two files that are there, oldest first, as of one moment."""
    while True:
        with ExitStack() as both:
            files: dict[Path, BinaryIO] = {}
            for path in (log, earlier_of(log)):
                with suppress(FileNotFoundError):
                    files[path] = both.enter_context(path.open("rb"))
            if _is_still(log, files.get(log)):  # else the names have changed in between, perhaps more than once
                opened.push(both.pop_all())
                return list(files.values())[::-1]


def _is_still(path: Path, file: BinaryIO | None) -> bool:
    """True if the path still names this file, or none where there was none; an open file keeps its inode."""
    try:
        with path.open("rb") as now:
            return file is not None and _inode(now) == _inode(file)
    except FileNotFoundError:
        return file is None


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino


class LogFollower:
    """Reads what was appended to a log since the last look, over as many files as that takes.

    from_end_bytes: how much before the end it begins; None for the beginning.
    """

    def __init__(self, log: Path, *, from_end_bytes: int | None = None) -> None:
        self._log = log
        self._from_end_bytes = from_end_bytes
        self._at: _Place | None = None

    def read(self, limit_bytes: int | None = None) -> bytes:
        """Read at most so much of it; nothing where there is no log. Raises OSError. A shorter file is read anew."""
        with ExitStack() as opened:
            files = _open(self._log, opened)
            if not files:
                return b""
            at = self._at or self._beginning(files)
            known = [number for number, file in enumerate(files) if at.is_in(file)]
            data = b""
            for number in range(known[0] if known else 0, len(files)):  # it missed what is in neither of them
                file = files[number]
                if not at.is_in(file):
                    at = _Place(_inode(file))
                    if number and not ends_a_line(files[number - 1]):
                        data += b"\n"
                piece = at.read(file, None if limit_bytes is None else limit_bytes - len(data))
                data += piece
                if limit_bytes is not None and len(data) >= limit_bytes:
                    break
            self._at = at
            return data

    def _beginning(self, files: list[BinaryIO]) -> _Place:
        left = self._from_end_bytes
        for file in reversed(files):
            size = file.seek(0, 2)
            place = _Place(_inode(file), offset=0 if left is None else max(0, size - left))
            if left is not None:
                left -= size
                if left <= 0:
                    break
        return place


class _Place:
    """Offset up to which a file was read, and the file's mark: inodes are reused, but no two logs begin alike."""

    def __init__(self, inode: int, offset: int = 0) -> None:
        self._inode = inode
        self._head = b""
        self._offset = offset

    def is_in(self, file: BinaryIO) -> bool:
        return self._inode == _inode(file) and os.pread(file.fileno(), HEAD_BYTES, 0).startswith(self._head)

    def read(self, file: BinaryIO, limit_bytes: int | None) -> bytes:
        self._head = os.pread(file.fileno(), HEAD_BYTES, 0)
        if file.seek(0, 2) < self._offset:
            self._offset = 0
        file.seek(self._offset)
        data = file.read(-1 if limit_bytes is None else limit_bytes)
        self._offset += len(data)
        return data


def ends_a_line(file: BinaryIO) -> bool:
    """True if nothing was cut short at the end of this file. Raises OSError."""
    size = file.seek(0, 2)
    return not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
