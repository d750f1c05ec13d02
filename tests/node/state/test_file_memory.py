"""Memory in nameless files: it holds what is written, has no name, and counts as pages of a file."""

from __future__ import annotations

import errno
import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.collectives.memory import VectorPool
from shoal.node.state import file_memory as module
from shoal.node.state.file_memory import file_memory
from shoal.protocol.errors import DiskFull

SIZE = 32 << 20
OTHER_BYTES = 4 << 20
"""What a test allocates besides."""


def resident_bytes(*kinds: str) -> int:
    """Resident memory of this process, of these kinds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in kinds)


def test_it_begins_as_zeros_holds_what_is_written_and_has_no_name(tmp_path: Path) -> None:
    memory = file_memory(tmp_path, 10_000)
    assert bytes(memory) == bytes(10_000)
    memory[:] = bytes(range(250)) * 40
    other = file_memory(tmp_path, 10_000)
    assert bytes(memory) == bytes(range(250)) * 40
    assert bytes(other) == bytes(10_000)
    assert list(tmp_path.iterdir()) == []


def test_pages_of_it_are_pages_of_a_file_and_no_memory_of_the_process(tmp_path: Path) -> None:
    anonymous, in_files = resident_bytes("RssAnon"), resident_bytes("RssFile", "RssShmem")  # where /tmp is a tmpfs
    memory = file_memory(tmp_path, SIZE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    assert resident_bytes("RssFile", "RssShmem") - in_files >= SIZE
    assert resident_bytes("RssAnon") - anonymous < OTHER_BYTES


def test_vectors_of_it_use_memory_again_when_they_are_gone(tmp_path: Path) -> None:
    vectors = VectorPool(1, partial(file_memory, tmp_path))
    vector = vectors.take(5000)
    vector[:] = 3
    place = vector.ctypes.data
    del vector
    assert vectors.take(5000).ctypes.data == place


def test_room_is_taken_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill a process that changes a page for which there is no room."""

    def full(file: int, begin: int, size: int) -> None:
        assert (begin, size) == (0, 10_000)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=f"the disk under {tmp_path} is full; free some space"):
        file_memory(tmp_path, 10_000)


def test_where_files_cannot_be_mapped_it_is_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> mmap.mmap:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(module.mmap, "mmap", unable)
    monkeypatch.setattr(module, "own_memory", lambda size: memoryview(bytearray(size)))
    memory = file_memory(tmp_path, 10_000)
    memory[:] = b"!" * 10_000
    assert bytes(memory) == b"!" * 10_000
