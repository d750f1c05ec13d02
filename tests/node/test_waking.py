"""A sleep is what one clock counts and the other does not; a stopped process is late by what it did not run."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from shoal.node.outcome import Notice
from shoal.node.reporting.events import Woke
from shoal.node.waking import CONNECTIONS_S, LEAST_S, LOOK_S, SleepWatch, Waking, system_watch, woke_text


class Machine:
    """Two clocks, and parts of a node that note what was done with them."""

    def __init__(self) -> None:
        self.awake_s = self.all_s = 1000.0
        self.done: list[object] = []
        self.parts: Any = self
        self.events = self.training_client = self.members = self

    def watch(self) -> SleepWatch:
        return SleepWatch(awake=lambda: self.awake_s, all_time=lambda: self.all_s)

    def passes(self, *, awake_s: float = 0.0, slept_s: float = 0.0) -> None:
        self.awake_s += awake_s
        self.all_s += awake_s + slept_s

    def write(self, event: Woke) -> None:
        self.done.append(event.seconds)

    def on_progress(self, progress: Notice) -> None:
        self.done.append(progress.text)

    def measure_anew(self) -> None:
        self.done.append("measured anew")

    def announce(self) -> None:
        self.done.append("told")

    def anew(self) -> None:
        self.done.append("connected anew")


def test_watch_tells_a_sleep_of_the_system_from_a_process_that_stood_still() -> None:
    machine = Machine()
    watch = machine.watch()
    for awake_s, slept_s, seen in [
        (LOOK_S, 0.0, (0.0, 0.0)),
        (LOOK_S + 30.0, 0.0, (0.0, 30.0)),
        (LOOK_S, 3600.0, (3600.0, 0.0)),
        (LOOK_S / 2, 7.0, (7.0, 0.0)),
        (LOOK_S, -1.0, (0.0, 0.0)),  # clocks that are read one after the other
    ]:
        machine.passes(awake_s=awake_s, slept_s=slept_s)
        assert watch.look() == pytest.approx(seen)


def test_clocks_of_this_system_agree_while_it_is_awake() -> None:
    watch = system_watch()
    assert watch.look() == pytest.approx((0.0, 0.0), abs=0.5)


@pytest.mark.virtual_time(limit_s=60)
@pytest.mark.parametrize(
    ("slept_s", "stood_s", "connected_anew"),
    [(3600.0, 0.0, True), (CONNECTIONS_S, 0.0, True), (LEAST_S, 0.0, False), (0.0, 600.0, False)],
)
async def test_node_that_slept_measures_anew_and_connects_anew_where_connections_cannot_have_lasted(
    slept_s: float, stood_s: float, connected_anew: bool
) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(Waking(machine.parts, machine.anew, watch=machine.watch).run)
        machine.passes(awake_s=LOOK_S, slept_s=LEAST_S - 0.1)
        await trio.sleep(1.5 * LOOK_S)
        assert machine.done == []
        machine.passes(awake_s=LOOK_S + stood_s, slept_s=slept_s)
        await trio.sleep(LOOK_S)
        connected = ["connected anew"] if connected_anew else []
        seconds = slept_s + stood_s
        assert machine.done == [seconds, woke_text(seconds), "measured anew", *connected, "told"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("seconds", "length"), [(12.3, "12 s"), (1860.0, "31 min"), (30_000.0, "8.3 h")])
def test_user_reads_for_how_long(seconds: float, length: str) -> None:
    assert woke_text(seconds).startswith(f"this node did not run for {length}: ")
