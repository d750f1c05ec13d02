"""Process groups that are held to a share of a core: how much they get, and that they have all again afterwards."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from shoal.protocol.errors import NetworkError
from shoal.testnet import nodes, throttle
from shoal.testnet.faults import strike, undo
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime
from shoal.testnet.scenario import Fault
from shoal.testnet.throttle import PERIOD_S, Quotas, by_turns, find_quotas, hold_to, kernel_quotas
from tests.waiting import until

BUSY = "import os\nos.fork()\nos.write(1, b'on ')\nwhile True: pass\n"
"""Two processes of one group."""
PAUSE = "import signal\nsignal.pause()\n"
SHARE = 0.2
WINDOW_S = 1.5
TURNS = 15
LATE = (3, 9)
"""Turns that are ended late."""
TICK_S = 0.01
"""In such steps the kernel says what a process has used, and it may take one until it is stopped."""
CLOCK_S = 1e-4


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


@dataclass
class Turn:
    """One turn of a process group, and what each of its processes had used when it began, and when it was over."""

    began: float
    used_before_s: list[float]
    ended: float = math.inf
    used_s: list[float] = field(default_factory=list)


async def test_two_busy_processes_stopped_by_turns_have_the_share_each_and_all_afterwards(
    busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late a turn is ended: the pause after it makes it good."""
    turns: list[Turn] = []
    send = throttle._signal

    def noted(group: int, number: signal.Signals) -> None:
        if number == signal.SIGCONT:
            turns.append(Turn(time.monotonic(), used_s(group)))
        elif len(turns) in LATE:
            time.sleep(PERIOD_S / 2)  # the fault itself: this much later it is ended
        send(group, number)
        if number == signal.SIGSTOP:
            turns[-1].ended, turns[-1].used_s = time.monotonic(), used_s(group)

    monkeypatch.setattr(throttle, "_signal", noted)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(by_turns, busy.pid, SHARE, lambda: False)
        await until(lambda: len(turns) > TURNS)
        nursery.cancel_scope.cancel()
    assert psutil.STATUS_STOPPED not in [one.status() for one in both(busy.pid)]
    over = turns[:TURNS]
    for turn, following in pairwise(turns[: TURNS + 1]):
        assert turn.ended - turn.began <= SHARE * (following.began - turn.began) + CLOCK_S
    for before, after in zip(over[0].used_before_s, over[-1].used_s, strict=True):
        assert 0 < after - before <= sum(turn.ended - turn.began for turn in over) + TURNS * TICK_S


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


async def test_a_throttle_ends_with_its_time_and_its_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    changed = trio.Event()

    async def noted(group: int, share: float, stopped: Callable[[], bool]) -> None:
        held.append(f"{group} to {share}")
        changed.set()
        try:
            await trio.sleep_forever()
        finally:
            held.append(f"{group} to all")

    class Field:
        seed, network = 1, None

        def __init__(self) -> None:
            runtime = Runtime(command=lambda launch: [sys.executable, "-c", PAUSE])
            self.journal = Journal()
            self.nodes = [NodeProcess(0, tmp_path, self.journal, runtime)]

        def node(self, index: int) -> NodeProcess:
            return self.nodes[index]

        async def join(self, index: int) -> None:
            raise AssertionError

    monkeypatch.setattr(nodes, "hold_to", noted)
    field = Field()
    (node,) = field.nodes
    fault = Fault(kind="throttle", node=0, round=1, cpu_share=0.1, duration_s=0.01)
    with pytest.raises(NetworkError, match="node 0 is not running"):
        await strike(fault, field)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run, Launch(manifest=tmp_path, data_dir=tmp_path))
        await wait_all_tasks_blocked()
        await strike(fault, field)
        await changed.wait()
        pid = node.lives[-1].pid
        assert held == [f"{pid} to 0.1"]
        await undo(fault, field)
        await wait_all_tasks_blocked()
        assert (held, node.alive) == ([f"{pid} to 0.1", f"{pid} to all"], True)
        nursery.cancel_scope.cancel()
    await undo(fault, field)  # of a node that ended meanwhile there is nothing to undo
