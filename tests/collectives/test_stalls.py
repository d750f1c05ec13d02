"""Deadlines on progress, with a clock made by hand: who is found to stall, when, and who never is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.collectives.stalls import STALL_SHARE, SUSPENDED_S, BusyRate, StallWatch
from shoal.protocol.identity import PeerId

SLOW, OTHER = PeerId("slow"), PeerId("other")
PERIOD_S = 0.25
STALL_S = 2.0
PLANNED = 1000.0


def watch(planned: float = PLANNED) -> StallWatch:
    return StallWatch(stall_s=STALL_S, planned={SLOW: planned, OTHER: planned} if planned else {})


def look_until(
    watching: StallWatch, now: float, until: float, moved: Callable[[float], float], *, owing: bool = True
) -> float | None:
    """Look every PERIOD_S up to and with `until`; when SLOW was first found to stall, if it was."""
    while now <= until:
        watching.look(now, owing={SLOW} if owing else set(), moved={SLOW: int(moved(now))})
        if watching.stalled():
            assert watching.stalled() == {SLOW}
            return now
        now += PERIOD_S
    return None


@pytest.mark.parametrize("planned", [0.0, PLANNED])
def test_silent_peer_is_found_at_the_deadline_and_not_before(planned: float) -> None:
    assert look_until(watch(planned), 100.0, 110.0, lambda now: 0) == 100.0 + STALL_S


@pytest.mark.parametrize(
    ("share", "found"), [(0.0, True), (0.2, True), (STALL_SHARE - 0.01, True), (0.3, False), (1.0, False)]
)
def test_peer_under_a_quarter_of_its_planned_rate_is_found(share: float, found: bool) -> None:
    at = look_until(watch(), 0.0, 20.0, lambda now: share * PLANNED * now)
    assert at == (STALL_S if found else None)


def test_any_byte_counts_of_a_peer_whose_rate_is_unknown() -> None:
    assert look_until(watch(0.0), 0.0, 20.0, lambda now: now // STALL_S) is None
    assert look_until(watch(0.0), 0.0, 20.0, lambda now: now // (2 * STALL_S)) is not None


def test_peer_that_falls_silent_is_found_a_deadline_later() -> None:
    at = look_until(watch(), 0.0, 20.0, lambda now: PLANNED * min(now, 5.0))
    assert at is not None
    assert 5.0 < at <= 5.0 + STALL_S
    # Three quarters of the window are enough to be under a quarter: what it moved before is not credit for ever.
    assert at == 5.0 + 0.75 * STALL_S + PERIOD_S


def test_burst_does_not_buy_more_than_its_window() -> None:
    at = look_until(watch(), 0.0, 20.0, lambda now: 1e6 * (now >= 1.0))
    assert at == 1.0 + STALL_S


def test_observer_that_was_suspended_accuses_nobody() -> None:
    watching = watch()
    assert look_until(watching, 0.0, 1.75, lambda now: 0) is None
    woken = 1.75 + SUSPENDED_S + 0.01
    assert look_until(watching, woken, woken + STALL_S - PERIOD_S, lambda now: 0) is None
    assert look_until(watching, woken + STALL_S, 20.0, lambda now: 0) == woken + STALL_S


def test_observer_that_was_merely_busy_accuses() -> None:
    watching = watch()
    assert look_until(watching, 0.0, 1.75, lambda now: 0) is None
    assert look_until(watching, 1.75 + SUSPENDED_S, 20.0, lambda now: 0) == 1.75 + SUSPENDED_S


def test_peer_that_stopped_owing_starts_anew() -> None:
    watching = watch()
    assert look_until(watching, 0.0, 1.5, lambda now: 0) is None
    assert look_until(watching, 1.75, 1.75, lambda now: 0, owing=False) is None
    assert look_until(watching, 2.0, 3.75, lambda now: 0) is None
    assert look_until(watching, 4.0, 9.0, lambda now: 0) == 4.0


def test_who_owes_nothing_never_stalls() -> None:
    watching = watch()
    assert look_until(watching, 0.0, 20.0, lambda now: 0, owing=False) is None
    watching.look(20.25, owing=set(), moved={})
    assert watching.stalled() == set()


def test_each_is_judged_by_itself() -> None:
    watching = StallWatch(stall_s=STALL_S, planned={SLOW: PLANNED, OTHER: 4 * PLANNED})
    for tick in range(9):
        now = tick * PERIOD_S
        moved = int(0.5 * PLANNED * now)  # enough of SLOW's rate, an eighth of OTHER's
        watching.look(now, owing={SLOW, OTHER}, moved={SLOW: moved, OTHER: moved})
    assert watching.stalled() == {OTHER}


def test_rate_is_taken_over_the_time_in_which_there_was_something_to_move() -> None:
    rate = BusyRate(10.0, 500)
    assert rate.bytes_per_s(0.5) == 0
    rate.look(11.0, 1500, busy=True)
    rate.look(21.0, 1500, busy=False)
    rate.look(22.0, 3500, busy=True)
    assert rate.bytes_per_s(0.5) == 1500
    rate.look(23.0, 9000, busy=False)  # of something else: it neither counts nor is made up for later
    rate.look(24.0, 9000, busy=True)
    assert rate.bytes_per_s(0.5) == 1000


def test_rate_is_unknown_until_there_was_enough_to_see() -> None:
    rate = BusyRate(0.0, 0)
    rate.look(0.25, 1 << 20, busy=True)
    assert rate.bytes_per_s(0.5) == 0
    rate.look(0.5, 1 << 20, busy=True)
    assert rate.bytes_per_s(0.5) == 2 << 20
