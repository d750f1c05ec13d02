"""What is late is waited for as long as it was late lately, and never longer than a bound."""

from __future__ import annotations

import pytest

from shoal.protocol.lateness import HALF_LIFE_S, LATE_LIMIT_S, NOTED_S, WAITED_TIMES, Lateness


def test_nobody_has_itself_waited_for_longer_than_the_bound_however_late_it_answers() -> None:
    lateness = Lateness()
    for now in range(10):
        lateness.note(3600.0, float(now))
        assert lateness.waited_s(float(now)) == WAITED_TIMES * LATE_LIMIT_S


def test_what_was_late_is_forgotten_by_half_in_its_time_and_the_slowest_counts_meanwhile() -> None:
    lateness = Lateness()
    lateness.note(2.0, 0.0)
    lateness.note(0.5, HALF_LIFE_S)
    assert lateness.seconds(HALF_LIFE_S) == pytest.approx(1.0)
    assert lateness.seconds(2 * HALF_LIFE_S) == pytest.approx(0.5)
    assert lateness.seconds(4 * HALF_LIFE_S) == 0.0, "no more than is noted"


def test_what_is_hardly_late_is_in_time() -> None:
    lateness = Lateness()
    lateness.note(NOTED_S, 0.0)
    assert lateness.seconds(0.0) == 0.0
