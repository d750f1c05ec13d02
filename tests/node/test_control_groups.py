"""What a process may use of a machine: quotas and limits of both versions, of groups above it, and in a container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shoal.node import doctor
from shoal.node.control_groups import available_memory, usable_cores
from shoal.node.doctor_trial import TrialReport

GIB = 1 << 30
NO_LIMIT = str((1 << 63) - 4096)
"""What a group of version 1 without a limit says."""


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[Path, Path]]:
    """The two files that a process reads of itself, on a machine with 16 cores and 64 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))

    class Memory:
        available = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)

    def files(mounts: str, own: str) -> tuple[Path, Path]:
        write(tmp_path, {"mounts": "proc /proc proc rw 0 0\n" + mounts.format(tmp_path), "own": own})
        return tmp_path / "mounts", tmp_path / "own"

    return files


def test_the_least_of_a_group_and_those_above_it_counts_in_version_2(
    tmp_path: Path, seen: Callable[[str, str], tuple[Path, Path]]
) -> None:
    files = seen("cgroup2 {}/all cgroup2 rw 0 0", "0::/job/step")
    write(tmp_path / "all", {})  # the topmost has no limits
    write(tmp_path / "all/job", {"cpu.max": "350000 100000", "memory.max": str(8 * GIB)})
    write(tmp_path / "all/job", {"memory.current": str(3 * GIB), "memory.stat": f"anon 7\ninactive_file {2 * GIB}"})
    write(tmp_path / "all/job/step", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": str(GIB)})
    assert usable_cores(*files) == 3
    assert available_memory(*files) == (7 * GIB, True)
    write(tmp_path / "all/job/step", {"cpu.max": "50000 100000", "memory.max": str(4 * GIB)})
    assert usable_cores(*files) == 1
    assert available_memory(*files) == (3 * GIB, True)


def test_version_1_has_a_folder_for_each_controller(
    tmp_path: Path, seen: Callable[[str, str], tuple[Path, Path]]
) -> None:
    mounts = "cgroup {0}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup {0}/memory cgroup rw,memory 0 0"
    files = seen(mounts, "4:memory:/job\n3:cpu,cpuacct:/job\n0::/")
    write(tmp_path / "cpu/job", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    write(tmp_path / "memory/job", {"memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": "5"})
    assert usable_cores(*files) == 16
    assert available_memory(*files) == (64 * GIB, False)
    write(tmp_path / "cpu/job", {"cpu.cfs_quota_us": "400000"})
    write(tmp_path / "memory/job", {"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": str(2 * GIB)})
    assert usable_cores(*files) == 4
    assert available_memory(*files) == (0, True)


def test_a_container_that_is_told_the_host_s_path_has_the_bounds_of_what_is_mounted(
    tmp_path: Path, seen: Callable[[str, str], tuple[Path, Path]]
) -> None:
    files = seen("cgroup2 {}/all cgroup2 rw 0 0", "0::/docker/2f1c")
    write(tmp_path / "all", {"cpu.max": "200000 100000", "memory.max": str(GIB), "memory.current": "0"})
    assert usable_cores(*files) == 2
    assert available_memory(*files) == (GIB, True)
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 16  # of no Linux


def test_cores_that_a_process_is_kept_from_do_not_count() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from shoal.node.control_groups import usable_cores; print(usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(("bound", "helps"), [(True, "give this container or job"), (False, "end other programs")])
def test_doctor_says_what_helps_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, bound: bool, helps: str) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: (GIB, bound))
    check = doctor.memory(TrialReport(numel=1_000_000_000), "adamw")
    assert not check.ok
    assert check.detail.startswith("1.1 GB available")
    assert check.remedy.startswith(helps)
