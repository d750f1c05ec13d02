"""Process groups that are held to a share of a core: how much they get, and that they have all again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio

from shoal.testnet.throttle import PERIOD_S, Quotas, by_turns, find_quotas, hold_to, kernel_quotas

BUSY = "import os\nos.fork()\nos.write(1, b'on ')\nwhile True: pass\n"
"""Two processes of one group."""
SHARE = 0.2
WINDOW_S = 1.5


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """Two endless loops in a group of their own, which have both begun."""
    with subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(6) == b"on on "
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def both(group: int) -> list[psutil.Process]:
    return [psutil.Process(group), *psutil.Process(group).children()]


def used_s(group: int) -> list[float]:
    return [sum(one.cpu_times()[:2]) for one in both(group)]


async def used_in_a_while(group: int) -> list[float]:
    """What each has used in a time, as a share of that time. A quota's first period may have begun before it."""
    began, before = time.monotonic(), used_s(group)
    await trio.sleep(WINDOW_S)
    after, took = used_s(group), time.monotonic() - began
    return [(end - begin) / (took + PERIOD_S) for begin, end in zip(before, after, strict=True)]


async def test_two_busy_processes_stopped_by_turns_have_the_share_each_and_all_afterwards(
    busy: subprocess.Popen[bytes],
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(by_turns, busy.pid, SHARE, lambda: False)
        assert max(await used_in_a_while(busy.pid)) <= 1.3 * SHARE
        nursery.cancel_scope.cancel()
    assert psutil.STATUS_STOPPED not in [one.status() for one in both(busy.pid)]


async def test_turns_do_not_wake_who_is_stopped_for_another_reason(busy: subprocess.Popen[bytes]) -> None:
    os.killpg(busy.pid, signal.SIGSTOP)
    with trio.move_on_after(3 * PERIOD_S):
        await by_turns(busy.pid, SHARE, lambda: True)
    assert [one.status() for one in both(busy.pid)] == [psutil.STATUS_STOPPED] * 2


@pytest.mark.skipif(kernel_quotas() is None, reason="no control groups can be made here")
async def test_a_quota_is_of_both_together_and_its_group_is_gone_afterwards(busy: subprocess.Popen[bytes]) -> None:
    quotas = kernel_quotas()
    assert quotas is not None
    async with trio.open_nursery() as nursery:
        await nursery.start(hold_to, busy.pid, SHARE, lambda: False)
        own = quotas.folder / f"shoal-{busy.pid}"
        assert len((own / "cgroup.procs").read_text().split()) == 2
        assert sum(await used_in_a_while(busy.pid)) <= 1.3 * SHARE
        nursery.cancel_scope.cancel()
    assert not own.exists()
    free = {int(pid) for pid in (quotas.folder / "cgroup.procs").read_text().split()}
    assert {one.pid for one in both(busy.pid)} <= free


def test_quotas_are_found_where_this_process_has_its_control_group(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    mounts = (
        f"tmpfs {tmp_path} tmpfs rw 0 0\ncgroup {tmp_path}/mem cgroup rw,memory 0 0\n"
        f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\n"
    )
    own = "4:memory:/\n3:cpu,cpuacct:/job\n0::/\n"
    # A folder that is no control group's gets none of its files: nothing is to be had there.
    assert find_quotas(mounts, own) is None
    assert find_quotas("proc /proc proc rw 0 0\n", own) is None
    assert list((tmp_path / "cpu" / "job").iterdir()) == []


@pytest.mark.parametrize(
    ("unified", "written"),
    [(False, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"}), (True, {"cpu.max": "5000 100000"})],
)
def test_quota_is_written_as_either_version_has_it(
    tmp_path: Path, busy: subprocess.Popen[bytes], unified: bool, written: dict[str, str]
) -> None:
    own = Quotas(folder=tmp_path, unified=unified).limit(busy.pid, 0.05)
    moved = (own / "cgroup.procs").read_text()
    assert {path.name: path.read_text() for path in own.iterdir()} == written | {"cgroup.procs": moved}
    assert int(moved) in {one.pid for one in both(busy.pid)}
