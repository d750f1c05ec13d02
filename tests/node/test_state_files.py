"""Finals as they are written: there whole, or not there."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.finals import Finals
from shoal.node import state_files
from shoal.node.state_files import FinalsWriter, read_finals
from shoal.protocol.errors import LocalError, StorageError
from tests.node.ledger import Ledger


@pytest.fixture
def finals() -> Finals:
    ledger = Ledger()
    ledger.certify()
    return ledger.finals[1]


def payloads(finals: Finals) -> list[bytes]:
    return [chunk.payload.tobytes() for chunk in finals.chunks]


def test_file_is_there_only_when_finished(tmp_path: Path, finals: Finals) -> None:
    path = tmp_path / "finals"
    writer = FinalsWriter(path, finals.plan)
    for chunk in (2, 0, 2, 1):
        assert not path.exists()
        writer.add(chunk, finals.chunks[chunk].payload)
    writer.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["finals"]
    after = read_finals(path)
    assert after.plan == finals.plan
    assert payloads(after) == payloads(finals)


def test_file_lacking_a_chunk_is_not_finished(tmp_path: Path, finals: Finals) -> None:
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    writer.add(1, finals.chunks[1].payload)
    with pytest.raises(LocalError, match="only 1 of 3"):
        writer.finish()
    writer._thread.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_payload_of_another_size_is_our_bug(tmp_path: Path, finals: Finals) -> None:
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    with pytest.raises(LocalError):
        writer.add(0, finals.chunks[2].payload)
    writer.abandon()


def test_abandoned_file_is_removed_and_the_writer_deaf(tmp_path: Path, finals: Finals) -> None:
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    writer.add(0, finals.chunks[0].payload)
    writer.abandon()
    writer.abandon()
    writer.add(1, finals.chunks[1].payload)
    writer._thread.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_abandoning_what_is_finished_leaves_it(tmp_path: Path, finals: Finals) -> None:
    path = tmp_path / "finals"
    for _ in range(2):  # the second time over the first
        writer = FinalsWriter(path, finals.plan)
        for chunk, final in enumerate(finals.chunks):
            writer.add(chunk, final.payload)
        writer.finish()
        writer.abandon()
        assert payloads(read_finals(path)) == payloads(finals)


def test_add_and_abandon_do_not_wait_for_the_disk(
    tmp_path: Path, finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    real = os.pwrite

    def slow(file: int, data: memoryview, offset: int) -> int:
        assert disk.wait(10)
        return real(file, data, offset)

    monkeypatch.setattr(state_files.os, "pwrite", slow)
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    for chunk, final in enumerate(finals.chunks):
        writer.add(chunk, final.payload)
    writer.abandon()
    assert not disk.is_set()
    disk.set()
    writer._thread.shutdown()
    assert list(tmp_path.iterdir()) == []


ORDER = ["pwrite", "fsync", "replace", "fsync folder"]


def test_file_is_synced_before_it_has_its_name_and_the_folder_after(
    tmp_path: Path, finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            if not done or done[-1] != name:
                done.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(state_files.os, "pwrite", noting("pwrite", os.pwrite))
    monkeypatch.setattr(state_files, "sync_and_release", noting("fsync", state_files.sync_and_release))
    monkeypatch.setattr(Path, "replace", noting("replace", Path.replace))
    monkeypatch.setattr(state_files, "sync_folder", noting("fsync folder", state_files.sync_folder))
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    for chunk, final in enumerate(finals.chunks):
        writer.add(chunk, final.payload)
    writer.finish()
    assert done == ORDER


def test_large_finals_are_synced_along_the_way(tmp_path: Path, finals: Finals, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(state_files, "SYNC_BYTES", 6000)
    monkeypatch.setattr(state_files, "sync_and_release", lambda file: synced.append(os.fstat(file).st_size))
    writer = FinalsWriter(tmp_path / "finals", finals.plan)
    for chunk, final in enumerate(finals.chunks):
        writer.add(chunk, final.payload)
    writer.finish()
    assert len(synced) == 2
    assert synced[0] < synced[1] == (tmp_path / "finals").stat().st_size


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_said_and_leaves_nothing(tiny_disk: Path, finals: Finals) -> None:
    writer = FinalsWriter(tiny_disk / "finals", finals.plan)
    for chunk, final in enumerate(finals.chunks):
        writer.add(chunk, final.payload)
    with pytest.raises(StorageError, match="is full"):
        writer.finish()
    assert list(tiny_disk.iterdir()) == []


def test_folder_that_is_gone_is_said(tmp_path: Path, finals: Finals) -> None:
    writer = FinalsWriter(tmp_path / "none" / "finals", finals.plan)
    for chunk, final in enumerate(finals.chunks):
        writer.add(chunk, np.array(final.payload))
    with pytest.raises(StorageError):
        writer.finish()
