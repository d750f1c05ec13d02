from __future__ import annotations

import heapq
import time

import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.limits import TokenBucket
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.queue import CHUNKS_PER_EMPTY_FRAME, FrameQueue
from tests.swarm.lane_ends import WAIT_S, RecordingSink, agree, make_lane, tcp_pair

MB = 1_000_000
WINDOW_S = 2.0
ATTEMPTS = 4
LARGE = memoryview(bytes(FRAME_LIMIT_BYTES))


def simulated_bytes(rate: int, lanes: int, seconds: float, *, late_s: float = 0.0) -> int:
    """What lanes that share a limit move, when nothing else holds them back; they oversleep by `late_s`."""
    now = 0.0
    limit = RateLimit(rate, clock=lambda: now)
    turns = [(0.0, lane) for lane in range(lanes)]
    now, moved = 0.3, 0  # the limit is older than the traffic
    end = now + seconds
    while turns[0][0] < end:
        at, lane = heapq.heappop(turns)
        now = max(now, at)
        piece = len(limit.piece(LARGE))
        moved += piece
        wait_s = limit.reserve(piece)
        heapq.heappush(turns, (now + wait_s + late_s if wait_s > 0 else now, lane))
    return moved


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("rate", [MB, 10 * MB, 100 * MB])
@pytest.mark.parametrize("late_s", [0.0, 0.02])
def test_rate_limit_holds_within_a_tenth_over_two_seconds(rate: int, lanes: int, late_s: float) -> None:
    assert simulated_bytes(rate, lanes, WINDOW_S, late_s=late_s) == pytest.approx(rate * WINDOW_S, rel=0.1)


def test_cap_is_changed_lifted_and_set_again_and_nothing_is_saved_up_by_that() -> None:
    now = 100.0
    limit = RateLimit(clock=lambda: now)
    assert (limit.bytes_per_s, limit.reserve(1 << 40), len(limit.piece(LARGE))) == (None, 0.0, FRAME_LIMIT_BYTES)
    limit.change(MB)
    assert limit.reserve(MB // 2) == pytest.approx(0.5)
    limit.change(4 * MB)
    assert limit.reserve(MB) == pytest.approx(0.25), "what was owed under the other cap is forgiven"
    with pytest.raises(ConfigError, match="a rate limit of 9 bytes/s is too low; give at least"):
        limit.change(9)
    assert limit.bytes_per_s == 4 * MB
    limit.change(None)
    assert limit.reserve(1 << 40) == 0.0


@pytest.mark.parametrize(
    ("rate", "lanes", "direction"),
    [(MB, 3, "upload"), (10 * MB, 1, "download"), (100 * MB, 3, "upload")],
)
def test_lanes_together_hold_a_rate_limit(rate: int, lanes: int, direction: str) -> None:
    limit = RateLimit(rate)
    capped = LaneLimits(upload=limit) if direction == "upload" else LaneLimits(download=limit)
    limits = (capped, LaneLimits()) if direction == "upload" else (LaneLimits(), capped)
    queue, ends = FrameQueue(), [(tcp_pair(), agree()) for _ in range(lanes)]
    near = [make_lane(pair[0], keys[0], RecordingSink(), limits=limits[0], queue=queue) for pair, keys in ends]
    far = [make_lane(pair[1], keys[1], RecordingSink(), limits=limits[1]) for pair, keys in ends]
    header = FrameHeader(kind=FrameKind.STATE, length=FRAME_LIMIT_BYTES, total=FRAME_LIMIT_BYTES)
    payload = bytes(FRAME_LIMIT_BYTES)
    shares = []
    try:
        for _ in range(ATTEMPTS):
            while queue.queued_bytes < 2 * rate * WINDOW_S:
                near[0].post(header, payload)
            started, before = time.monotonic(), moved(near, far, direction)
            time.sleep(WINDOW_S)  # the window itself, not a wait for something
            shares.append((moved(near, far, direction) - before) / (rate * (time.monotonic() - started)))
            assert shares[-1] <= 1.1
            if shares[-1] >= 0.9:  # a machine that is too busy to send moves less, not more
                break
        assert shares[-1] >= 0.9, shares
    finally:
        for lane in near + far:
            lane.abort()
            assert lane.join(WAIT_S)


def moved(near: list[Lane], far: list[Lane], direction: str) -> int:
    """Bytes on the side that has the cap."""
    return sum(lane.bytes_sent for lane in near) if direction == "upload" else sum(ln.bytes_received for ln in far)


@pytest.mark.parametrize(("frames", "burst", "per_s", "further"), [(60, 20, 40, 0), (6, 66, 200, 256)])
def test_frames_that_carry_nothing_are_read_at_their_rate_over_all_lanes_of_a_peer(
    frames: int, burst: int, per_s: int, further: int
) -> None:
    """further: chunks that each asks for beside the first."""
    lanes, cost = 2, 1 + further / CHUNKS_PER_EMPTY_FRAME
    queue = FrameQueue()
    queue.empty_frames = TokenBucket(per_s, burst, time.monotonic())
    ends, sink = [(tcp_pair(), agree()) for _ in range(lanes)], RecordingSink()
    near = [make_lane(pair[0], keys[0], RecordingSink()) for pair, keys in ends]
    far = [make_lane(pair[1], keys[1], sink, queue=queue) for pair, keys in ends]
    empty = FrameHeader(kind=FrameKind.REQUEST, length=0, total=further)
    try:
        began = time.monotonic()
        for number in range(frames):
            near[number % lanes].post(empty, b"")
        for _ in range(frames):
            assert sink.frames.get(timeout=WAIT_S) == (empty, b"")
        assert time.monotonic() - began >= ((frames - lanes) * cost - burst) / per_s > 0.4
        assert all(lane.usable for lane in far)
    finally:
        for lane in near + far:
            lane.abort()
            assert lane.join(WAIT_S)
