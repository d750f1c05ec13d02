"""What a simulated disk holds after its power went, and what it counts."""

from __future__ import annotations

import os
import random
import resource
from contextlib import closing
from pathlib import Path

import pytest

from shoal.node.state.store import RecordLog, Store, read_frames, write_atomically
from shoal.protocol.errors import StorageError
from shoal.protocol.folders import make_folder, sync_folder
from tests.node.simulated_disk import Disk, Disks, Fault, PowerCut, Survival


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disks(monkeypatch).add(tmp_path / "disk", random.Random(1))


def survivors(disk: Disk, survival: Survival = Survival.SYNCED) -> dict[str, bytes]:
    target = disk.root.with_name(f"after-{disk.operations}-{survival}")
    disk.copy_survivors(target, survival)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def frames(data: bytes | None) -> list[bytes]:
    assert data is not None
    reading = read_frames(data)
    assert reading.good == len(data)
    return reading.records


def test_what_was_never_synced_is_gone_and_what_was_is_there(disk: Disk) -> None:
    path = disk.root / "a"
    with path.open("wb", buffering=0) as file:
        file.write(b"one")
        assert survivors(disk) == {}
        os.fsync(file.fileno())
        assert survivors(disk) == {}, "nothing leads to it"
        sync_folder(disk.root)
        file.write(b"two")
    assert survivors(disk) == {"a": b"one"}
    assert survivors(disk, Survival.ALL) == {"a": b"onetwo"}
    assert survivors(disk, Survival.SOME)["a"] in [b"onetwo"[:n] for n in range(3, 7)]


def test_a_rename_is_there_once_its_folder_was_synced(disk: Disk) -> None:
    write_atomically(disk.root / "a", b"old")
    partial = disk.root / "a.partial"
    with partial.open("wb", buffering=0) as file:
        file.write(b"new")
        os.fsync(file.fileno())
    partial.replace(disk.root / "a")
    assert survivors(disk) == {"a": b"old"}
    assert (disk.root / "a").read_bytes() == b"new"
    sync_folder(disk.root)
    assert survivors(disk) == {"a": b"new"}
    (disk.root / "a").unlink()
    assert survivors(disk) == {"a": b"new"}


def test_a_folder_that_nothing_leads_to_takes_its_files_along(disk: Disk) -> None:
    (disk.root / "sub").mkdir()
    write_atomically(disk.root / "sub" / "a", b"whole")
    assert survivors(disk) == {}
    assert survivors(disk, Survival.ALL) == {"sub/a": b"whole"}
    sync_folder(disk.root)
    assert survivors(disk) == {"sub/a": b"whole"}


def test_a_folder_that_is_made_to_stay_is_there_after_a_power_cut_with_those_above_it(disk: Disk) -> None:
    for _ in range(2):
        make_folder(disk.root / "a" / "b")
        write_atomically(disk.root / "a" / "b" / "c", b"whole")
        assert survivors(disk) == {"a/b/c": b"whole"}


def test_a_data_folder_is_there_after_a_power_cut_with_those_in_it(disk: Disk) -> None:
    with Store(disk.root / "nodes" / "data") as store:
        for name in ("a", "state/a", "finals/a"):
            write_atomically(store.folder / name, b"whole")
    assert {f"nodes/data/{name}" for name in ("a", "state/a", "finals/a")} <= survivors(disk).keys()


def test_an_atomic_write_is_atomic_at_whatever_operation_the_power_goes(disk: Disk) -> None:
    write_atomically(disk.root / "a", b"old")
    began = disk.operations
    write_atomically(disk.root / "a", b"new")
    assert disk.safe("a") == b"new"
    per_write = disk.operations - began
    assert per_write == 5  # the file is made, written, synced, renamed, its folder synced
    for at in range(1, per_write + 1):
        disk.faults[disk.operations + at] = Fault.CUT
        with pytest.raises(PowerCut):
            write_atomically(disk.root / "a", b"newer")
        disk.dead = False
        for survival in Survival:
            assert survivors(disk, survival)["a"] in (b"new", b"newer")
        (disk.root / "a.partial").unlink(missing_ok=True)
        write_atomically(disk.root / "a", b"new")


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.BROKEN])
def test_a_log_whose_disk_answers_with_an_error_has_its_records_of_before_and_takes_more(
    disk: Disk, fault: Fault
) -> None:
    with closing(RecordLog(disk.root / "log")) as log:
        log.append(b"one")
        begun = disk.operations
        log.append(b"two")
        for at in range(1, disk.operations - begun + 1):
            disk.faults[disk.operations + at] = fault
            with pytest.raises(StorageError):
                log.append(b"lost")
        log.append(b"three")
    with closing(RecordLog(disk.root / "log")) as log:
        assert log.recovered == [b"one", b"two", b"three"]
    assert disk.failed == [fault] * 2


@pytest.mark.parametrize("fault", Fault)
def test_what_a_log_takes_after_a_rewrite_that_failed_is_in_the_file_that_is_there(disk: Disk, fault: Fault) -> None:
    """At whichever operation it failed: what `append` returned from is there after a power cut, behind old or new."""
    path = disk.root / "log"
    with closing(RecordLog(path)) as log:
        begun = disk.operations
        log.rewrite([b"old"])
        operations = disk.operations - begun
        for at in range(1, operations + 1):
            disk.faults[disk.operations + at] = fault
            with pytest.raises((StorageError, PowerCut)):
                log.rewrite([b"new"])
            disk.dead = False
            log.append(b"more")
            with closing(RecordLog(path)) as seen:
                assert seen.recovered in ([b"old", b"more"], [b"new", b"more"])
                assert frames(disk.safe("log")) == seen.recovered
            log.rewrite([b"old"])
    assert operations == 5


def test_a_log_that_cannot_be_opened_again_takes_nothing_until_it_can(disk: Disk) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def no_more_files(what: str, name: str) -> None:
        if (what, name) == ("sync", "disk"):  # the last before the new file is opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))

    with closing(RecordLog(disk.root / "log")) as log:
        log.append(b"old")
        disk.watch = no_more_files
        try:
            for attempt in (lambda: log.rewrite([b"new"]), lambda: log.append(b"lost")):
                with pytest.raises(StorageError, match="Too many open files"):
                    attempt()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            disk.revive()
        log.append(b"more")
    assert frames(disk.safe("log")) == [b"new", b"more"]


def test_a_dead_disk_takes_nothing_more(disk: Disk) -> None:
    disk.faults[2] = Fault.CUT
    with pytest.raises(PowerCut):
        write_atomically(disk.root / "a", b"x")
    for attempt in (lambda: (disk.root / "b").open("wb", buffering=0), lambda: (disk.root / "a.partial").read_bytes()):
        with pytest.raises(PowerCut):
            attempt()
