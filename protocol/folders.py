"""Folders, and what was renamed in them, that survive a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

OPEN_MODE = 0o777
"""As the user's mask leaves it."""


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path, *, mode: int = OPEN_MODE) -> None:
    """Make a folder, with those above it, in a way that they and what is synced in it survive a power cut.

    mode: of this one alone. Raises OSError.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder in which one may make others, and read nothing
            sync_folder(path.parent)
