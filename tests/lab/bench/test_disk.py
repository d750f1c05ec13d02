"""Disk of a node: files by the folder that they lie in, holes left out, and what has no name and is open."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.lab.bench.disk import NAMELESS, REST, on_disk
from shoal.node.state.file_memory import file_memory

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_files_count_by_folder_once_and_as_far_as_they_take_room(tmp_path: Path) -> None:
    folder, other = tmp_path / "node", tmp_path / "other"
    for name in ("state", "finals", "checkpoints/0.0-1"):
        (folder / name).mkdir(parents=True)
    other.mkdir()
    (folder / "finals" / "1").write_bytes(os.urandom(MIB))
    with (folder / "state" / "0").open("wb") as file:
        file.truncate(8 * MIB)  # a hole
    (folder / "state" / "1").write_bytes(os.urandom(2 * MIB))
    (folder / "checkpoints" / "0.0-1" / "state").hardlink_to(folder / "state" / "1")
    (folder / "log").write_bytes(os.urandom(MIB))
    held, elsewhere = file_memory(folder, 4 * MIB), file_memory(other, MIB)
    found = on_disk(folder, [os.getpid(), 1 << 30])
    assert held.nbytes + elsewhere.nbytes == 5 * MIB
    assert {kind: size // MIB for kind, size in found.kinds.items() if size} == {
        "finals": 1,
        "state": 2,
        REST: 1,
        NAMELESS: 4,
    }
    assert (found.total // MIB, found.apparent) == (8, 16 * MIB)
    del held
    assert NAMELESS not in on_disk(folder, [os.getpid()]).kinds
