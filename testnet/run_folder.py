"""The folder of a run: made ready without losing anything of anybody else's, and the reports written into it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.errors import ConfigError


def replace_earlier_run(out: Path, command: str, *, folders: Sequence[str], files: Sequence[str]) -> Path:
    """Make `out` ready for `shoal <command>`: `folders` in it made anew, `files` gone. Returns it, absolute. Blocks.

    Only folders that the same command made are replaced: each of them holds a file by which it is known.
    Raises ConfigError if one was made by somebody else, before anything is removed; StorageError.
    """
    out, mark = out.absolute(), f".shoal-{command}"
    paths = [out / name for name in folders]
    with disk_errors(out, option="--out"):
        for folder in paths:
            if folder.exists() and not (folder / mark).exists():
                raise ConfigError(f"{folder} is not of an earlier `shoal {command}`; choose another --out")
        for folder in paths:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / mark).touch()
        for name in files:
            (out / name).unlink(missing_ok=True)
    return out


def new_run(out: Path) -> Path:
    """Make `out` ready for a run that replaces none, since each takes hours. Returns it, absolute. Blocks.

    Raises ConfigError if something is in it, StorageError.
    """
    out = out.absolute()
    with disk_errors(out, option="--out"):
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    return out


def write_reports(out: Path, reports: Mapping[str, str | bytes]) -> None:
    """Write reports by the names of their files, each whole or not at all. Blocks. Raises StorageError."""
    for name, content in reports.items():
        data = content.encode() if isinstance(content, str) else content
        write_atomically(out / name, data, option="--out")
