"""Virtual time: the order in which events happen, wherever they lie in its slices."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from shoal.lab.simulate.network import SLICES_PER_S, Timeline

SLICE_S = 1.0 / SLICES_PER_S


class OneHeap:
    """The same in the plainest way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.queue: list[tuple[float, int, Callable[[int], None], int]] = []
        self.count = 0

    def at(self, time: float, action: Callable[[int], None], name: int) -> None:
        """As the timeline's."""
        self.count += 1
        heapq.heappush(self.queue, (time, self.count, action, name))

    def after(self, delay_s: float, action: Callable[[int], None], name: int) -> None:
        """As the timeline's."""
        self.at(self.now + delay_s, action, name)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """As the timeline's."""
        while self.queue and self.queue[0][0] <= until:
            time, _, action, name = heapq.heappop(self.queue)
            self.now = max(self.now, time)
            self.events += 1
            action(name)
            if done():
                return
        self.now = max(self.now, until)

    @property
    def waiting(self) -> int:
        """As the timeline's."""
        return len(self.queue)


def history(line: Timeline | OneHeap, seed: int) -> list[tuple[float, int, int, int]]:
    """What happens, and when, where events ask for others: past ones, at once, soon, of one time, and much later."""
    rng, happened, names = random.Random(seed), list[tuple[float, int, int, int]](), iter(range(10**6))

    def ask() -> None:
        kind, name = rng.randrange(6), next(names)
        if kind == 0:
            line.at(line.now - rng.random(), happens, name)
        elif kind == 1:
            line.after(0.0, happens, name)
        elif kind == 2:
            line.after(SLICE_S * rng.random(), happens, name)
        elif kind == 3:
            line.at(float(int(line.now) + 1), happens, name)
        else:
            line.after(rng.choice((0.05, 3.0)) * rng.random(), happens, name)

    def happens(name: int) -> None:
        assert len(happened) < 5000, "something happens again and again"
        happened.append((line.now, name, line.events, line.waiting))
        for _ in range(rng.choice((0, 1, 1, 2)) if len(happened) < 1500 else 0):
            ask()

    for _ in range(20):
        ask()
    while line.waiting:
        left = rng.randrange(1, 50)
        last = len(happened) + left
        line.run(line.now + rng.choice((0.0, SLICE_S / 3, 0.3)), lambda last=last: len(happened) >= last)  # type: ignore[misc]
        happened.append((line.now, -1, line.events, line.waiting))
        assert len(happened) < 5000, "something never happens"
        if rng.random() < 0.3:
            ask()
    return happened


@pytest.mark.parametrize("seed", range(20))
def test_timeline_lets_happen_what_one_heap_would_in_the_same_order(seed: int) -> None:
    happened = history(Timeline(), seed)
    assert happened == history(OneHeap(), seed)
    assert len(happened) > 20


def test_timeline_goes_on_in_the_middle_of_a_slice() -> None:
    timeline, happened = Timeline(), list[str]()
    for at, name in ((0.3, "early"), (0.9, "late")):
        timeline.at(at * SLICE_S, happened.append, name)
    timeline.run(0.5 * SLICE_S, lambda: False)
    assert (happened, timeline.now, timeline.events, timeline.waiting) == (["early"], 0.5 * SLICE_S, 1, 1)
    timeline.at(0.1 * SLICE_S, happened.append, "past")
    timeline.run(1.0, lambda: len(happened) == 2)
    assert (happened, timeline.now) == (["early", "past"], 0.5 * SLICE_S)
    timeline.run(1.0, lambda: False)
    assert (happened, timeline.now, timeline.waiting) == (["early", "past", "late"], 1.0, 0)
