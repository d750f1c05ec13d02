"""Bytes of text for the workload `text`: found, split into train and held-out, and dealt in windows.

Everything follows from the files' relative names and contents alone, so nodes with the same files agree on
the split, whatever the order their disks list them in.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec
import numpy as np
import torch

from shoal.node.workload import Assignment
from shoal.node.workloads.outsiders import share_of_order
from shoal.protocol.errors import ConfigError

TRAIN_LIMIT_BYTES = 64 << 20
HELD_OUT_LIMIT_BYTES = 4 << 20
FILES_LIMIT = 100_000
PROBE_BYTES = 4096
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})
"""Folders beside the standard library's source: installed packages, and tests that not every system has."""
HELD_OUT_ONE_IN = 20
"""One file in so many is held out; of a single file, also of one alone in a folder, the last such part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two byte strings, ``(n,) uint8`` each, that share no file."""

    train: torch.Tensor
    held_out: torch.Tensor


def load_corpus(data: str | None) -> Corpus:
    """Read a folder or a file, by default the standard library's source beside the interpreter.

    Files are taken in an order drawn by hash of their relative names until the limits are full, so a large
    folder gives an even sample and not its first letters. Raises `ConfigError` if there is no text.
    """
    if data is None:
        root, paths = library_files()
    else:
        root = Path(data).expanduser()
        if root.is_file():
            return _split_file(root)
        if not root.is_dir():
            raise ConfigError(f"there is no file or folder {data!r}; give --data the path of some text")
        paths = list(_walk(root, without=frozenset()))
        if len(paths) == 1:
            return _split_file(paths[0])
    return _split_files(root, paths)


def library_files() -> tuple[Path, list[Path]]:
    """The folder of the standard library's source, and the files in it that are text to train on."""
    root = Path(sysconfig.get_path("stdlib"))
    return root, [path for path in _walk(root, without=NOT_THE_LIBRARY) if path.suffix == ".py"]


def _walk(root: Path, *, without: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files below `root`, hidden ones and folders named in `without` left out."""
    found = 0
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found += 1
                if found > FILES_LIMIT:
                    raise ConfigError(f"{root} holds over {FILES_LIMIT} files; point --data deeper")
                yield path


def _split_file(path: Path) -> Corpus:
    content = _read(path, TRAIN_LIMIT_BYTES + HELD_OUT_LIMIT_BYTES)
    held_out = max(1, len(content) // HELD_OUT_ONE_IN)
    return _corpus(path, content[:-held_out], content[-held_out:])


def divide_files(root: Path, paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on and those held out: one in `HELD_OUT_ONE_IN`, by hash, and at least one if there are two.

    Both in the order of the hashes of their names below `root`.
    """
    train: list[Path] = []
    held_out: list[Path] = []
    ranked = sorted((blake3.blake3(path.relative_to(root).as_posix().encode()).digest(), path) for path in paths)
    for rank, (digest, path) in enumerate(ranked):
        (held_out if rank == 0 or digest[-1] * HELD_OUT_ONE_IN < 256 else train).append(path)
    return train, held_out


def _split_files(root: Path, paths: list[Path]) -> Corpus:
    train, held_out = divide_files(root, paths)
    return _corpus(root, _read_all(train, TRAIN_LIMIT_BYTES), _read_all(held_out, HELD_OUT_LIMIT_BYTES))


def _read_all(paths: list[Path], limit: int) -> bytes:
    """Read the first `limit` bytes of all files, one after the other."""
    content = bytearray()
    for path in paths:
        if len(content) >= limit:
            break
        content += _read(path, limit - len(content))
    return bytes(content)


def _read(path: Path, limit: int) -> bytes:
    """Read up to `limit` bytes of a text file; of one that is not text (it holds NUL bytes), nothing."""
    try:
        with path.open("rb") as file:
            content = file.read(limit)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions, or --data") from None
    return b"" if b"\0" in content[:PROBE_BYTES] else content


def _corpus(root: Path, train: bytes, held_out: bytes) -> Corpus:
    if not train or not held_out:
        remedy = "give a file, or a folder of two text files or more" if root.is_dir() else "give a longer file"
        raise ConfigError(f"{root} holds too little text to train on and hold some out; {remedy}")
    return Corpus(train=_tensor(train), held_out=_tensor(held_out))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def deal_windows(count: int, assignment: Assignment) -> Iterator[int]:
    """Yield window indices below `count`, without end, that no other member of the round is dealt.

    All shuffle the windows alike, by seed and round, and each reads its share of that order (`outsiders`). Only a round
    that uses up all windows begins a second pass, and only there may members' windows repeat.

    Raises `ConfigError` if there are fewer windows than members.
    """
    members = assignment.members
    if not 0 < members <= count:
        raise ConfigError(f"{count} windows of text for {members} members; give it more text with --data")
    generator = torch.Generator().manual_seed(msgspec.structs.replace(assignment, member=0).stream_seed)
    while True:
        yield from share_of_order(torch.randperm(count, generator=generator), assignment).tolist()
