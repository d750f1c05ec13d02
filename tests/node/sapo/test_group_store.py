"""The store of groups: bounds, expiry by rounds, and what survives a restart or a damaged disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from shoal.node.sapo import store as store_module
from shoal.node.sapo.store import GroupStore
from shoal.protocol.errors import StorageError
from shoal.protocol.rollouts import GROUP_LIMIT_BYTES, digest_of


def keep(store: GroupStore, data: bytes) -> bytes:
    digest = digest_of(data)
    store.keep(digest, data)
    return digest


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_groups_survive_a_restart(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "rollouts")
    store.advance(3)
    first = keep(store, b"first")
    store.advance(4)
    second = keep(store, b"second")
    again = GroupStore(tmp_path / "rollouts")
    assert again.disk_bytes == 11
    assert (again.get(first), again.get(second), again.get(bytes(32))) == (b"first", b"second", None)
    assert keep(again, b"first") == first
    assert len(files(tmp_path)) == 2


def test_groups_expire_by_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "HELD_ROUNDS", 2)
    store = GroupStore(tmp_path)
    old = keep(store, b"old")
    store.advance(2)
    assert store.get(old) == b"old"
    young = keep(store, b"young")
    store.advance(3)
    assert (store.get(old), store.get(young)) == (None, b"young")
    store.advance(1)  # rounds never go back
    assert store.disk_bytes == 5
    assert len(store) == 1
    assert files(tmp_path) == [f"2/{young.hex()}"]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_rounds_are_taken_up_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "HELD_ROUNDS", 2)
    store = GroupStore(tmp_path)
    store.advance(10)
    digest = keep(store, b"ten")
    again = GroupStore(tmp_path)
    again.advance(12)
    assert again.get(digest) == b"ten"
    again.advance(13)
    assert again.get(digest) is None
    assert files(tmp_path) == []


def test_disk_and_number_are_bounded_and_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "DISK_LIMIT_BYTES", 300)
    store = GroupStore(tmp_path)
    digests = [keep(store, bytes([at]) * 100) for at in range(5)]
    assert [digest in store for digest in digests] == [False, False, True, True, True]
    assert store.disk_bytes == 300
    assert len(files(tmp_path)) == 3
    monkeypatch.setattr(store_module, "GROUP_LIMIT", 2)
    fewer = GroupStore(tmp_path)
    assert len(fewer) == len(files(tmp_path)) == 2


def test_damaged_and_foreign_files_are_ignored_in_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = GroupStore(tmp_path)
    digests = [keep(store, text) for text in (b"torn", b"swapped", b"whole", b"gone")]
    paths = [tmp_path / "0" / digest.hex() for digest in digests]
    paths[0].write_bytes(b"to")
    paths[1].write_bytes(b"whole")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "0" / ".unfinished").write_text("mine")
    (tmp_path / "0" / ("0" * 64)).write_bytes(bytes(GROUP_LIMIT_BYTES + 1))
    (tmp_path / "0" / ("1" * 64)).symlink_to(paths[2])
    with caplog.at_level(logging.WARNING):
        again = GroupStore(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"4 files in {tmp_path} are no groups and are ignored"
    ]
    caplog.clear()
    paths[3].unlink()
    assert [again.get(digest) for digest in digests] == [None, None, b"whole", None]
    assert [again.get(digest) for digest in digests] == [None, None, b"whole", None]
    assert len(caplog.records) == 3
    assert (tmp_path / "notes.txt").exists()
    assert len(again) == 1


def test_disk_that_cannot_be_written_holds_no_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = GroupStore(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    assert not store.keep(digest_of(b"data"), b"data")
    assert store.get(digest_of(b"data")) is None
    assert store.disk_bytes == 0
    assert files(tmp_path) == []
    assert len(caplog.records) == 1


def test_disk_that_can_only_be_read_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store_module, "HELD_ROUNDS", 1)
    store = GroupStore(tmp_path)
    old = keep(store, b"old")
    store.advance(1)
    for place, name in ((os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(place, name, read_only)
    new = keep(store, b"new")
    store.advance(2)
    assert (store.get(old), store.get(new)) == (None, None)
    assert (store.disk_bytes, len(store)) == (0, 0)
    temporary = tmp_path / "1" / f".{new.hex()}"
    assert [record.getMessage() for record in caplog.records] == [
        f"the file {temporary} stays: Read-only file system",
        f"the group in {tmp_path / '1' / new.hex()} is not held: Read-only file system",
        f"the file {tmp_path / '0' / old.hex()} stays: Read-only file system",
    ]


def test_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use the rollout folder"):
        GroupStore(tmp_path / "file" / "rollouts")


def test_what_was_read_is_neither_read_nor_hashed_again_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MEMORY_LIMIT_BYTES", 300)
    hashed: list[bytes] = []
    monkeypatch.setattr(store_module, "digest_of", lambda data: hashed.append(data) or digest_of(data))
    store = GroupStore(tmp_path)
    groups = [bytes([at]) * 100 for at in range(4)]
    digests = [keep(store, group) for group in groups]
    for digest, group in [*zip(digests[:3], groups[:3], strict=True)] * 2:
        assert store.get(digest) == group
    assert hashed == groups[:3]

    assert (store.get(digests[0]), store.get(digests[3])) == (groups[0], groups[3])
    for digest in digests:
        (tmp_path / "0" / digest.hex()).write_bytes(b"damaged")
    assert [store.get(digest) for digest in digests] == [groups[0], None, groups[2], groups[3]], "the oldest made room"

    store.advance(1 + store_module.HELD_ROUNDS)
    assert [store.get(digest) for digest in digests] == [None] * 4
    again = [keep(store, group * 3) for group in groups[:2]]
    assert [store.get(digest) for digest in again] == [group * 3 for group in groups[:2]]
    for digest in again:
        (tmp_path / str(1 + store_module.HELD_ROUNDS) / digest.hex()).write_bytes(b"damaged")
    assert [store.get(digest) for digest in again] == [None, groups[1] * 3], "what is dropped takes no room"
