"""One direction of an emulated link: rate, delay, queue, jitter and loss, in time that the test makes."""

from __future__ import annotations

import random

import pytest

from shoal.testnet.links.wan_frames import HEADER_BYTES
from shoal.testnet.links.wan_link import JITTER_PERIOD_S, QUEUE_S, Link
from shoal.testnet.links.wan_relay import main
from tests.testnet.links import test_wan_frames as frames

RATE = 1_000_000.0
FRAME_BYTES = 1000
"""On the wire."""
FRAME = bytes(HEADER_BYTES + FRAME_BYTES)


def link(*, rate: float = RATE, delay_s: float = 0.0, loss: float = 0.0, jitter_s: float = 0.0) -> Link:
    return Link(rate_bytes_per_s=rate, delay_s=delay_s, loss=loss, jitter_s=jitter_s, draw=random.Random(1))


def numbered(number: int) -> bytes:
    return FRAME[:-1] + bytes([number])


def test_frames_come_out_in_order_at_the_rate_and_after_the_delay() -> None:
    wire = link(delay_s=0.05)
    for number in range(10):
        assert wire.send(numbered(number), now=1.0)
    assert wire.next_at() == pytest.approx(1.0 + 0.001 + 0.05)
    assert wire.arrived(1.0509) == []
    assert [frame[-1] for frame in wire.arrived(1.0555)] == [0, 1, 2, 3, 4]
    assert [frame[-1] for frame in wire.arrived(2.0)] == [5, 6, 7, 8, 9]
    assert wire.arrived(2.0) == []
    assert wire.next_at() is None


def test_rate_holds_over_time_and_idle_time_is_not_saved_up() -> None:
    wire, sent, arrived = link(), 0, 0
    for tick in range(2000):
        now = 100.0 + tick / 1000
        while wire.send(FRAME, now):
            sent += 1
        arrived += len(wire.arrived(now))
    assert arrived == pytest.approx(2 * RATE / FRAME_BYTES, rel=0.01)
    assert sent - arrived == pytest.approx(QUEUE_S * RATE / FRAME_BYTES, rel=0.02)


def test_full_queue_drops_what_comes() -> None:
    wire = link()
    taken = sum(wire.send(FRAME, now=5.0) for _ in range(1000))
    assert taken == pytest.approx(QUEUE_S * RATE / FRAME_BYTES, abs=1.1)
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


def test_burst_takes_the_time_of_its_packets_headers_and_all() -> None:
    wire, whole = link(), frames.frame(frames.payload_of(10 * frames.EACH))
    assert wire.send(whole, now=0.0)
    assert wire.next_at() == pytest.approx(10 * (frames.EACH + frames.HEADERS) / RATE)
    assert wire.arrived(1.0) == [whole]


def test_loss_takes_single_packets_out_of_bursts_and_no_more_than_its_share() -> None:
    wire, packets, payload = link(loss=0.02, rate=1e9), 0, 0
    size = 40 * frames.EACH
    whole = frames.frame(frames.payload_of(size))
    for tick in range(1000):
        assert wire.send(whole, now=float(tick))
        for part in wire.arrived(tick + 0.9):
            count, wire_bytes = frames.burst(part) if part[1] else (1, len(part) - HEADER_BYTES)
            packets += count
            payload += wire_bytes - count * frames.HEADERS
    assert packets == pytest.approx(0.98 * 40_000, rel=0.003)
    assert payload == packets * frames.EACH


def test_jitter_moves_the_delay_either_way_and_nothing_overtakes() -> None:
    wire, delays, last = link(delay_s=0.05, jitter_s=0.02, rate=1e9), [], 0.0
    for tick in range(2000):
        now = tick * JITTER_PERIOD_S / 2
        assert wire.send(numbered(tick % 256), now)
        at = wire.next_at()
        assert at is not None
        assert [frame[-1] for frame in wire.arrived(at)] == [tick % 256]
        assert at >= last
        delays.append(at - now)
        last = at
    assert 0.029 < min(delays) < 0.033
    assert 0.067 < max(delays) < 0.071
    assert sum(delays) / len(delays) == pytest.approx(0.05, abs=0.004)
    assert len({round(delay, 6) for delay in delays}) > 500


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    right = ["a/b", "c/d", "1", "1", "2", "0", "0"]
    for wrong in ([], right[:-1], ["a", *right[1:]], [*right[:2], "fast", *right[3:]]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("usage: ")
