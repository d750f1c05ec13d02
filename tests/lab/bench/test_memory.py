"""Memory a parameter: what is refused, what follows from two peaks, what is seen of a process, and one small run."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from shoal.cli.init import InitOptions, found
from shoal.cli.main import execute
from shoal.lab.bench.disk import NAMELESS, OnDisk
from shoal.lab.bench.memory import (
    CASE,
    MemoryBench,
    MemoryResult,
    Peak,
    to_document,
)
from shoal.lab.bench.resident import SAMPLE_S, Resident, resident, together, watched
from shoal.lab.bench.swarm import GRACE_S
from shoal.lab.bench.synthetic import TRAINED_NAME
from shoal.lab.case import Numbers
from shoal.lab.targets import Spread
from shoal.protocol.identity import Identity

TAKEN = 128 << 20
"""Bytes."""
PROC = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def result(*peaks: tuple[int, int, int, int], strategy: str = "diloco") -> MemoryResult:
    """Peaks of (parameters, anonymous, shared, most of files)."""
    small, large = (
        Peak(
            numel=numel,
            round_s=2.0,
            identical=True,
            most=Resident(anonymous=anonymous, shared=shared, file=1),
            most_file=file,
            disk=OnDisk(kinds={"state": 20 * numel + 7, NAMELESS: 3 * numel}, apparent=numel),
            disk_rest=OnDisk(kinds={"state": 16 * numel + 7}, apparent=numel),
        )
        for numel, anonymous, shared, file in peaks
    )
    return MemoryResult(bench=MemoryBench(strategy=strategy), peaks=(small, large), exact=True)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--numel", "5000", "--numel takes one number, at least 10240"),
        ("--numel", "9000,8000", "the smaller first"),
        ("--numel", "100,9000", "or two from 4096 on"),
        ("--numel", "5000,6000,7000", "--numel takes one number"),
        ("--codec", "mp3", "mp3"),
        ("--strategy", "gossip", "--strategy must be one of diloco"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["bench", "memory", option, value]) == 2
    assert said in capsys.readouterr().err


def test_slope_is_of_what_the_kernel_cannot_drop_and_the_base_is_what_is_left() -> None:
    found = result((10, 250_000_000, 50, 40), (30, 250_000_100, 90, 600))
    assert found.held_slope == 7.0
    assert found.base_bytes == 249_999_980
    (row,) = found.rows
    assert (row.target, row.aim, row.met, row.aim_met) == (12.0, 8.0, True, True)
    assert result((10, 1, 1, 1), (20, 1, 1, 1), strategy="sparse").rows == ()
    document = to_document(found)
    assert document["daemon_bytes_per_parameter"] == {"anonymous": 5.0, "shared": 2.0, "file": 28.0}
    assert [document[key] for key in ("numel", "strategy", "codec", "round_s")] == [30, "diloco", "int8", 2.0]
    assert (document["identical"], document["exact"]) == (True, True)
    assert CASE.sound(found)
    wrong = msgspec.structs.replace(found, exact=False)
    assert to_document(wrong)["exact"] is False
    assert not CASE.sound(wrong)


def test_one_number_of_parameters_is_the_larger_of_two_sizes() -> None:
    assert MemoryBench(numel=Numbers((250_000_000,))).sizes == MemoryBench().sizes == (100_000_000, 250_000_000)
    assert MemoryBench(codec="bf16").manifest(5000, [Identity.generate().peer_id]).sync.codec == "bf16"


def test_manifest_is_that_of_init_but_for_workload_and_steps(tmp_path: Path) -> None:
    node = Identity.generate()
    ours, usual = MemoryBench().manifest(5000, [node.peer_id]), found(InitOptions(data_dir=tmp_path), node, node)
    assert (ours.sync.strategy, ours.sync.codec) == ("diloco", "int8")
    assert ours.sync == msgspec.structs.replace(usual.sync, inner_steps=1)
    assert ours.inner == msgspec.structs.replace(usual.inner, lr=ours.inner.lr)  # usual is the default model's
    assert ours.round == msgspec.structs.replace(usual.round, grace_s=GRACE_S)
    assert ours.workload.options == {"numel": 5000}


@PROC
def test_memory_of_a_process_is_told_apart() -> None:
    gc.collect()
    before = resident(os.getpid())
    with watched([[os.getpid()]]) as seen, mmap.mmap(-1, TAKEN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(TAKEN))  # pages of its own: what an allocator hands out may be there already
        looks, ends_at = len(seen), time.monotonic() + 60
        while len(seen) < looks + 2 and time.monotonic() < ends_at:
            time.sleep(SAMPLE_S)
    # Other tests' garbage may go meanwhile.
    assert max(one.anonymous for one in seen) - before.anonymous >= TAKEN // 2
    assert max(one.held for one in seen) - before.held >= TAKEN // 2
    with pytest.raises(OSError, match="No such file"):
        resident(1 << 30)


def test_a_whole_nodes_row_is_its_optimizers_and_what_its_processes_share_counts_once() -> None:
    found = result((10, 250_000_000, 50, 40), (30, 250_000_360, 90, 600))
    whole = msgspec.structs.replace(found, bench=MemoryBench(optimizer="adamw8bit"))
    (row,) = whole.rows
    assert (whole.held_slope, row.target, row.aim, row.met, row.aim_met) == (20.0, 22.0, 18.0, True, False)
    assert msgspec.structs.replace(found, bench=MemoryBench(optimizer="muon")).rows == ()
    slower = msgspec.structs.replace(found.peaks[1], round_s=2.7)
    limited = msgspec.structs.replace(found, bench=MemoryBench(within=16), limited=slower)
    assert [row.met for row in limited.rows] == [False, False]  # 20 bytes, and 1.35 times as long
    assert len(msgspec.structs.replace(limited, bench=MemoryBench(within=20)).rows) == 1
    daemon, trainer = (Resident(anonymous=1, shared=shared, file=10) for shared in (4, 3))
    assert together([daemon, trainer]) == Resident(anonymous=2, shared=4, file=20)
    manifest = MemoryBench(optimizer="adamw8bit").manifest(5000, [Identity.generate().peer_id])
    assert (manifest.workload.name, manifest.inner.optimizer) == (TRAINED_NAME, "adamw8bit")


def test_disk_has_a_row_with_adamw_and_is_told_by_kind_at_the_peak_and_at_rest() -> None:
    found = result((10, 250_000_000, 50, 40), (30, 250_000_360, 90, 600))
    whole = msgspec.structs.replace(found, bench=MemoryBench(optimizer="adamw"))
    held, disk = whole.rows
    assert disk.measured == Spread.of([23.0])
    assert (held.unit, disk.unit, disk.target, disk.aim) == ("bytes a parameter", "bytes a parameter", 24.0, 16.0)
    assert (disk.met, disk.aim_met) == (True, False)
    document = to_document(whole)
    assert document["disk_bytes_per_parameter"] == {"peak": 23.0, "at rest": 16.0}
    assert document["disk_by_kind"] == {"peak": {NAMELESS: 3, "state": 20}, "at rest": {NAMELESS: 0, "state": 16}}
