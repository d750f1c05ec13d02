"""The pace of a sampler: what it makes follows what is pulled, whatever the demand."""

from __future__ import annotations

import random
from itertools import count

import pytest

from shoal.protocol.offer_pace import (
    AWAITED_LIMIT,
    GRANTED_FIRST,
    GRANTED_LIMIT,
    GRANTED_PER_PULL,
    PROBE_S,
    OfferPace,
)

STEP_S = 0.1


class Market:
    """Samplers that could make a group every STEP_S, and takers that pull `demand` groups a second among the newest."""

    def __init__(self, samplers: int, demand: float, *, seed: int = 0) -> None:
        self.paces = [OfferPace(0.0) for _ in range(samplers)]
        self.demand = demand
        self.now, self.owed = 0.0, 0.0
        self.offers: list[tuple[int, bytes]] = []
        self.made, self.taken = [0] * samplers, [0] * samplers
        self._names = (b"%d" % number for number in count())
        self._random = random.Random(seed)

    def run(self, seconds: float) -> tuple[int, int]:
        """Go on for so long; returns how many groups were made and how many taken in that time."""
        made, taken = sum(self.made), sum(self.taken)
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for index, pace in enumerate(self.paces):
                if not pace.wait_s(self.now):
                    self._make(index, pace)
            self.owed = min(self.owed + self.demand * STEP_S, 8.0)
            while self.owed >= 1 and self.offers:
                self.owed -= 1
                self._take()
        return sum(self.made) - made, sum(self.taken) - taken

    def _make(self, index: int, pace: OfferPace) -> None:
        digest = next(self._names)
        pace.made(digest, self.now)
        self.made[index] += 1
        self.offers = [*self.offers, (index, digest)][-64:]  # what is older is stale where it is offered

    def _take(self) -> None:
        index, digest = self.offers.pop(self._random.randrange(len(self.offers)))
        assert self.paces[index].pull(digest, self.now)
        self.taken[index] += 1


def test_what_nobody_wants_is_made_once_and_then_a_group_now_and_then() -> None:
    market = Market(6, demand=0.0)
    assert market.run(10.0) == (6 * GRANTED_FIRST, 0)
    made, _ = market.run(20 * PROBE_S)
    assert made == 6 * 20


def test_supply_follows_demand_and_little_more_is_made() -> None:
    market = Market(6, demand=4.0)
    market.run(120.0)
    made, taken = market.run(600.0)
    assert taken == pytest.approx(4.0 * 600, rel=0.02)  # nobody who takes goes without
    granted_before = 6 * GRANTED_LIMIT
    assert made <= GRANTED_PER_PULL * taken + 6 * 600 / PROBE_S + granted_before
    assert min(market.taken) > 100  # chance favours some for a while, and shuts out nobody


def test_demand_beyond_what_can_be_made_holds_nobody_back() -> None:
    market = Market(2, demand=100.0)
    made, taken = market.run(60.0)
    assert made == taken == 2 * 600


def test_demand_that_ends_leaves_no_more_than_was_granted() -> None:
    market = Market(1, demand=5.0)
    market.run(60.0)
    market.demand = 0.0
    made, _ = market.run(2 * PROBE_S)
    assert made <= GRANTED_LIMIT + 2
    market.demand = 5.0
    market.run(60.0)
    assert market.run(60.0)[1] == pytest.approx(300, abs=10)  # it comes back


def test_one_group_is_taken_once_whoever_pulls_it() -> None:
    pace = OfferPace(0.0)
    for number in range(int(GRANTED_FIRST)):
        pace.made(bytes([number]), 0.0)
    assert pace.wait_s(1.0) == PROBE_S - 1
    assert pace.pull(b"\0", 1.0)
    for _ in range(100):
        assert not pace.pull(b"\0", 1.0)
        assert not pace.pull(b"another's", 1.0)
    assert pace.pulled == 1
    assert pace.wait_s(1.0) == 0.0
    pace.made(b"a", 1.0)
    pace.made(b"b", 1.0)
    assert pace.wait_s(1.0) == PROBE_S - 1


def test_round_that_took_more_than_was_granted_is_waited_for() -> None:
    pace = OfferPace(0.0)
    for number in range(int(GRANTED_FIRST) + 3):
        pace.made(bytes([number]), 0.0)
    assert pace.wait_s(0.0) == 4 * PROBE_S
    assert pace.wait_s(3.5 * PROBE_S) == pytest.approx(0.5 * PROBE_S)
    assert pace.wait_s(4 * PROBE_S) == 0.0


def test_no_more_is_kept_than_the_limits() -> None:
    pace = OfferPace(0.0)
    assert pace.wait_s(1e6) == 0.0
    for number in range(int(GRANTED_LIMIT)):
        assert pace.wait_s(1e6) == 0.0
        pace.made(b"%d" % number, 1e6)
    assert pace.wait_s(1e6) > 0
    for number in range(AWAITED_LIMIT):
        pace.made(b"x%d" % number, 1e6)
    assert not pace.pull(b"0", 1e6)
    assert pace.pull(b"x0", 1e6)
