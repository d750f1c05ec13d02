"""The data folder: what a crash, a full disk or a second node does to it, and what is believed afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from shoal.collectives.memory import own_array
from shoal.node.state import store as store_module
from shoal.node.state.states import StateCache
from shoal.node.state.store import (
    PAGE_BYTES,
    SYNC_BYTES,
    Fault,
    RecordLog,
    Store,
    disk_errors,
    frame_batch,
    read_frames,
    write_atomically,
)
from shoal.protocol.durable import ABSTAIN, DurableRecord
from shoal.protocol.errors import ConfigError, DiskFull, LocalError, StorageError
from shoal.protocol.messages import Certificate, Term
from shoal.protocol.wire import canonical
from tests.node.ledger import GRID, Ledger, state_of
from tests.small_disk import small_disk

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


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 64 KiB."""
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
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


def batched(number: int, *payloads: bytes) -> bytes:
    return frame_batch(number, payloads)


TORN: dict[str, Callable[[bytes], bytes]] = {
    "magic cut short": lambda whole: whole[:3],
    "head cut short": lambda whole: whole[:31],
    "body missing": lambda whole: whole[:48],
    "body cut short": lambda whole: whole[:-1],
    "zeros": lambda whole: bytes(len(whole)),
    "blocks that were never written": lambda whole: whole[:60] + bytes(len(whole) - 60),
}
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "body garbled": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "check garbled": lambda whole: whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
    "another number": lambda whole: whole[:4] + b"\7" + whole[5:],
    "absurd length": lambda whole: whole[:12] + b"\xff" * 4 + whole[16:],
    "no magic": lambda whole: b"\xff" * 4 + whole[4:],
}


@pytest.mark.parametrize("tail", TORN)
def test_tail_that_a_crash_left_is_cut_with_a_line_and_all_before_it_kept(
    tmp_path: Path, tail: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    first, second, lost = (ledger.certify() for _ in range(3))
    vote = DurableRecord(kind="vote", term=Term(), round=3, value=lost.value)
    with Store(tmp_path) as store:
        store.persist(record(1))
        store.persist(record(3))
        store.append_certificate(first)
        store.append_certificate(second)
    for name, payload in (("agreement.log", canonical(vote)), ("chain.log", canonical(lost))):
        with (tmp_path / name).open("ab") as file:
            file.write(TORN[tail](batched(2, payload)))
    with Store(tmp_path) as store:
        assert caplog.text.count("was cut short by a crash, and is cut off") == 2
        assert store.damage == []
        assert not store.abstains((Term(), 3))
        assert store.durable_records() == [record(1), record(3)]
        assert store.certificates() == [first, second]
        store.persist(vote)  # where the tail was, not after it
        store.append_certificate(lost)
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1), record(3), vote]
        assert store.certificates() == [first, second, lost]


@pytest.mark.parametrize("tail", DAMAGED)
def test_last_record_that_does_not_hold_though_nothing_of_it_lacks_is_damage(tmp_path: Path, tail: str) -> None:
    ledger = Ledger()
    with Store(tmp_path) as store:
        store.append_certificate(ledger.certify())
        store.persist(record(2))
    with (tmp_path / "agreement.log").open("ab") as file:
        file.write(DAMAGED[tail](batched(1, canonical(record(2, "promise")))))
    for _ in range(2):  # it is not forgotten at the next start
        with Store(tmp_path) as store:
            assert store.abstains((Term(), 2))
            assert [one.kind for one in store.bound_in((Term(), 2))] == [ABSTAIN]
            assert not store.abstains((Term(), 3))
            assert record(2) in store.durable_records()
    assert (tmp_path / "agreement.log.damaged").exists()
    with Store(tmp_path) as store:
        store.append_certificate(ledger.certify())
        store.decided(ledger.chain.head)
        assert store.durable_records() == []
        store.persist(record(3))
    with Store(tmp_path) as store:
        assert store.bound_in((Term(), 3)) == [record(3)]


