"""Folders, and what was renamed in them, that survive a power cut; and files that are files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

OPEN_MODE = 0o777
"""As the user's mask leaves it."""


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_file(path: Path) -> BinaryIO:
    """Open a file of one's user's for reading; a pipe or a device is none, and nobody waits for its writer.

    Raises OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def make_folder(path: Path, *, mode: int = OPEN_MODE) -> None:
    """Make a folder, with those above it, in a way that they and what is synced in it survive a power cut.

    mode: of this one alone. Raises OSError.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder in which one may make others, and read nothing
            sync_folder(path.parent)
