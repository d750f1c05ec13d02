"""Cores and memory that this process may use: less than the machine has in a container, a batch job or an affinity.

On Linux a control group and each above it set bounds; see cgroups(7), and the kernel's admin-guide/cgroup-v1 and
cgroup-v2. Elsewhere, and where nothing is bound, what the machine has counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

MOUNTS: Final = Path("/proc/self/mounts")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def own_groups(controller: str, mounts: str, own: str) -> Iterator[tuple[Path, Path, bool]]:
    """This process's control groups that may have that controller.

    Of each: where its kind is mounted, its folder there, and whether it is of version 2. mounts, own: the texts of
    /proc/self/mounts and /proc/self/cgroup.
    """
    within = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    for line in mounts.splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            path = next((path for names, path in within.items() if controller in names.split(",")), "/")
            yield Path(mount), Path(mount + path), False
        elif kind == "cgroup2":
            yield Path(mount), Path(mount + within.get("", "/")), True


def usable_cores(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> int:
    """Cores that this process may keep busy, at least 1; of a quota of two and a half, two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, unified in _with_those_above("cpu", mounts, own):
        if unified:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are no bound
            cores = min(cores, int(quota) // int(period))
    return max(cores, 1)


def available_memory(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> tuple[int, bool]:
    """Bytes of memory that programs may take beside those that run, and whether a control group bounds them.

    As the kernel says of the machine, pages of files that it can drop count as free.
    """
    available, bound = psutil.virtual_memory().available, False
    for folder, unified in _with_those_above("memory", mounts, own):
        limit = _text(folder / ("memory.max" if unified else "memory.limit_in_bytes"))
        used = _text(folder / ("memory.current" if unified else "memory.usage_in_bytes"))
        if limit.isdigit() and used.isdigit():
            dropped = _counted(folder / "memory.stat", "inactive_file" if unified else "total_inactive_file")
            left = max(int(limit) - max(int(used) - dropped, 0), 0)
            available, bound = (left, True) if left < available else (available, bound)
    return available, bound


def _with_those_above(controller: str, mounts: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """This process's groups and all above them, as far as they can be seen.

    In a container that path may be the host's, and what is mounted the container's own group: then it is that alone.
    """
    for top, folder, unified in own_groups(controller, _text(mounts), _text(own)):
        while folder != top and top in folder.parents:
            yield folder, unified
            folder = folder.parent
        yield top, unified


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _counted(file: Path, name: str) -> int:
    counts = dict(line.split(" ", 1) for line in _text(file).splitlines() if " " in line)
    return int(counts.get(name, "0"))