def test_crash_while_a_damaged_log_is_mended_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path) as store:
        store.persist(record(1, "promise"))
        store.persist(record(1))
    path = tmp_path / "agreement.log"
    path.write_bytes(next(islice(bits(path.read_bytes()), 500, None)))

    def crash(path: Path, *parts: bytes) -> None:
        raise StorageError("the power went")

    for failing in ("copy", "log"):
        kept = write_atomically
        monkeypatch.setattr(
            store_module,
            "write_atomically",
            lambda to, *parts: (crash if failing == "copy" or to == path else kept)(to, *parts),  # noqa: B023
        )
        with pytest.raises(StorageError, match="the power went"):
            Store(tmp_path)
    monkeypatch.undo()
    with Store(tmp_path) as store:
        assert store.abstains((Term(), 1))
        assert record(1) in store.durable_records()


@pytest.mark.parametrize("old", [True, False])
def test_log_of_every_length_recovers_whole_records_only(tmp_path: Path, old: bool) -> None:
    payloads = [bytes([n]) * n for n in range(1, 6)]
    frames = [framed(one) if old else batched(number, one) for number, one in enumerate(payloads)]
    data = b"".join(frames)
    ends = [sum(map(len, frames[:count])) for count in range(6)]
    path = tmp_path / "log"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        log = RecordLog(path)
        log.close()
        whole = sum(end <= length for end in ends[1:])
        assert not log.damaged
        assert log.recovered == payloads[:whole]
        assert path.stat().st_size == ends[whole]


