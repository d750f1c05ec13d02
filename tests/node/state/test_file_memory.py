"""Memory in nameless files: it holds what is written, has no name, and counts as pages of a file."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.collectives.memory import F32, VectorPool
from shoal.node.state import file_memory as module
from shoal.node.state.file_memory import FilePool, file_memory, give_name, mapping_of
from shoal.protocol.errors import DiskFull
from tests.node.simulated_disk import Disks, Fault, PowerCut, Survival

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


def test_a_file_has_its_name_only_when_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power goes at each operation in turn: the old file is there, or the new one, whole."""
    old, new, disks, found = b"old" * 1000, b"new" * 5000, Disks(monkeypatch), list[bytes]()
    for at in range(1, 20):
        root = tmp_path / str(at)
        root.mkdir()
        (root / "file").write_bytes(old)
        disk = disks.add(root, random.Random(at))
        memory = file_memory(root, len(new))
        memory[:] = new
        mapping = mapping_of(memory)
        assert mapping is not None
        disk.faults[disk.operations + at] = Fault.CUT
        with suppress(PowerCut):
            assert give_name(mapping, root / "file")
        disk.copy_survivors(tmp_path / f"after{at}", Survival.SYNCED)
        found.append((tmp_path / f"after{at}" / "file").read_bytes())
        disks.remove(disk)
        if not disk.dead:
            break
    assert set(found[:-1]) == {old}
    assert found[-1] == new


class Threads:
    """numpy and the making of files, as a test's thread and another see them: the other waits where it is told to."""

    def __init__(self, waits_at: str) -> None:
        self.other: threading.Thread | None = None
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.made, self.touched = list[int](), 0
        self._waits_at = waits_at

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def frombuffer(self, memory: memoryview, dtype: Any) -> Any:
        if threading.current_thread() is self.other:
            self.touched += 1
            self._wait("as it gets its pages")
        return np.frombuffer(memory, dtype)

    def file_memory(self, folder: Path, size: int) -> memoryview:
        self.made.append(size)
        self._wait("as it is made")
        return file_memory(folder, size)

    def _wait(self, where: str) -> None:
        if where == self._waits_at and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(30)


@pytest.mark.parametrize("at", ["as it is made", "as it gets its pages"])
def test_memory_that_is_made_ready_is_what_is_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A state is begun while the one before is saved: with a file of its own for each there would be four states."""
    threads, taken = Threads(at), list[F32]()
    monkeypatch.setattr(module, "file_memory", threads.file_memory)
    monkeypatch.setattr(module, "np", threads)
    numel = 2 * module.TOUCHED_BYTES
    pool = FilePool(tmp_path, 4096, kept=1)
    threads.other = threading.Thread(target=pool.prepare, args=(numel,))
    taking = threading.Thread(target=lambda: taken.append(pool.take(numel)))
    threads.other.start()
    assert threads.reached.wait(30)
    taking.start()
    taking.join(0.2)
    assert taking.is_alive()
    threads.go_on.set()
    taking.join(30)
    threads.other.join(30)
    assert len(threads.made) == 1
    assert threads.touched == (1 if at == "as it gets its pages" else 0)
    assert not taken[0].any()


def test_what_cannot_be_named_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a file system has no such files: then a copy is written."""
    monkeypatch.setattr(os, "O_TMPFILE", 0)
    memory = file_memory(tmp_path, 10_000)
    mapping = mapping_of(memory)
    assert mapping is not None
    assert not give_name(mapping, tmp_path / "file")
    assert not mapping.is_named
    assert list(tmp_path.iterdir()) == []


def test_memory_is_made_ready_only_up_to_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def count(folder: Path, size: int) -> memoryview:
        made.append(size)
        return file_memory(folder, size)

    monkeypatch.setattr(module, "file_memory", count)
    pool, taken = FilePool(tmp_path, 4096, together=2, kept=2), list[F32]()
    for _ in range(3):
        pool.prepare(5000)
        taken += pool.take_together(5000, 2)
    assert len(made) == 3
    pool.prepare(5000)
    pool.prepare(5000)
    assert len(made) == 3
    del taken[:4]  # two files are gone, of which one is memory for the next
    pool.prepare(5000)
    assert len(made) == 3
    pool.take_together(5000, 2)
    assert len(made) == 3


def test_memory_that_was_made_ready_and_is_let_go_takes_no_room(tmp_path: Path) -> None:
    """As before the first round: what is made ready is for a state, and S(0) has a vector of its own."""
    pool = FilePool(tmp_path, 4096, together=2)
    pool.prepare(5000)
    first = pool.take(5000)
    assert [mapping_of(first)] == list(pool._files)
