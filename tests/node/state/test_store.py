"""The data folder: what a crash, a full disk or a second node does to it, and what is believed afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from shoal.node.state import store as store_module
from shoal.node.state.states import StateShelf
from shoal.node.state.store import RecordLog, Store, write_atomically
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.errors import ConfigError, LocalError, StorageError
from shoal.protocol.messages import Certificate, Term
from shoal.protocol.wire import canonical
from tests.node.ledger import GRID, Ledger, state_of

NOBODY = 65534


def record(round: int, kind: str = "vote") -> DurableRecord:
    return DurableRecord(kind=kind, term=Term(), round=round, view=round % 3)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + blake3(payload).digest(8) + payload


def assert_one_line(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    for word in words:
        assert word in text


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with tmpfs(folder, "size=64k") as disk:
        yield disk


# -- records and their tails ---------------------------------------------------------------------------------


def test_records_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger()
    certificates = []
    with Store(tmp_path) as store:
        for round in range(1, 4):
            store.persist(record(round))
            certificates.append(ledger.certify())
            store.append_certificate(certificates[-1])
        assert store.durable_records() == [record(1), record(2), record(3)]
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1), record(2), record(3)]
        assert store.certificates() == certificates
        chain = ledger.empty_chain()
        for certificate in store.certificates():
            chain.extend(certificate)
        assert chain.head == ledger.chain.head


TAILS: dict[str, Callable[[bytes], bytes]] = {
    "length cut short": lambda whole: whole[:3],
    "check cut short": lambda whole: whole[:11],
    "payload missing": lambda whole: whole[:12],
    "payload cut short": lambda whole: whole[:-1],
    "payload garbled": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "check garbled": lambda whole: whole[:4] + bytes([whole[4] ^ 1]) + whole[5:],
    "zeros": lambda whole: bytes(len(whole)),
    "absurd length": lambda whole: b"\xff" * 4 + whole[4:],
}


@pytest.mark.parametrize("tail", TAILS)
def test_tail_that_a_crash_left_is_cut_and_all_before_it_kept(tmp_path: Path, tail: str) -> None:
    ledger = Ledger()
    first, second, lost = (ledger.certify() for _ in range(3))
    with Store(tmp_path) as store:
        store.persist(record(1))
        store.persist(record(2))
        store.append_certificate(first)
        store.append_certificate(second)
    for name, payload in (("agreement.log", canonical(record(3))), ("chain.log", canonical(lost))):
        with (tmp_path / name).open("ab") as file:
            file.write(TAILS[tail](framed(payload)))
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1), record(2)]
        assert store.certificates() == [first, second]
        store.persist(record(9))  # where the tail was, not after it
        store.append_certificate(lost)
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1), record(2), record(9)]
        assert store.certificates() == [first, second, lost]


def test_log_of_every_length_recovers_whole_records_only(tmp_path: Path) -> None:
    payloads = [bytes([n]) * n for n in range(5)]
    data = b"".join(map(framed, payloads))
    ends = [sum(12 + n for n in range(count)) for count in range(6)]
    path = tmp_path / "log"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        log = RecordLog(path)
        log.close()
        whole = sum(end <= length for end in ends[1:])
        assert log.recovered == payloads[:whole]
        assert path.stat().st_size == ends[whole]


def test_records_that_are_read_back_are_synced_before_they_bind_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that was killed between writing and syncing, and of a log that no folder on the disk names yet."""
    path = tmp_path / "log"
    path.write_bytes(framed(b"vote") + framed(b"promise")[:-1])
    synced: list[tuple[int, int]] = []

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size))

    monkeypatch.setattr(store_module.os, "fsync", fsync)
    log = RecordLog(path)
    assert log.recovered == [b"vote"]
    assert (path.stat().st_ino, len(framed(b"vote"))) in synced
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced]
    log.close()