def bits(data: bytes) -> Iterator[bytes]:
    """`data` with each of its bits flipped, one at a time."""
    for at in range(8 * len(data)):
        yield data[: at // 8] + bytes([data[at // 8] ^ (1 << at % 8)]) + data[at // 8 + 1 :]


LOGS = {
    "batches": batched(0, b"one", b"two") + batched(1, b"three" * 20) + batched(2, b"four"),
    "0.1.0": framed(b"one" * 9) + framed(b"two") + framed(b"three" * 20),
    "both": framed(b"one" * 9) + framed(b"two") + batched(0, b"three" * 20) + batched(1, b"four"),
    "one batch": batched(0, b"one"),
}


@pytest.mark.parametrize("name", LOGS)
def test_bit_that_flips_anywhere_in_a_log_is_never_taken_for_a_crash(name: str) -> None:
    whole = read_frames(LOGS[name])
    assert whole.fault is None
    assert len(whole.records) >= 1
    for data in bits(LOGS[name]):
        reading = read_frames(data)
        assert reading.fault is Fault.DAMAGED
        assert len(reading.records) + len(reading.later) < len(whole.records)
        assert {*reading.records, *reading.later} < set(whole.records)


def test_batch_that_is_missing_between_two_others_is_damage() -> None:
    batches = [batched(n, b"%d" % n) for n in range(4)]
    for missing in range(3):
        reading = read_frames(b"".join(one for n, one in enumerate(batches) if n != missing))
        assert reading.fault is Fault.DAMAGED
        assert len(reading.records) + len(reading.later) == 3
    assert read_frames(b"".join(batches[:3])).fault is None


@pytest.mark.parametrize("name", ["agreement.log", "chain.log"])
def test_bit_that_flips_anywhere_forgets_nothing_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a member in the middle of round 2, and one that chain.log alone tells that rounds are over."""
    monkeypatch.setattr(store_module.os, "fsync", lambda file: None)
    monkeypatch.setattr(store_module.logger, "error", lambda *told: None)
    ledger = Ledger()
    due = (Term(), 2)
    with Store(tmp_path) as store:
        store.append_certificate(ledger.certify())
        store.persist(record(2, "ready"))
        store.persist(record(2, "promise"), record(2))
        store.persist(record(2, "propose"))
        bound = store.bound_in(due)
    files = {one: (tmp_path / one).read_bytes() for one in ("agreement.log", "chain.log")}
    assert {read_frames(flipped).fault for flipped in bits(files[name])} == {Fault.DAMAGED}
    for flipped in islice(bits(files[name]), 3, None, 101):
        for one, data in files.items():
            (tmp_path / one).write_bytes(flipped if one == name else data)
        with Store(tmp_path) as store:
            assert len(store.damage) == 1
            if name == "chain.log":  # the first round is over, whatever the log has to be fetched again
                assert store.certificates() == []
                assert store.abstains((Term(), 1))
                assert store.bound_in(due) == bound
            else:
                assert store.abstains(due)
            assert not store.abstains((Term(), 3))


@pytest.mark.parametrize("cut_short", [False, True])
def test_both_logs_damaged_may_have_bound_the_node_a_round_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: bool
) -> None:
    ledger = Ledger()
    with Store(tmp_path) as store:
        store.append_certificate(ledger.certify())
        store.append_certificate(ledger.certify())
        store.persist(record(3))
    for name in ("agreement.log", "chain.log"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if cut_short:  # the disk is full once the first of the two is rewritten
        rewrite = RecordLog.rewrite
        with monkeypatch.context() as patch:
            patch.setattr(RecordLog, "rewrite", full_at("chain.log", rewrite))
            with pytest.raises(StorageError, match="full"):
                Store(tmp_path)
    with Store(tmp_path) as store:
        assert len(store.damage) == 2 - cut_short
        assert [store.abstains((Term(), round)) for round in (1, 2, 3, 4)] == [True, True, True, False]


def full_at(name: str, rewrite: Callable[[RecordLog, Sequence[bytes]], None]) -> Callable[..., None]:
    def write(log: RecordLog, payloads: Sequence[bytes]) -> None:
        if log._path.name == name:
            raise StorageError("the disk is full; make room")
        rewrite(log, payloads)

    return write


def test_chain_that_was_removed_brings_no_round_back_to_be_signed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", 1)
    ledger = Ledger()
    with Store(tmp_path) as store:
        for round in (1, 2):
            store.persist(record(round))
            store.append_certificate(ledger.certify())
            store.decided(ledger.chain.head)
        assert store.durable_records() == []
    (tmp_path / "chain.log").unlink()
    with Store(tmp_path) as store:
        assert [store.abstains((Term(), round)) for round in (1, 2, 3)] == [True, True, False]
        assert store.durable_records() == []


def test_user_decides_that_a_node_signs_again_and_what_is_known_still_binds(tmp_path: Path) -> None:
    ledger = Ledger()
    with Store(tmp_path) as store:
        store.append_certificate(ledger.certify())
        store.persist(record(2, "promise"))
        store.persist(record(2))
    data = (tmp_path / "agreement.log").read_bytes()
    (tmp_path / "agreement.log").write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    with Store(tmp_path) as store:
        assert store.abstains((Term(), 2))
        store.forget_promises(ledger.chain.head)
        assert store.bound_in((Term(), 2)) == [record(2)]
    with Store(tmp_path) as store:
        assert store.bound_in((Term(), 2)) == [record(2)]
        assert store.damage == []


def test_records_of_one_batch_are_synced_once_and_are_all_there_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with Store(tmp_path) as store:
        store.persist(record(1))
        monkeypatch.setattr(store_module.os, "fsync", synced.append)
        store.persist(record(2), record(3), record(4))
        monkeypatch.undo()
        assert len(synced) == 1
        assert store.durable_records() == [record(n) for n in (1, 2, 3, 4)]
    data = (tmp_path / "agreement.log").read_bytes()
    (tmp_path / "agreement.log").write_bytes(data[:-5])
    with Store(tmp_path) as store:
        assert store.durable_records() == [record(1)]


def test_logs_of_the_release_before_are_read_and_go_on(tmp_path: Path) -> None:
    ledger = Ledger()
    first = ledger.certify()
    (tmp_path / "agreement.log").write_bytes(framed(canonical(record(1))) + framed(canonical(record(2))))
    (tmp_path / "chain.log").write_bytes(framed(canonical(first)))
    for extra in (0, 1, 2):
        with Store(tmp_path) as store:
            assert store.durable_records() == [record(1), record(2), *[record(2, "promise")] * extra]
            assert store.certificates() == [first]
            store.persist(record(2, "promise"))


def test_records_that_are_read_back_are_synced_before_they_bind_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that was killed between writing and syncing, and of a log that no folder on the disk names yet."""
    path = tmp_path / "log"
    path.write_bytes(batched(0, b"vote") + batched(1, b"promise")[:-1])
    synced: list[tuple[int, int]] = []

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size))

    monkeypatch.setattr(store_module.os, "fsync", fsync)
    log = RecordLog(path)
    assert log.recovered == [b"vote"]
    assert (path.stat().st_ino, len(batched(0, b"vote"))) in synced
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


