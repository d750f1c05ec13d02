"""One direction of an emulated link: rate, delay, queue and loss, in time that the test makes."""

from __future__ import annotations

import random

import pytest

from shoal.testnet.wan_relay import QUEUE_S, Link, main

RATE = 1_000_000.0
FRAME = bytes(1000)


def link(*, rate: float = RATE, delay_s: float = 0.0, loss: float = 0.0) -> Link:
    return Link(rate_bytes_per_s=rate, delay_s=delay_s, loss=loss, draw=random.Random(1))


def test_frames_come_out_in_order_at_the_rate_and_after_the_delay() -> None:
    wire = link(delay_s=0.05)
    for number in range(10):
        assert wire.send(bytes([number]) + FRAME[1:], now=1.0)
    assert wire.next_at() == pytest.approx(1.0 + 0.001 + 0.05)
    assert wire.arrived(1.0509) == []
    assert [frame[0] for frame in wire.arrived(1.0555)] == [0, 1, 2, 3, 4]
    assert [frame[0] for frame in wire.arrived(2.0)] == [5, 6, 7, 8, 9]
    assert wire.arrived(2.0) == []
    assert wire.next_at() is None


def test_rate_holds_over_time_and_idle_time_is_not_saved_up() -> None:
    wire, sent, arrived = link(), 0, 0
    for tick in range(2000):
        now = 100.0 + tick / 1000
        while wire.send(FRAME, now):
            sent += 1
        arrived += len(wire.arrived(now))
    assert arrived == pytest.approx(2 * RATE / len(FRAME), rel=0.01)
    assert sent - arrived == pytest.approx(QUEUE_S * RATE / len(FRAME), rel=0.02)


def test_full_queue_drops_what_comes() -> None:
    wire = link()
    taken = sum(wire.send(FRAME, now=5.0) for _ in range(1000))
    assert taken == pytest.approx(QUEUE_S * RATE / len(FRAME), abs=1.1)
    assert not wire.send(FRAME, now=5.0)
    assert wire.send(FRAME, now=5.1)


def test_narrow_link_has_room_for_some_frames_all_the_same() -> None:
    wire = link(rate=10_000)
    assert sum(wire.send(FRAME, now=0.0) for _ in range(1000)) > 60


def test_loss_is_the_share_that_never_arrives() -> None:
    wire, arrived = link(loss=0.2), 0
    for tick in range(10_000):
        wire.send(FRAME, now=tick / 500)
        arrived += len(wire.arrived(tick / 500))
    assert arrived == pytest.approx(8000, rel=0.03)


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["a/b", "c/d", "1", "2"], ["a", "c/d", "1", "2", "0"], ["a/b", "c/d", "fast", "2", "0"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("usage: ")
