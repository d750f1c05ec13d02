"""What every test finds, and leaves behind, as it was: commands that run inside a test set up the log."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

gc.disable()  # to the end of the collection, which makes hundreds of thousands of objects and hardly any garbage

# Whatever stops this process for 0.2 s in the midst of an example would have found a bug, by limits on the wall clock.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

DEADLINE_S = 300.0
"""For a test that is a coroutine: so that one that waits for ever fails."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; marked `virtual_time`, on a clock that jumps when all wait.

    limit_s, of that mark: where no thread works, this long is over at once for one that waits for ever.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    virtual = pyfuncitem.get_closest_marker("virtual_time")
    limit_s = DEADLINE_S if virtual is None else virtual.kwargs.get("limit_s", math.inf)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def within_deadline() -> None:
        with trio.fail_after(limit_s):
            await test(**arguments)

    trio.run(within_deadline, clock=MockClock(autojump_threshold=0) if virtual else None)
    return True


LONGEST = (
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
    "node/test_not_finite.py",
    "node/test_terms.py",
    "node/test_own_loop_nodes.py",
    "node/test_own_loop_examples.py",
    "node/state/test_resumption_nodes.py",
    "node/sapo/test_agent_process.py",
    "node/training/test_sharded_replica.py",
    "node/training/test_trainer.py",
)
"""Files that take many seconds, which begin first: one that began last would leave all other processors idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order of all others, and within a file, stays."""
    here = Path(__file__).parent
    rank = {here / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Look for garbage from here on."""
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