def test_record_too_long_to_be_read_back_is_not_written(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log")
    log.append(b"before")
    with pytest.raises(LocalError, match="1048577 bytes"):
        log.append(bytes(store_module.RECORD_LIMIT_BYTES + 1))
    log.append(bytes(store_module.RECORD_LIMIT_BYTES))
    log.close()
    again = RecordLog(tmp_path / "log")
    again.close()
    assert [len(payload) for payload in again.recovered] == [6, store_module.RECORD_LIMIT_BYTES]


@pytest.mark.parametrize("payload", [b"", b"\xc1", canonical({"kind": "vote"}), canonical([1, 2])])
def test_whole_record_that_says_nothing_is_a_storage_error(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "agreement.log").write_bytes(framed(payload))
    with pytest.raises(StorageError) as caught:
        Store(tmp_path)
    assert_one_line(caught.value, str(tmp_path / "agreement.log"), "damaged")
    (tmp_path / "agreement.log").unlink()
    (tmp_path / "chain.log").write_bytes(framed(payload))
    with Store(tmp_path) as store:
        with pytest.raises(StorageError) as caught:
            store.certificates()
        assert_one_line(caught.value, str(tmp_path / "chain.log"), "remove it")


# -- what is decided, and the size of the log ----------------------------------------------------------------


def test_decided_rounds_bind_no_more_and_the_log_is_cut_when_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", 2000)
    with Store(tmp_path) as store:
        largest = 0
        for round in range(1, 101):
            store.persist(record(round))
            store.persist(record(round + 1))
            store.decided(msgspec.structs.replace(Ledger().chain.head, round=round))
            assert store.durable_records() == [record(round + 1)]
            largest = max(largest, (tmp_path / "agreement.log").stat().st_size)
        assert largest < 2200
    with Store(tmp_path) as store:
        assert store.durable_records()[-1] == record(101)
        assert not (tmp_path / "agreement.log.partial").exists()


def test_rewrite_that_crashes_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RecordLog(tmp_path / "log")
    for n in range(3):
        log.append(b"%d" % n)

    def crash(path: Path, data: bytes) -> None:
        raise StorageError("the power went")

    monkeypatch.setattr(store_module, "write_atomically", crash)
    with pytest.raises(StorageError):
        log.rewrite([b"new"])
    log.append(b"3")  # the log is what it was, open and all
    log.close()
    again = RecordLog(tmp_path / "log")
    again.close()
    assert again.recovered == [b"0", b"1", b"2", b"3"]


# -- boot, lock ----------------------------------------------------------------------------------------------


def test_boot_counts_starts(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with Store(tmp_path) as store:
            assert store.next_boot() == expected
    assert (tmp_path / "boot").read_text() == "3\n"


@pytest.mark.parametrize("content", [b"", b"x\n", b"\xff\xfe", b"1.5"])
def test_damaged_boot_counter_is_not_started_anew(tmp_path: Path, content: bytes) -> None:
    """A counter that began at 1 again would make every later record of this node an old one."""
    (tmp_path / "boot").write_bytes(content)
    with Store(tmp_path) as store, pytest.raises(StorageError) as caught:
        store.next_boot()
    assert_one_line(caught.value, str(tmp_path / "boot"), "write a larger number")
    assert (tmp_path / "boot").read_bytes() == content


def test_boot_that_cannot_be_read_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    with Store(tmp_path) as store, pytest.raises(StorageError) as caught:
        store.next_boot()
    assert_one_line(caught.value, str(tmp_path))


def test_second_node_on_the_same_folder_is_told_so(tmp_path: Path) -> None:
    with Store(tmp_path) as first:
        first.persist(record(1))
        with pytest.raises(ConfigError) as caught:
            Store(tmp_path)
        assert_one_line(caught.value, f"a node is already running on {tmp_path}", "--data-dir")
        first.persist(record(2))
    with Store(tmp_path) as second:
        assert second.durable_records() == [record(1), record(2)]


# -- disks that do not do ------------------------------------------------------------------------------------


def test_full_disk_is_said_and_nothing_half_written_counts(tiny_disk: Path) -> None:
    ledger = Ledger()
    written: list[Certificate] = []
    promised: list[DurableRecord] = []

    def fill_chain(store: Store) -> None:
        while True:
            certificate = ledger.certify()
            store.append_certificate(certificate)
            written.append(certificate)

    def fill_agreement(store: Store) -> None:
        while True:
            promise = record(len(promised) + 1)
            store.persist(promise)
            promised.append(promise)

    with Store(tiny_disk) as store:
        with pytest.raises(StorageError) as caught:
            fill_chain(store)
        assert_one_line(caught.value, f"the disk under {tiny_disk} is full", "free some space", "--data-dir")
        with pytest.raises(StorageError):
            fill_agreement(store)
        assert store.durable_records() == promised  # what is not on disk was not promised
    assert len(written) > 10
    with Store(tiny_disk) as store:
        assert store.certificates() == written
        assert store.durable_records() == promised


def test_log_goes_on_after_the_disk_has_room_again(tiny_disk: Path) -> None:
    log = RecordLog(tiny_disk / "log")
    log.append(b"before")
    filler = tiny_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(StorageError, match="is full"):
        log.append(bytes(10_000))  # some of it fits into the page that the log has
    filler.unlink()
    log.append(b"after")
    log.close()
    again = RecordLog(tiny_disk / "log")
    again.close()
    assert again.recovered == [b"before", b"after"]


def test_full_disk_keeps_what_is_replaced_as_it_was(tiny_disk: Path) -> None:
    path = tiny_disk / "file"
    write_atomically(path, b"old" * 1000)
    with pytest.raises(StorageError) as caught:
        write_atomically(path, bytes(100_000))
    assert_one_line(caught.value, f"the disk under {tiny_disk} is full")
    assert path.read_bytes() == b"old" * 1000
    assert [entry.name for entry in tiny_disk.iterdir()] == ["file"]
    write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"new" * 1000


def test_full_disk_keeps_the_older_state(tiny_disk: Path) -> None:
    (tiny_disk / "state").mkdir()
    shelf = StateShelf(tiny_disk, GRID.chunk_values)
    first = state_of(1)
    with pytest.raises(StorageError) as caught:
        shelf.save_state(first)  # 80 kB
    assert_one_line(caught.value, "is full")
    assert shelf.saved_rounds() == []
    assert list((tiny_disk / "state").iterdir()) == []


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with tmpfs(folder, "size=64k") as disk:
        with Store(disk) as store:
            store.persist(record(1))
            assert store.next_boot() == 1
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StorageError) as caught:
            Store(disk)
        assert_one_line(caught.value, f"{disk} cannot be written", "--data-dir")
        with pytest.raises(StorageError, match="cannot be written"):
            write_atomically(disk / "boot", b"7")
        assert (disk / "boot").read_text() == "1\n"


def test_folder_of_another_user_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    else:
        folder.chmod(0)
    try:
        with pytest.raises(StorageError) as caught:
            Store(folder)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        else:
            folder.chmod(0o700)
    assert_one_line(caught.value, f"{folder} cannot be written; give this user the folder")


def test_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "node"
    path.write_text("")
    for folder in (path, path / "deeper"):
        with pytest.raises(StorageError) as caught:
            Store(folder)
        assert_one_line(caught.value, str(folder), "choose another --data-dir")


# -- crashes between write and rename ------------------------------------------------------------------------


def test_partial_file_of_a_crash_is_not_taken_for_the_file(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert store.next_boot() == 1
        store.persist(record(1))
    for name, data in (("boot.partial", b"77\n"), ("agreement.log.partial", framed(canonical(record(5))))):
        (tmp_path / name).write_bytes(data)
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1)]
        assert store.next_boot() == 2
    assert not (tmp_path / "boot.partial").exists()


def test_crash_before_the_rename_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    class Crash(BaseException):
        pass

    def crash(self: Path, target: Path) -> Path:
        raise Crash

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(Crash):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_announced_contributions_are_still_known_when_the_log_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a round that is not decided yet: after a restart this node announces the same contribution, or none."""
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", 1)
    announced = DurableRecord(kind="ready", term=Term(), round=7)
    with Store(tmp_path) as store:
        store.persist(record(6))
        store.persist(announced)
        store.decided(msgspec.structs.replace(Ledger().chain.head, round=6))
        assert store.durable_records() == [announced]
    with Store(tmp_path) as store:
        assert store.durable_records() == [announced]
