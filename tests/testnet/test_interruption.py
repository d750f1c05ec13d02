"""The signals that end a run early: each of them is waited for, and is what it was before once nobody waits."""

from __future__ import annotations

import signal
import threading

import pytest
import trio
import trio.testing

from shoal.testnet.interruption import until_interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_ends_the_wait_and_means_afterwards_what_it_meant_before(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_interrupted)
            await trio.testing.wait_all_tasks_blocked()
            assert all(signal.getsignal(one) not in before for one in SIGNALS)
            signal.raise_signal(number)
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_outside_the_main_thread_the_wait_has_no_end() -> None:
    ended: list[bool] = []

    async def main() -> None:
        with trio.move_on_after(10**6) as scope:
            await until_interrupted()
        ended.append(not scope.cancelled_caught)

    def run() -> None:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert ended == [False]
