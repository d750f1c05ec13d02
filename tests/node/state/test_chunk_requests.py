"""The scheduler of transfers in virtual time: donors of every pace, who stall, break, lie and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from shoal.node.state import chunk_requests as requests_module
from shoal.node.state.chunk_requests import (
    FURTHER_S,
    IDLE_LIMIT_S,
    STALL_S,
    WINDOW_LIMIT_BYTES,
    WINDOW_MIN_CHUNKS,
    Transfer,
)
from shoal.protocol import donors as donors_module
from shoal.protocol.donors import BAN_LIMIT_S, BAN_S, DonorScores
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId

MB = 10**6
FAST, SLOW, THIRD = PeerId("fast"), PeerId("slow"), PeerId("third")
STEP_S = 0.01


@dataclass
class Donor:
    """Sends what it was asked for, in order, at `rate`; `stops_at`: from then on nothing more."""

    peer: PeerId
    rate: float
    stops_at: float = float("inf")
    lies: bool = False
    queue: list[int] = field(default_factory=list)
    credit: float = 0.0
    sent: int = 0
    most_owed: int = 0


class Simulation:
    """A transfer and its donors, stepped through time."""

    def __init__(
        self, sizes: Sequence[int], donors: Sequence[Donor], *, late: dict[PeerId, float] | None = None
    ) -> None:
        self.sizes = sizes
        self.transfer = Transfer(sizes)
        self.donors = {donor.peer: donor for donor in donors}
        self.scores = DonorScores()
        self.came: dict[int, list[PeerId]] = {}
        self.now = 0.0
        self._late = late or {}
        for donor in donors:
            if donor.peer not in self._late:
                self.transfer.add(donor.peer, 0.0)

    def step(self) -> None:
        for peer, at in list(self._late.items()):
            if self.now >= at:
                del self._late[peer]
                self.transfer.add(peer, self.now)
        for ask in self.transfer.requests(self.now):
            donor = self.donors[ask.donor]
            assert ask.chunk not in donor.queue
            donor.queue.append(ask.chunk)
            donor.most_owed = max(donor.most_owed, sum(self.sizes[chunk] for chunk in donor.queue))
        self.now += STEP_S
        for donor in self.donors.values():
            if donor.queue and self.now < donor.stops_at:
                self._send(donor)
            if donor.peer in self.transfer.donors:
                self.transfer.moved(donor.peer, donor.sent, donor.sent, self.now)
        self.transfer.look(self.now)

    def _send(self, donor: Donor) -> None:
        moved = donor.rate * STEP_S
        donor.credit += moved
        donor.sent += int(moved)
        while donor.queue and donor.credit >= self.sizes[donor.queue[0]]:
            chunk = donor.queue.pop(0)
            donor.credit -= self.sizes[chunk]
            if donor.lies:
                self.scores.offended(donor.peer, self.now)
                self.transfer.drop(donor.peer, "not the certified one")
                donor.queue.clear()
                return
            if self.transfer.done:
                return
            self.came.setdefault(chunk, []).append(donor.peer)
            for other in self.transfer.arrived(donor.peer, chunk):
                if chunk in self.donors[other].queue[1:]:
                    self.donors[other].queue.remove(chunk)
        if not donor.queue:
            donor.credit = 0.0

    def run(self, limit_s: float = 600.0) -> float:
        """Until everything is here, or nobody is left; how long that took."""
        while not self.transfer.done and (self.transfer.donors or self._late):
            self.step()
            assert self.now < limit_s, (self.transfer.missing, self.transfer.donors, self.transfer.out)
        return self.now


def chunks(megabytes: int, size: int = MB) -> list[int]:
    return [size] * (megabytes * MB // size)


# -- all at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(10, 10, 10), (40, 10, 5), (100, 1, 1)])
def test_donors_carry_what_their_bandwidth_is(rates: tuple[int, ...]) -> None:
    donors = [Donor(peer, rate * MB) for peer, rate in zip((FAST, SLOW, THIRD), rates, strict=True)]
    simulation = Simulation(chunks(300), donors)
    took, ideal = simulation.run(), 300 / sum(rates)
    assert took < 1.15 * ideal + 0.6
    arrived = simulation.transfer.arrived_bytes
    assert sum(arrived.values()) == 300 * MB
    for donor, rate in zip(donors, rates, strict=True):
        assert arrived[donor.peer] == pytest.approx(300 * MB * rate / sum(rates), rel=0.35, abs=4 * MB)


def test_every_chunk_is_asked_for_and_taken_once_where_all_goes_well() -> None:
    simulation = Simulation(chunks(200), [Donor(FAST, 20 * MB), Donor(SLOW, 19 * MB)])
    simulation.run()
    assert sorted(simulation.came) == list(range(200))
    twice = [peers for peers in simulation.came.values() if len(peers) > 1]
    assert len(twice) <= 4  # at the very end
    assert sum(simulation.transfer.arrived_bytes.values()) == 200 * MB


def test_window_is_what_a_donor_brings_in_half_a_second() -> None:
    donors = [Donor(FAST, 1000 * MB), Donor(SLOW, 10 * MB)]
    Simulation(chunks(2000), donors).run()
    assert donors[0].most_owed <= WINDOW_LIMIT_BYTES
    assert donors[1].most_owed <= max(requests_module.WINDOW_FIRST_BYTES, 6 * MB)


def test_donor_is_asked_again_once_a_quarter_of_its_window_is_free() -> None:
    transfer = Transfer([MB] * 100)
    transfer.add(FAST, 0.0, rate=32.0 * MB)
    owed = [ask.chunk for ask in transfer.requests(0.0)]
    assert owed == list(range(16))  # half a second's worth
    for chunk in owed[:3]:
        transfer.arrived(FAST, chunk)
    assert transfer.requests(0.1) == []
    transfer.arrived(FAST, owed[3])
    assert [ask.chunk for ask in transfer.requests(0.1)] == [16, 17, 18, 19]


def test_window_doubles_until_the_rate_is_known() -> None:
    transfer, owed, asked = Transfer([MB] * 100), list[int](), list[int]()
    transfer.add(FAST, 0.0)
    for _ in range(4):
        owed += [ask.chunk for ask in transfer.requests(0.01)]
        asked.append(len(owed))
        while owed:
            transfer.arrived(FAST, owed.pop())
    assert asked == [4, 4, 8, 16]


def test_busy_time_is_that_of_the_donor_who_is_through_first() -> None:
    transfer = Transfer([MB] * 100)
    assert transfer.busy_s(0.0) == 0.0
    transfer.add(SLOW, 0.0, rate=2.0 * MB)
    transfer.add(FAST, 0.0, rate=20.0 * MB)
    assert transfer.busy_s(0.0) == 0.0  # nothing is asked of them yet
    asks = transfer.requests(0.0)
    assert transfer.busy_s(0.0) == pytest.approx(
        0.5
    )  # ten of the fast one's, two of the slow one's would take a second
    for ask in [ask for ask in asks if ask.donor == FAST][:9]:
        transfer.arrived(FAST, ask.chunk)
    assert transfer.busy_s(0.3) == pytest.approx(0.05)
    transfer.add(THIRD, 0.3)
    assert transfer.busy_s(0.3) == 0.0  # one has nothing to do, and there is something to be done


def test_chunks_larger_than_a_window_are_asked_for_two_at_a_time() -> None:
    transfer = Transfer([64 * MB] * 8)
    transfer.add(FAST, 0.0, rate=5.0 * MB)
    assert [ask.chunk for ask in transfer.requests(0.0)] == list(range(WINDOW_MIN_CHUNKS))
    assert transfer.requests(0.0) == []


def test_who_was_fast_the_last_time_is_asked_first_and_for_more() -> None:
    transfer = Transfer([MB] * 16)
    transfer.add(SLOW, 0.0, rate=2.0 * MB)
    transfer.add(FAST, 0.0, rate=20.0 * MB)
    asks = transfer.requests(0.0)
    assert [ask.donor for ask in asks] == [FAST] * 10 + [SLOW] * 2


def test_chunks_that_are_here_are_not_asked_for() -> None:
    transfer = Transfer([MB] * 5, here=frozenset({0, 3}))
    transfer.add(FAST, 0.0, rate=10.0 * MB)
    assert [ask.chunk for ask in transfer.requests(0.0)] == [1, 2, 4]
    for chunk in (1, 2, 4):
        assert not transfer.done
        assert transfer.arrived(FAST, chunk) == []
    assert transfer.done
    assert Transfer([MB] * 2, here=frozenset({0, 1})).done


def test_late_donor_joins_in() -> None:
    simulation = Simulation(chunks(100), [Donor(SLOW, 5 * MB), Donor(FAST, 50 * MB)], late={FAST: 2.0})
    assert simulation.run() < 4.5
    assert simulation.transfer.arrived_bytes[FAST] > 70 * MB


def test_the_end_does_not_wait_for_the_slowest() -> None:
    """It was asked for two chunks when nothing was known of it; the last of them would take 20 s."""
    simulation = Simulation(chunks(100, 10 * MB), [Donor(FAST, 50 * MB), Donor(SLOW, MB)])
    assert simulation.run() < 4.0
    assert simulation.transfer.arrived_bytes == {FAST: 100 * MB}


def test_same_calls_lead_to_the_same_requests() -> None:
    def play() -> list[dict[int, list[PeerId]]]:
        simulation = Simulation(chunks(50), [Donor(FAST, 9 * MB), Donor(SLOW, 4 * MB), Donor(THIRD, 0.5 * MB)])
        simulation.run()
        return [simulation.came]

    assert play() == play()


# -- donors that go ------------------------------------------------------------------------------------------


def test_stalled_donor_is_dropped_and_its_chunks_come_from_others() -> None:
    simulation = Simulation(chunks(100), [Donor(FAST, 10 * MB, stops_at=2.0), Donor(SLOW, 10 * MB)])
    took = simulation.run()
    assert took < 2 + 8.6
    assert simulation.transfer.out == {FAST: f"sent nothing for {STALL_S:g} s"} or took < 2.0 + STALL_S
    assert sum(simulation.transfer.arrived_bytes.values()) == 100 * MB
    assert sorted(simulation.came) == list(range(100))


def test_only_donor_that_stalls_ends_the_transfer_at_the_deadline() -> None:
    simulation = Simulation(chunks(100), [Donor(FAST, 10 * MB, stops_at=1.0)])
    assert simulation.run() == pytest.approx(1.0 + STALL_S, abs=0.1)
    assert not simulation.transfer.done
    assert str(simulation.transfer.failure("the state of round 7")) == (
        "no peer has the state of round 7 (fast: sent nothing for 5 s)"
    )


def test_slow_donor_is_kept_while_anything_moves_but_not_for_ever() -> None:
    transfer = Transfer([64 * MB])
    transfer.add(SLOW, 0.0)
    transfer.requests(0.0)
    now = 0.0
    while now < IDLE_LIMIT_S - 1:
        now += 1.0
        transfer.moved(SLOW, 0, int(1000 * now), now)  # its lane carries other things
        assert transfer.look(now) == []
    assert transfer.deadline() == pytest.approx(IDLE_LIMIT_S)
    transfer.moved(SLOW, 0, 10**6, IDLE_LIMIT_S)
    assert transfer.look(IDLE_LIMIT_S) == [SLOW]
    assert transfer.out == {SLOW: f"sent nothing for {IDLE_LIMIT_S:g} s"}


def test_donor_that_owes_nothing_does_not_stall() -> None:
    transfer = Transfer([MB, MB])
    transfer.add(FAST, 0.0)
    transfer.requests(0.0)
    transfer.add(SLOW, 0.0)
    assert transfer.requests(0.0) == []
    transfer.moved(FAST, 1000, 1000, 4.9)
    transfer.moved(SLOW, 0, 0, 4.9)
    transfer.moved(FAST, 2000, 2000, 9.0)
    assert transfer.look(11.0) == []
    assert transfer.donors == (FAST, SLOW)


def test_dropped_donors_chunks_are_asked_for_first_and_may_still_arrive() -> None:
    transfer = Transfer([MB] * 8)
    transfer.add(SLOW, 0.0, rate=8.0 * MB)
    assert [ask.chunk for ask in transfer.requests(0.0)] == [0, 1, 2, 3]
    transfer.drop(SLOW, "its lane broke")
    transfer.drop(SLOW, "and once more")
    assert transfer.out == {SLOW: "its lane broke"}
    assert transfer.arrived(SLOW, 1) == []  # it was complete already
    transfer.add(FAST, 0.0, rate=8.0 * MB)
    assert [ask.chunk for ask in transfer.requests(0.0)] == [0, 2, 3, 4]
    assert transfer.arrived(FAST, 1) == []  # nothing is counted twice
    assert transfer.arrived_bytes == {SLOW: MB}


def test_donor_whose_lane_broke_may_come_back() -> None:
    transfer = Transfer([MB] * 2)
    transfer.add(FAST, 0.0)
    transfer.requests(0.0)
    transfer.drop(FAST, "its lane broke")
    transfer.add(FAST, 1.0)
    assert transfer.out == {}
    assert [ask.chunk for ask in transfer.requests(1.0)] == [0, 1]
    with pytest.raises(LocalError, match="a donor already"):
        transfer.add(FAST, 1.0)


def test_liar_is_dropped_and_everything_comes_from_the_others() -> None:
    simulation = Simulation(chunks(60), [Donor(FAST, 100 * MB, lies=True), Donor(SLOW, 10 * MB)])
    simulation.run()
    assert simulation.transfer.arrived_bytes == {SLOW: 60 * MB}
    assert simulation.scores.banned(FAST, simulation.now)
    assert not simulation.scores.banned(SLOW, simulation.now)


def test_takeover_counts_whoever_is_first() -> None:
    transfer = Transfer([MB] * 2)
    transfer.add(SLOW, 0.0, rate=0.1 * MB)
    assert [ask.chunk for ask in transfer.requests(0.0)] == [0, 1]
    transfer.add(FAST, 0.0, rate=10.0 * MB)
    asks = transfer.requests(0.0)
    assert {(ask.donor, ask.chunk) for ask in asks} == {(FAST, 0), (FAST, 1)}
    assert transfer.requests(0.0) == []  # and nobody takes over what two have
    assert transfer.arrived(FAST, 1) == [SLOW]
    assert transfer.arrived(SLOW, 0) == [FAST]
    assert transfer.done
    assert transfer.arrived_bytes == {FAST: MB, SLOW: MB}


def test_two_that_trickle_cannot_keep_a_chunk_back_from_a_third() -> None:
    """They were fast the last time, and took over of each other all that is left before the third was there."""
    simulation = Simulation(chunks(8), [Donor(FAST, 200), Donor(SLOW, 200), Donor(THIRD, 10 * MB)], late={THIRD: 20.0})
    for peer, rate in ((FAST, 100 * MB), (SLOW, 300 * MB)):
        simulation.transfer.drop(peer, "to come back with a rate")
        simulation.transfer.add(peer, 0.0, rate=rate)
    assert simulation.run() < 30.0
    assert simulation.transfer.arrived_bytes == {THIRD: 8 * MB}


def test_a_chunk_is_asked_of_a_third_only_when_the_second_had_its_time() -> None:
    transfer = Transfer([100 * MB])
    transfer.add(SLOW, 0.0, rate=0.1 * MB)
    assert [ask.donor for ask in transfer.requests(0.0)] == [SLOW]
    transfer.add(THIRD, 1.0, rate=1.0 * MB)
    assert [ask.donor for ask in transfer.requests(1.0)] == [THIRD]
    transfer.add(FAST, 1.5, rate=100.0 * MB)
    assert transfer.requests(1.0 + FURTHER_S - 0.1) == []
    assert [ask.donor for ask in transfer.requests(1.0 + FURTHER_S)] == [FAST]
    assert set(transfer.arrived(FAST, 0)) == {SLOW, THIRD}
    assert transfer.done


@pytest.mark.parametrize("seed", range(8))
def test_random_donors_bring_everything_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((1, 1000, MB, 3 * MB)) for _ in range(draw.randrange(1, 120))]
    donors = [
        Donor(
            PeerId(f"d{n}"),
            draw.uniform(0.5, 60) * MB,
            stops_at=draw.choice((float("inf"), draw.uniform(0, 3))) if n else float("inf"),
            lies=bool(n) and draw.random() < 0.2,
        )
        for n in range(draw.randrange(1, 7))
    ]
    late = {donor.peer: draw.uniform(0, 2) for donor in donors if draw.random() < 0.3}
    simulation = Simulation(sizes, donors, late=late)
    simulation.run()
    assert simulation.transfer.done
    assert sorted(simulation.came) == list(range(len(sizes)))
    assert sum(simulation.transfer.arrived_bytes.values()) == sum(sizes)
    liars = {donor.peer for donor in donors if donor.lies}
    assert not liars & set(simulation.transfer.arrived_bytes)


# -- scores --------------------------------------------------------------------------------------------------


def test_liar_is_banned_for_longer_each_time() -> None:
    scores, now = DonorScores(), 0.0
    for lasts in (BAN_S, 2 * BAN_S, 4 * BAN_S):
        scores.offended(FAST, now)
        assert scores.banned(FAST, now + lasts - 1)
        assert not scores.banned(FAST, now + lasts)
        now += lasts
    for _ in range(99):
        scores.offended(FAST, now)
    assert scores.banned(FAST, now + BAN_LIMIT_S - 1)
    assert not scores.banned(FAST, now + BAN_LIMIT_S)


def test_ranking_is_by_rate_and_leaves_out_the_banned() -> None:
    scores = DonorScores()
    scores.measured(SLOW, 1.0)
    scores.measured(FAST, 9.0)
    assert scores.ranked([THIRD, SLOW, FAST], 0.0) == [FAST, SLOW, THIRD]
    scores.offended(FAST, 0.0)
    assert scores.ranked([THIRD, SLOW, FAST], 0.0) == [SLOW, THIRD]
    assert scores.ranked([THIRD, SLOW, FAST], BAN_S) == [FAST, SLOW, THIRD]


def test_scores_are_bounded_and_forget_who_was_heard_of_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors_module, "SCORE_LIMIT", 3)
    scores = DonorScores()
    scores.offended(FAST, 0.0)
    record: Callable[[str], None] = lambda name: scores.measured(PeerId(name), 1.0)  # noqa: E731
    record("a")
    scores.offended(FAST, 0.0)
    for name in ("b", "c"):
        record(name)
    assert scores.banned(FAST, 1.0)
    assert scores.rate(PeerId("a")) is None
    assert scores.rate(PeerId("b")) == 1.0