@pytest.mark.parametrize("content", [b"", b"x\n", b"\xff\xfe", b"1.5", b"-3", b"9" * 13, b"9" * 5000])
def test_damaged_boot_counter_goes_on_beyond_all_that_there_were(tmp_path: Path, content: bytes) -> None:
    """A counter that began at 1 again would make every later record of this node an old one."""
    (tmp_path / "boot").write_bytes(content)
    begun = int(time.time())
    with Store(tmp_path) as store:
        number = store.next_boot()
        assert begun < number <= time.time() + 1
        (line,) = store.damage
        assert line.startswith(f"{tmp_path / 'boot'} is damaged")
    with Store(tmp_path) as store:
        assert store.next_boot() == number + 1
        assert store.damage == []


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


def test_node_does_not_start_where_its_next_state_does_not_fit(tiny_disk: Path) -> None:
    with Store(tiny_disk) as store:
        store.check_room()  # nothing is here yet
        state = tiny_disk / "state" / "7.safetensors"
        state.write_bytes(bytes(40_000))
        with pytest.raises(DiskFull) as caught:
            store.check_room()
        assert_one_line(caught.value, f"the disk under {tiny_disk} has 0.0 MB left", "the next state takes 0.0 MB")
        state.write_bytes(bytes(10_000))
        store.check_room()


def test_full_disk_keeps_the_older_state(tiny_disk: Path) -> None:
    (tiny_disk / "state").mkdir()
    cache = StateCache(tiny_disk, GRID.chunk_values)
    first = state_of(1)
    with pytest.raises(DiskFull) as caught:
        cache.save_state(first)  # 80 kB
    assert_one_line(caught.value, "is full")
    assert cache.saved_rounds() == []
    assert list((tiny_disk / "state").iterdir()) == []


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
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


def test_whole_pieces_of_zeros_take_no_room_and_read_as_they_were(tmp_path: Path) -> None:
    values, path = own_array(3 * SYNC_BYTES + 5 * PAGE_BYTES, np.uint8), tmp_path / "file"
    values[SYNC_BYTES - 1] = 1
    values[3 * SYNC_BYTES :] = 7
    write_atomically(path, values.data)
    assert path.read_bytes() == values.tobytes()
    assert path.stat().st_blocks * 512 < 2 * SYNC_BYTES
    values[:] = 0
    write_atomically(path, b"head", values[: 2 * SYNC_BYTES].data)
    assert path.read_bytes() == b"head" + bytes(2 * SYNC_BYTES)
    assert path.stat().st_blocks * 512 < SYNC_BYTES


@pytest.mark.parametrize(
    ("free", "said"), [(17, "free some space, more than the 17 MB that there are, or"), (0, "free some space or")]
)
def test_full_disk_says_what_room_it_has_where_that_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=free * 1_000_000 // room.f_frsize + 1, f_frsize=room.f_frsize),
    )
    with pytest.raises(DiskFull, match=f"is full; {said} choose another --data-dir"), disk_errors(tmp_path / "none"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
