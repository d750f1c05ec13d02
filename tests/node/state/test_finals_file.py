"""Finals as they are written: there whole, or not there."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.collectives.codecs import U8
from shoal.collectives.finals import Finals
from shoal.node.state import finals_file
from shoal.node.state.finals_file import DirectFile, FinalsFile, FinalsWriter, read_finals
from shoal.protocol.errors import StorageError
from shoal.protocol.wire import canonical
from tests.node.ledger import Ledger
from tests.small_disk import small_disk

DEADLINE_S = 60.0


@pytest.fixture
def finals() -> Finals:
    ledger = Ledger()
    ledger.certify()
    return ledger.finals[1]


def payloads(finals: Finals) -> list[bytes]:
    return [chunk.payload.tobytes() for chunk in finals.chunks]


def written(writer: FinalsWriter) -> None:
    """Return when its thread has done what it does."""
    writer._thread.shutdown()


def test_file_is_there_only_when_finished(tmp_path: Path, finals: Finals) -> None:
    path = tmp_path / "finals"
    for _ in range(2):  # the second time over the first
        before = path.read_bytes() if path.exists() else None
        writer = FinalsWriter(path, finals)
        written(writer)
        assert (path.read_bytes() if path.exists() else None) == before
        writer.finish()
        assert [entry.name for entry in tmp_path.iterdir()] == ["finals"]
        after = read_finals(path)
        assert after.plan == finals.plan
        assert payloads(after) == payloads(finals)
        writer.abandon()
        assert payloads(read_finals(path)) == payloads(finals)


def test_writers_of_the_same_plan_are_not_in_each_others_way(tmp_path: Path, finals: Finals) -> None:
    path = tmp_path / "finals"
    first, second = FinalsWriter(path, finals), FinalsWriter(path, finals)
    written(first)
    written(second)
    first.abandon()
    second.finish()
    assert payloads(read_finals(path)) == payloads(finals)
    assert [entry.name for entry in tmp_path.iterdir()] == ["finals"]


def test_writer_knows_the_very_finals_that_it_writes(tmp_path: Path, finals: Finals) -> None:
    writer = FinalsWriter(tmp_path / "finals", finals)
    again = Finals(plan=finals.plan, chunks=tuple(finals.chunks))
    fetched = Finals.open(finals.plan, payloads(finals))
    other_plan = Finals(plan=msgspec.structs.replace(finals.plan, attempt=1), chunks=finals.chunks)
    assert [writer.writes(one) for one in (finals, again, fetched, other_plan)] == [True, True, False, False]
    writer.finish()


def test_file_is_served_as_it_is_read(tmp_path: Path, finals: Finals) -> None:
    path = tmp_path / "finals"
    FinalsWriter(path, finals).finish()
    file = FinalsFile(path)
    assert file.plan == finals.plan
    assert [bytes(file.payload(chunk) or b"") for chunk in range(3)] == payloads(finals)
    assert (file.payload(3), file.payload(-1)) == (None, None)


def test_file_of_an_earlier_release_with_nothing_between_payloads_is_read(tmp_path: Path, finals: Finals) -> None:
    head = canonical(finals.plan)
    (tmp_path / "finals").write_bytes(len(head).to_bytes(4, "little") + head + b"".join(payloads(finals)))
    assert payloads(read_finals(tmp_path / "finals")) == payloads(finals)
    file = FinalsFile(tmp_path / "finals")
    assert [bytes(file.payload(chunk) or b"") for chunk in range(3)] == payloads(finals)


@pytest.mark.parametrize("size", [0, 3, 100, -1, 1])
def test_file_of_another_size_is_none(tmp_path: Path, finals: Finals, size: int) -> None:
    path = tmp_path / "finals"
    FinalsWriter(path, finals).finish()
    data = path.read_bytes()
    path.write_bytes(data + b"x" if size == 1 else data[:size])
    for read in (read_finals, FinalsFile):
        with pytest.raises((ValueError, finals_file.RemoteError)):
            read(path)


@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_abandoned_file_is_removed_and_nobody_waits_for_the_disk(
    tmp_path: Path, finals: Finals, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    arrived, disk = threading.Event(), threading.Event()
    real = DirectFile.append
    pieces: list[int] = []

    def slow(file: DirectFile, data: U8) -> None:
        pieces.append(len(data))
        if len(pieces) == {"before": 1, "in the middle": 3, "after": 9}[when]:
            arrived.set()
            assert disk.wait(DEADLINE_S)
        real(file, data)

    monkeypatch.setattr(DirectFile, "append", slow)
    writer = FinalsWriter(tmp_path / "finals", finals)
    if when == "after":
        written(writer)
    else:
        assert arrived.wait(DEADLINE_S)
    writer.abandon()
    writer.abandon()
    assert not disk.is_set()
    disk.set()
    written(writer)
    assert len(pieces) == {"before": 1, "in the middle": 3, "after": 4}[when]
    assert list(tmp_path.iterdir()) == []


ORDER = ["write", "fsync", "replace", "fsync folder"]


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

    monkeypatch.setattr(DirectFile, "_write_some", noting("write", DirectFile._write_some))
    monkeypatch.setattr(finals_file, "sync_and_release", noting("fsync", finals_file.sync_and_release))
    monkeypatch.setattr(Path, "replace", noting("replace", Path.replace))
    monkeypatch.setattr(finals_file, "sync_folder", noting("fsync folder", finals_file.sync_folder))
    FinalsWriter(tmp_path / "finals", finals).finish()
    assert done == ORDER


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        yield disk


def test_full_disk_is_said_and_leaves_nothing(tiny_disk: Path, finals: Finals) -> None:
    with pytest.raises(StorageError, match="is full"):
        FinalsWriter(tiny_disk / "finals", finals).finish()
    assert list(tiny_disk.iterdir()) == []


def test_folder_that_is_gone_is_said(tmp_path: Path, finals: Finals) -> None:
    with pytest.raises(StorageError):
        FinalsWriter(tmp_path / "none" / "finals", finals).finish()


def test_finals_lie_in_their_file_once_it_is_there_and_their_memory_is_free(tmp_path: Path, finals: Finals) -> None:
    before, signed = payloads(finals), [chunk.statement for chunk in finals.chunks]
    memory = [weakref.ref(chunk.payload) for chunk in finals.chunks]
    writer = FinalsWriter(tmp_path / "finals", finals)
    written(writer)
    assert all(one() is not None for one in memory)
    writer.finish()
    del writer
    gc.collect()
    assert [one() for one in memory] == [None] * len(memory)
    assert payloads(finals) == before
    assert [chunk.encoded.tobytes() for chunk in finals.chunks] == [
        data[: chunk.encoded.size] for data, chunk in zip(before, finals.chunks, strict=True)
    ]
    assert [chunk.statement for chunk in finals.chunks] == signed
    assert all(chunk.intact and not chunk.payload.flags.writeable for chunk in finals.chunks)


def test_finals_stay_in_memory_where_their_file_cannot_be_mapped(
    tmp_path: Path, finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(path: Path) -> memoryview:
        raise OSError(errno.ENODEV, "no such device")

    before = [chunk.payload for chunk in finals.chunks]
    monkeypatch.setattr(finals_file, "_mapped", unable)
    writer = FinalsWriter(tmp_path / "finals", finals)
    writer.finish()
    assert all(chunk.payload is one for chunk, one in zip(finals.chunks, before, strict=True))
