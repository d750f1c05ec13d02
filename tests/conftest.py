"""What every test finds, and leaves behind, as it was: commands that run inside a test set up the log."""

from __future__ import annotations

import faulthandler
import gc
import inspect
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest
import trio
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

gc.disable()  # to the end of the collection, which makes hundreds of thousands of objects and hardly any garbage

# Whatever stops this process for 0.2 s in the midst of an example would have found a bug, by limits on the wall clock.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LIMIT_S, LONG_LIMIT_S = 300.0, 1500.0
"""For a test, by the clock on the wall, and for one marked `long`: so that one that waits for ever fails. What runs of
trio's in the main thread is cancelled then."""
GRACE_S = 60.0
"""After that: a run that waits for what cannot be cancelled, a thread for instance, is ended where it is, and so is
what a test leaves to be done. Whoever is not over even then ends the process (`faulthandler_timeout`)."""
IDLE_S = 1.0
"""For so long a process of `make test` rests at its end."""
LATE = "it is not over in time; where each thread and task was is in what it wrote to standard error"


class Limit:
    """Called by a signal when a test takes too long: says where each thread and task waits, and fails the test."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first, self.is_over = not self.is_over, True
        faulthandler.dump_traceback(2)
        if trio.lowlevel.in_trio_run():
            print(*tasks_and_where(), sep="\n", file=sys.stderr)
            root = trio.lowlevel.current_root_task()
            if first and root is not None:
                *_, of_main = root.child_nurseries
                trio.lowlevel.current_trio_token().run_sync_soon(of_main.cancel_scope.cancel)
                return
        pytest.fail(LATE)


def tasks_and_where() -> Iterator[str]:
    """The tasks of the run under way that are in code of this repository, each with where it waits there."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else [root]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        where = traceback.StackSummary.extract(task.iter_await_frames())
        ours = [frame for frame in where if "site-packages" not in frame.filename]
        if ours:
            yield "".join([f"Task {task.name}:\n", *traceback.StackSummary.from_list(ours).format()])


LIMIT = Limit()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of a test, with its fixtures, wherever it waits."""
    LIMIT.is_over = False
    before = signal.signal(signal.SIGALRM, LIMIT)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S if item.get_closest_marker("long") is None else LONG_LIMIT_S, GRACE_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; marked `virtual_time`, on a clock that jumps when all wait.

    limit_s, of that mark: where no thread works, this long is over at once for one that waits for ever.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    virtual = pyfuncitem.get_closest_marker("virtual_time")
    limit_s = math.inf if virtual is None else virtual.kwargs.get("limit_s", math.inf)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def within_limit() -> None:
        with trio.fail_after(limit_s):
            await test(**arguments)

    try:
        trio.run(within_limit, clock=MockClock(autojump_threshold=0) if virtual else None)
    except Exception:
        raise
    except BaseException as error:
        if not LIMIT.is_over:
            raise
        error.__traceback__ = None  # in its frames a run that was not cancelled would live on; there can be only one
        raise pytest.fail.Exception(LATE) from None
    return True


LONGEST = (
    "testnet/test_coming_back.py",
    "node/test_daemon.py",
    "node/test_damaged_logs.py",
    "node/test_copied_folders.py",
    "lab/campaigns/test_campaign.py",
    "cli/test_named_code.py",
    "lab/explore/test_repair.py",
    "node/test_box_failures.py",
    "lab/bench/test_train.py",
    "lab/bench/test_hostile.py",
    "node/test_traces.py",
    "testnet/test_swarm.py",
    "testnet/test_streaming.py",
    "testnet/test_ddp.py",
    "node/test_own_loop_nodes.py",
    "node/test_own_loop_examples.py",
    "node/sapo/test_agent_process.py",
    "node/training/test_sharded_replica.py",
    "node/training/test_trainer.py",
    "node/test_swarm_in_a_box.py",
    "node/test_sites_in_a_box.py",
    "swarm/test_key_probe.py",
    "swarm/test_rollouts.py",
    "swarm/test_members.py",
    "packaging/test_documents.py",
    "testnet/test_wall_clock.py",
    "node/sapo/test_sampler_process.py",
    "lab/bench/test_throughput.py",
)
"""Files that take many seconds, which begin first: one that began last would leave all other processors idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order of all others, and within a file, stays."""
    here = Path(__file__).parent
    rank = {here / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and never in what is there already."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `shoal init` writes down about this user goes nowhere near the user's own."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True, scope="session")
def _no_thread_works_on() -> Iterator[None]:
    """A thread that no test waits for any more, and that works on, would slow all that follow it."""
    yield
    if "PYTEST_XDIST_WORKER" not in os.environ or threading.active_count() == 1:
        return
    began = time.process_time()
    time.sleep(IDLE_S)
    worked_s = time.process_time() - began
    threads = ", ".join(thread.name for thread in threading.enumerate())
    assert worked_s < IDLE_S / 4, f"with nothing to do this process worked {worked_s:.2f} of {IDLE_S} s: {threads}"


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do in place what would go to a thread: virtual time would run on meanwhile."""

    async def run_here(work: Callable[..., object], *arguments: object) -> object:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "shoal", "libp2p")]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers[:]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Small tensors gain nothing by threads, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
