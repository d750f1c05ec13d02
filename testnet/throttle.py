"""A share of one core for a group of processes: by a quota of the kernel's, or stopped and continued by turns.

Where this process may make control groups below its own (Linux, cgroup v1 or v2), the processes get one, whose quota
they have together. Elsewhere they are stopped and continued by turns; then each of them has the share for itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import trio

from shoal.node.control_groups import MOUNTS, OWN_GROUPS, own_groups

PERIOD_S: Final = 0.1
_US: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Control group below which others with a quota are made. unified: of cgroup v2."""

    folder: Path
    unified: bool

    def limit(self, group: int, share: float) -> Path:
        """Put the processes of a process group, and what they will fork, into a control group of their own.

        Blocks. Raises OSError.
        """
        own = self.folder / f"shoal-{group}"
        own.mkdir(exist_ok=True)
        quota, period = round(share * PERIOD_S * _US), round(PERIOD_S * _US)
        if self.unified:
            (own / "cpu.max").write_text(f"{quota} {period}")
        else:
            (own / "cpu.cfs_period_us").write_text(str(period))
            (own / "cpu.cfs_quota_us").write_text(str(quota))
        moved: set[int] = set()
        while found := set(processes_of(group)) - moved:  # one may fork before it is moved
            _move(found, own)
            moved |= found
        return own

    def lift(self, own: Path) -> None:
        """Put all that is in it back, and remove it. Blocks. Raises OSError."""
        while found := [int(pid) for pid in (own / "cgroup.procs").read_text().split()]:
            _move(found, self.folder)
        with contextlib.suppress(OSError):  # some are just ending: a group without any stays, and costs nothing
            own.rmdir()


def processes_of(group: int) -> Iterator[int]:
    """The processes of a process group."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(name)) == group:
                    yield int(name)


def _move(processes: set[int] | list[int], folder: Path) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (folder / "cgroup.procs").write_text(str(pid))


def find_quotas(mounts: str, own: str) -> Quotas | None:
    """The control group of this process, where it can set quotas; None if there is none, or it may not.

    mounts, own: the texts of /proc/self/mounts and /proc/self/cgroup.
    """
    for _, folder, unified in own_groups("cpu", mounts, own):
        quotas = Quotas(folder=folder, unified=unified)
        if _works(quotas):
            return quotas
    return None


def _works(quotas: Quotas) -> bool:
    """Try it with no processes: version 2 has the files of a quota only where the group above hands them on."""
    tried = quotas.folder / f"shoal-tried-{os.getpid()}"
    try:
        tried.mkdir()
        try:
            return (tried / ("cpu.max" if quotas.unified else "cpu.cfs_quota_us")).exists()
        finally:
            tried.rmdir()
    except OSError:
        return False


@cache
def kernel_quotas() -> Quotas | None:
    """Quotas of this machine's kernel for this process; None if it has none. Blocks."""
    try:
        return find_quotas(MOUNTS.read_text(), OWN_GROUPS.read_text())
    except OSError:
        return None


def means() -> str:
    """The way in which processes are held to a share here, in words."""
    return "SIGSTOP and SIGCONT by turns" if kernel_quotas() is None else "a cgroup's quota"


async def hold_to(
    group: int,
    share: float,
    stopped: Callable[[], bool],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Hold a process group to `share` of one core until cancelled; then it has all of its time again.

    stopped: whether it is to stand still for another reason. Raises OSError if the kernel refuses.
    """
    quotas = await trio.to_thread.run_sync(kernel_quotas)
    if quotas is None:
        task_status.started()
        await by_turns(group, share, stopped)
        return
    with trio.CancelScope(shield=True):
        own = await trio.to_thread.run_sync(partial(quotas.limit, group, share))
    try:
        task_status.started()
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(quotas.lift, own)


async def by_turns(group: int, share: float, stopped: Callable[[], bool]) -> None:
    """Do the same by SIGSTOP and SIGCONT: what a turn takes too long, the next pause makes good."""
    try:
        while True:
            began = trio.current_time()
            _go_on(group, stopped)
            await trio.sleep(share * PERIOD_S)
            _signal(group, signal.SIGSTOP)
            await trio.sleep((trio.current_time() - began) * (1 / share - 1))
    finally:
        _go_on(group, stopped)


def _go_on(group: int, stopped: Callable[[], bool]) -> None:
    if not stopped():
        _signal(group, signal.SIGCONT)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself this moment
        os.killpg(group, number)
