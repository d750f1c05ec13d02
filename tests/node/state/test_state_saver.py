"""Saving beside the rounds: one write at a time, the newest next, a rest in between, and nothing lost at the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shoal.collectives.state import CertifiedState
from shoal.node.state import state_saver
from shoal.node.state.state_saver import LAG_LIMIT_ROUNDS, REST, StateSaver
from shoal.node.state.states import StateCache
from shoal.protocol.errors import StorageError
from tests.node.folders import cache_folder
from tests.node.ledger import GRID, state_of


class SlowCache(StateCache):
    """A cache whose disk writes when it is let, and says what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(cache_folder(folder), GRID.chunk_values)
        self.began: list[int] = []
        self.wrote: list[int] = []
        self.let = threading.Semaphore(0)
        self.failure: StorageError | None = None

    def save_state(self, state: CertifiedState, *, good: int = 0) -> None:
        assert len(self.began) == len(self.wrote), "two writes at once"
        self.began.append(state.round)
        assert self.let.acquire(timeout=10)
        if self.failure is not None:
            raise self.failure
        super().save_state(state, good=good)
        self.wrote.append(state.round)


def run(main: Callable[[], Awaitable[None]], clock: MockClock | None = None) -> None:
    trio.run(main, clock=clock, strict_exception_groups=True)


async def until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_at
        await trio.to_thread.run_sync(threading.Event().wait, 0.001)


async def test_writes_are_one_at_a_time_and_the_newest_is_next(tmp_path: Path) -> None:
    cache = SlowCache(tmp_path)
    saver = StateSaver(cache)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        await saver.save_soon(state_of(1))
        await until(lambda: cache.began == [1])
        for round in (2, 3, 4):
            await saver.save_soon(state_of(round))
        assert saver.lag_rounds == 4
        cache.let.release()
        await until(lambda: cache.began == [1, 4])
        cache.let.release()
        await until(lambda: saver.lag_rounds == 0)
        nursery.cancel_scope.cancel()
    assert cache.wrote == [1, 4]


async def test_a_state_that_is_saved_is_not_held_on_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlowCache(tmp_path)
    cache.let.release(9)
    monkeypatch.setattr(state_saver, "REST", 1e30)
    saver, state = StateSaver(cache), state_of(1)
    memory = weakref.ref(state.anchor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        await saver.save_soon(state)
        del state
        await until(lambda: saver.lag_rounds == 0)
        await until(lambda: gc.collect() >= 0 and memory() is None)
        nursery.cancel_scope.cancel()


async def test_newest_state_is_saved_on_the_way_out_even_from_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SlowCache(tmp_path)
    cache.let.release(9)
    monkeypatch.setattr(state_saver, "REST", 1e30)
    saver = StateSaver(cache)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        await saver.save_soon(state_of(1))
        await until(lambda: saver.lag_rounds == 0)
        for round in (2, 3):
            await saver.save_soon(state_of(round))
            await wait_all_tasks_blocked()
        assert cache.wrote == [1]
        nursery.cancel_scope.cancel()
    assert cache.wrote == [1, 3]
    assert cache.saved_rounds() == [3, 1]


def test_rest_is_a_multiple_of_the_write_and_ends_early_when_far_behind(tmp_path: Path) -> None:
    cache, clock = SlowCache(tmp_path), MockClock()  # stands still unless it is told to jump

    async def main() -> None:
        saver = StateSaver(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(saver.run)
            await saver.save_soon(state_of(1))
            await until(lambda: cache.began == [1])
            clock.jump(2)  # the time that the write took
            cache.let.release()
            await until(lambda: saver.lag_rounds == 0)
            await saver.save_soon(state_of(2))
            clock.jump(2 * REST - 0.1)
            await wait_all_tasks_blocked()
            assert cache.began == [1]
            clock.jump(0.2)  # state 2 came in the rest: one that comes after it would be rather written
            await wait_all_tasks_blocked()
            assert cache.began == [1]
            await saver.save_soon(state_of(3))
            await until(lambda: cache.began == [1, 3])
            clock.jump(2)
            cache.let.release()
            await until(lambda: saver.lag_rounds == 0)
            await saver.save_soon(state_of(2 + LAG_LIMIT_ROUNDS // 2))
            await wait_all_tasks_blocked()
            assert cache.began == [1, 3]
            await saver.save_soon(state_of(3 + LAG_LIMIT_ROUNDS // 2))
            await until(lambda: cache.began == [1, 3, 3 + LAG_LIMIT_ROUNDS // 2])
            cache.let.release()
            nursery.cancel_scope.cancel()

    run(main, clock)


def test_if_no_state_comes_for_another_rest_the_newest_is_saved(tmp_path: Path) -> None:
    cache, clock = SlowCache(tmp_path), MockClock()

    async def main() -> None:
        saver = StateSaver(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(saver.run)
            await saver.save_soon(state_of(1))
            await until(lambda: cache.began == [1])
            clock.jump(2)
            cache.let.release()
            await until(lambda: saver.lag_rounds == 0)
            await saver.save_soon(state_of(2))
            clock.jump(4 * REST - 0.1)
            await wait_all_tasks_blocked()
            assert cache.began == [1]
            clock.jump(0.2)
            await until(lambda: cache.began == [1, 2])
            cache.let.release()
            nursery.cancel_scope.cancel()

    run(main, clock)


async def test_rounds_wait_for_a_disk_that_is_far_behind(tmp_path: Path) -> None:
    cache = SlowCache(tmp_path)
    saver = StateSaver(cache)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        await saver.save_soon(state_of(1))
        await until(lambda: cache.began == [1])
        for round in range(2, LAG_LIMIT_ROUNDS + 1):
            await saver.save_soon(state_of(round))
        over = trio.Event()

        async def one_more() -> None:
            await saver.save_soon(state_of(LAG_LIMIT_ROUNDS + 1))
            over.set()

        nursery.start_soon(one_more)
        await wait_all_tasks_blocked()
        assert not over.is_set()
        cache.let.release(2)
        with trio.fail_after(20):
            await over.wait()
        nursery.cancel_scope.cancel()


async def test_state_from_elsewhere_waits_for_its_turn_and_is_on_disk_then(tmp_path: Path) -> None:
    cache = SlowCache(tmp_path)
    saver = StateSaver(cache)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        await saver.save_soon(state_of(1))
        await until(lambda: cache.began == [1])
        await saver.save_soon(state_of(2))
        cache.let.release(2)
        await saver.save_now(state_of(7))
        assert 7 in cache.saved_rounds()
        assert saver.lag_rounds == 0
        nursery.cancel_scope.cancel()
    assert cache.wrote[-1] == 7  # what is older is not written any more


async def test_full_disk_ends_the_saver(tmp_path: Path) -> None:
    cache = SlowCache(tmp_path)
    cache.failure = StorageError("full")
    cache.let.release(9)
    saver = StateSaver(cache)
    await saver.save_soon(state_of(1))
    with pytest.raises(StorageError, match="full"):
        await saver.run()
    assert cache.began == [1]
