"""Files of tensors that are made where they lie: the same file as one that is written, whole or not there."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from shoal.node.state import file_memory, tensor_files
from shoal.node.state.file_memory import NamedMemory, Unmappable
from shoal.node.state.tensor_files import TensorBytes, TensorFile, TensorPlace, TensorsInPlace, write_tensors
from shoal.protocol.errors import DiskFull, StorageError
from tests.node.state.test_store import tiny_disk  # noqa: F401  a fixture

METADATA = {"of": "a test"}


def tensors(large: bool = False) -> list[TensorBytes]:
    """Of all widths, and not in the order in which they lie."""
    rows = 1 << 20 if large else 7
    return [
        TensorBytes.of("bytes", np.arange(5, dtype=np.uint8)),
        TensorBytes.of("matrix", np.arange(3 * rows, dtype=np.float32).reshape(3, rows)),
        TensorBytes.of("none", np.zeros(0, np.float32)),
        TensorBytes.of("steps", np.arange(11, dtype=np.int64)),
        TensorBytes.of("again", np.full(9, -1, np.float32)),
    ]


def in_place(path: Path, large: bool = False) -> TensorsInPlace:
    """A file in the making, with all of them in their places."""
    wanted = tensors(large)
    made = TensorsInPlace(path, [TensorPlace(one.name, one.dtype, one.shape) for one in wanted], METADATA)
    for one in wanted:
        made.place(one.name)[:] = one.data
    return made


@pytest.mark.parametrize("large", [False, True])
def test_file_made_in_place_is_the_one_that_is_written(
    tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "SYNC_BYTES", 1 << 20)
    made, written = tmp_path / "made", tmp_path / "written"
    size = in_place(made, large).finish()
    assert size == write_tensors(written, tensors(large), METADATA) == made.stat().st_size
    assert made.read_bytes() == written.read_bytes()
    TensorFile(made).check_whole()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "written"]


def test_nothing_has_the_files_name_before_all_of_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, steps = tmp_path / "file", list[str]()
    path.write_bytes(b"old")
    sync, folder = NamedMemory.sync, tensor_files.sync_folder

    def sync_memory(memory: NamedMemory, piece_bytes: int) -> None:
        assert path.read_bytes() == b"old"
        assert len(memory.data) == (tmp_path / "file.partial").stat().st_size
        sync(memory, piece_bytes)
        steps.append("synced")

    def sync_folder(where: Path) -> None:
        TensorFile(path).check_whole()
        folder(where)
        steps.append(f"named in {where.name}")

    monkeypatch.setattr(NamedMemory, "sync", sync_memory)
    monkeypatch.setattr(tensor_files, "sync_folder", sync_folder)
    in_place(path).finish()
    assert steps == ["synced", f"named in {tmp_path.name}"]


def test_every_piece_is_synced_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = list[tuple[int, int]]()

    class Mapping(mmap.mmap):
        def flush(self, begin: int = 0, size: int = 0) -> None:
            pieces.append((begin, size))

    monkeypatch.setattr(file_memory.mmap, "mmap", Mapping)
    NamedMemory(tmp_path / "file", 10_000).sync(4096)
    assert pieces == [(0, 4096), (4096, 4096), (8192, 1808)]


def test_spare_file_becomes_the_one_that_is_made_if_it_is_large_enough(tmp_path: Path) -> None:
    wanted = tensors()
    places = [TensorPlace(one.name, one.dtype, one.shape) for one in wanted]
    size = write_tensors(tmp_path / "written", wanted, METADATA)
    for extra, taken in ((5000, True), (0, True), (-1, False)):
        spare = NamedMemory(tmp_path / "spare", size + extra)
        spare.touch()
        spare.data[-7:] = b"rubbish"
        node = (tmp_path / "spare").stat().st_ino
        made = TensorsInPlace(tmp_path / "made", places, METADATA, spare=spare)
        for one in wanted:
            made.place(one.name)[:] = one.data
        assert made.finish() == size
        assert (tmp_path / "made").read_bytes() == (tmp_path / "written").read_bytes()
        assert ((tmp_path / "made").stat().st_ino == node) == taken
        assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "written"]


def test_what_is_abandoned_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    in_place(path).abandon()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"old")]


def test_a_disk_without_room_is_told_before_anything_is_copied(tiny_disk: Path) -> None:  # noqa: F811
    with pytest.raises(DiskFull, match="is full; free some space"):
        in_place(tiny_disk / "file", large=True)
    assert list(tiny_disk.iterdir()) == []


def test_a_file_system_without_such_files_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, begin: int, size: int) -> None:
        raise OSError(file_memory.errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(Unmappable) as caught:
        in_place(tmp_path / "file")
    assert isinstance(caught.value, StorageError)
    assert list(tmp_path.iterdir()) == []
