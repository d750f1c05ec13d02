"""Folders as a store makes them, for tests that have none."""

from __future__ import annotations

from pathlib import Path


def cache_folder(folder: Path) -> Path:
    """`folder` with what a StateCache expects in it."""
    for name in ("state", "finals"):
        (folder / name).mkdir()
    return folder
