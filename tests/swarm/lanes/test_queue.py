from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from msgspec.structs import replace

from shoal.protocol.errors import NetworkError
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, LARGE_FRAME_BYTES, FrameHeader, FrameKind, split_chunk
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.queue import FULL_SCOPES, SCOPE_LIMIT, FrameQueue
from shoal.swarm.lanes.seal import SEAL_OVERHEAD_BYTES
from tests.swarm.lane_ends import WAIT_S, RecordingSink, agree, make_lane, tcp_pair, two_lanes

FIRST, SECOND = b"scope  1", b"scope  2"
PAYLOAD = memoryview(bytes(FRAME_LIMIT_BYTES))


def frame(scope: bytes, number: int, length: int = FRAME_LIMIT_BYTES) -> tuple[FrameHeader, memoryview]:
    header = FrameHeader(kind=FrameKind.STATE, length=length, total=FRAME_LIMIT_BYTES, chunk=number, scope=scope)
    return header, PAYLOAD[:length]


def put(queue: FrameQueue, scope: bytes, number: int, length: int = FRAME_LIMIT_BYTES) -> None:
    with queue.changed:
        queue.put(*frame(scope, number, length))


def take_all(queue: FrameQueue, limit_bytes: int = 0) -> list[FrameHeader]:
    headers: list[FrameHeader] = []
    while frames := queue.take(limit_bytes):
        headers += [header for header, _ in frames]
    return headers


def share_while_both_wait(headers: list[FrameHeader], scope: bytes) -> float:
    """The share of `scope` in the bytes between its first and its last frame."""
    at = [number for number, header in enumerate(headers) if header.scope == scope]
    span = headers[at[0] : at[-1] + 1]
    return sum(h.length for h in span if h.scope == scope) / sum(h.length for h in span)


@pytest.mark.parametrize("length", [FRAME_LIMIT_BYTES, 200_000, 5_000])
def test_queue_shares_by_bytes_and_keeps_order_within_a_scope(length: int) -> None:
    queue, frames = FrameQueue(), 40 * FRAME_LIMIT_BYTES // length
    for number in range(200):
        put(queue, FIRST, number)
    for number in range(frames):
        put(queue, SECOND, number, length)
    headers = take_all(queue)
    for scope, count in ((FIRST, 200), (SECOND, frames)):
        assert [header.chunk for header in headers if header.scope == scope] == list(range(count))
    assert 0.45 <= share_while_both_wait(headers, SECOND) <= 0.55
    assert headers.index(frame(SECOND, 0, length)[0]) <= 2  # it need not wait for the long queue


@pytest.mark.parametrize("length", [1, FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES + 1, LARGE_FRAME_BYTES])
@pytest.mark.parametrize("frame_bytes", [1000, FRAME_LIMIT_BYTES, LARGE_FRAME_BYTES])
def test_queue_gives_of_a_frame_what_the_lane_can_carry(length: int, frame_bytes: int) -> None:
    queue, payload = FrameQueue(), memoryview(random.Random(length).randbytes(length))
    whole = FrameHeader(kind=FrameKind.FINAL, length=length, offset=7, total=7 + length, chunk=3, scope=FIRST)
    with queue.changed:
        queue.put(whole, payload)
    put(queue, FIRST, 4, 60)
    put(queue, SECOND, 1, 50)
    parts = []
    while frames := queue.take(0, frame_bytes):
        parts += [part for part in frames if part[0].scope == FIRST]
    assert parts.pop()[0] == frame(FIRST, 4, 60)[0], "the next frame comes after the rest of this one"
    assert b"".join(part for _, part in parts) == payload
    assert [header for header, _ in parts] == [
        replace(whole, offset=7 + at, length=min(frame_bytes, length - at)) for at in range(0, length, frame_bytes)
    ]
    assert not queue.waits
    assert queue.queued_bytes == length + 110
    queue.done(length + 110)
    assert queue.busy_since is None


@pytest.mark.parametrize("frame_bytes", [1000, FRAME_LIMIT_BYTES, LARGE_FRAME_BYTES])
def test_frame_is_looked_up_when_its_turn_comes_and_each_part_for_itself(frame_bytes: int) -> None:
    queue, length = FrameQueue(), FRAME_LIMIT_BYTES + 1
    payload = memoryview(random.Random(length).randbytes(length))
    whole = FrameHeader(kind=FrameKind.STATE, length=length, offset=7, total=7 + length, chunk=3, scope=FIRST)
    gone = FrameHeader(kind=FrameKind.REFUSED, length=0, chunk=4, scope=FIRST)
    asked: list[FrameHeader] = []

    def later(header: FrameHeader) -> tuple[FrameHeader, memoryview]:
        asked.append(header)
        return header, payload[header.offset - 7 :][: header.length]

    with queue.changed:
        queue.put(whole, later)
        queue.put(replace(whole, chunk=4), lambda header: (gone, memoryview(b"")))
    assert asked == []
    assert queue.queued_bytes == 2 * length
    parts = []
    while frames := queue.take(0, frame_bytes):
        parts += frames
    carried = [part for part in parts if part[0].chunk == 3]
    assert b"".join(part for _, part in carried) == payload
    assert [header for header, _ in carried] == asked
    assert asked == [
        replace(whole, offset=7 + at, length=min(frame_bytes, length - at)) for at in range(0, length, frame_bytes)
    ]
    assert {header for header, _ in parts[len(carried) :]} == {gone}
    queue.done(length)
    assert queue.queued_bytes == 0
    assert queue.busy_since is None


@pytest.mark.parametrize("frame_bytes", [FRAME_LIMIT_BYTES, LARGE_FRAME_BYTES])
def test_queue_shares_by_bytes_where_one_has_large_frames(frame_bytes: int) -> None:
    queue, large = FrameQueue(), LARGE_FRAME_BYTES
    for number in range(60):
        with queue.changed:
            header = FrameHeader(kind=FrameKind.FINAL, length=large, total=large, chunk=number, scope=FIRST)
            queue.put(header, memoryview(bytes(large)))
    for number in range(40):
        put(queue, SECOND, number)
    headers: list[FrameHeader] = []
    while frames := queue.take(0, frame_bytes):
        headers += [header for header, _ in frames]
    parts = large // frame_bytes
    assert [header.chunk for header in headers if header.scope == FIRST] == [n for n in range(60) for _ in range(parts)]
    if frame_bytes == FRAME_LIMIT_BYTES:  # a part is what a turn is worth: they alternate
        assert all(one.scope != next_one.scope for one, next_one in pairwise(headers[:80]))
    assert 0.45 <= share_while_both_wait(headers, SECOND) <= 0.55


def test_queue_gives_small_frames_together_and_full_ones_alone() -> None:
    queue, small = FrameQueue(), 1000
    for number in range(10):
        put(queue, FIRST, number, small)
    put(queue, FIRST, 10)
    put(queue, FIRST, 11, small)
    limit = 4 * (small + SEAL_OVERHEAD_BYTES)
    assert [len(queue.take(limit)) for _ in range(6)] == [4, 4, 2, 1, 1, 0]


def test_queue_bounds_frames_and_bytes_of_each_scope() -> None:
    queue = FrameQueue(limit_frames=3, limit_bytes=4000)
    for number in range(3):
        put(queue, FIRST, number, 1000)
    with pytest.raises(NetworkError, match="3 frames of one scope"):
        put(queue, FIRST, 3, 1000)
    put(queue, SECOND, 0, 3000)  # its room is its own
    with pytest.raises(NetworkError):
        put(queue, SECOND, 1, 1001)
    assert queue.queued_bytes == 6000
    queue.take(0)
    put(queue, FIRST, 3, 1000)


@pytest.mark.parametrize("frame_bytes", [400, 1000])
def test_queue_bounds_the_frames_of_all_scopes_together(frame_bytes: int) -> None:
    queue, scopes = FrameQueue(limit_frames=3), [bytes([n]) * 8 for n in range(FULL_SCOPES + 1)]
    for cleared in (False, True):
        for scope in scopes[:-1]:
            for number in range(3):
                put(queue, scope, number, 1000)
        with pytest.raises(NetworkError, match=f"{3 * FULL_SCOPES} frames"):
            put(queue, scopes[-1], 0, 10)
        if cleared:
            queue.clear()
        else:
            ((taken, _),) = queue.take(0, frame_bytes)
            if taken.length < 1000:  # what is left of it waits yet
                with pytest.raises(NetworkError, match="frames are queued"):
                    put(queue, scopes[-1], 0, 10)
            while queue.take(0, frame_bytes):
                pass
    put(queue, scopes[-1], 0, 10)


def test_queue_bounds_the_scopes() -> None:
    queue = FrameQueue()
    for number in range(SCOPE_LIMIT):
        put(queue, number.to_bytes(8, "big"), 0, 10)
    with pytest.raises(NetworkError, match="scopes"):
        put(queue, b"one more", 0, 10)
    queue.take(0)
    put(queue, b"one more", 0, 10)


def test_queue_knows_since_when_it_is_busy() -> None:
    now = 5.0
    queue = FrameQueue(clock=lambda: now)
    assert queue.busy_since is None
    put(queue, FIRST, 0, 100)
    now = 6.0
    put(queue, FIRST, 1, 100)
    assert len(queue.take(10_000)) == 2
    assert (queue.busy_since, queue.queued_bytes) == (5.0, 200)  # in a lane's hands still
    queue.done(200)
    assert (queue.busy_since, queue.queued_bytes) == (None, 0)
    put(queue, SECOND, 0, 100)
    assert queue.busy_since == 6.0
    queue.clear()
    assert (queue.busy_since, queue.queued_bytes, queue.waits) == (None, 0, False)


def test_queue_takes_a_payload_of_4_gb_by_reference() -> None:
    """What one of two peers posts of a reduction in fp32: contributions of 2 GiB and finals of 2 GiB."""
    queue = LaneLimits().queue()
    chunk = memoryview(bytes((1 << 20) + 64))  # of a codec with a header
    for kind in (FrameKind.CONTRIBUTION, FrameKind.FINAL):
        for number in range(2048):
            model = FrameHeader(kind=kind, length=0, chunk=number, scope=FIRST)
            with queue.changed:
                for header, part in split_chunk(model, chunk):
                    queue.put(header, part)
    assert queue.queued_bytes == 4096 * len(chunk)
    assert queue.take(0)[0][1].obj is chunk.obj


@dataclass
class Gated(RecordingSink):
    """Lets no bulk frame in before the gate is opened."""

    gate: threading.Event = field(default_factory=threading.Event)

    def region(self, peer: str, header: FrameHeader) -> memoryview | None:  # type: ignore[override]
        assert self.gate.wait(WAIT_S)
        return memoryview(bytearray(header.length))


def test_lane_lets_a_second_reduction_pass_a_long_queue() -> None:
    connections, ends = tcp_pair(), agree()
    sink = Gated(keep_payloads=False)
    near, far = make_lane(connections[0], ends[0], RecordingSink()), make_lane(connections[1], ends[1], sink)
    try:
        for number in range(200):
            near.post(*frame(FIRST, number))
        for number in range(40):
            near.post(*frame(SECOND, number))
        sink.gate.set()
        headers = [sink.frames.get(timeout=WAIT_S)[0] for _ in range(240)]
        assert 0.4 <= share_while_both_wait(headers, SECOND) <= 0.6
        assert headers[-1].scope == FIRST  # its long queue was not through before
    finally:
        for lane in (near, far):
            lane.abort()
            assert lane.join(WAIT_S)


def test_lane_one_scope_does_not_use_up_the_room_of_another() -> None:
    note = FrameHeader(kind=FrameKind.REQUEST, length=5, scope=SECOND), b"hello"
    with two_lanes(LaneLimits(queue_frames=4)) as (near, _, _, far_sink):
        with near._changed:  # nothing is taken meanwhile
            for number in range(4):
                near.post(*frame(FIRST, number, 10))
            with pytest.raises(NetworkError):
                near.post(*frame(FIRST, 4, 10))
            near.post(*note)
        assert far_sink.frames.get(timeout=WAIT_S)[0].scope == SECOND


def test_lanes_share_a_queue_and_one_that_closes_leaves_it_to_the_other() -> None:
    queue = FrameQueue()
    ends, sink = [(tcp_pair(), agree()) for _ in range(2)], Gated(keep_payloads=False)
    near = [make_lane(pair[0], keys[0], RecordingSink(), queue=queue) for pair, keys in ends]
    far = [make_lane(pair[1], keys[1], sink) for pair, keys in ends]
    try:
        for number in range(200):  # far more than the kernel's buffers take
            near[0].post(*frame(FIRST, number))
        near[0].begin_close()
        assert not near[0].usable
        before = near[0].payload_sent
        near[1].post(*frame(FIRST, 200))
        sink.gate.set()
        chunks = {sink.frames.get(timeout=WAIT_S)[0].chunk for _ in range(201)}
        assert chunks == set(range(201))
        assert sink.closed.get(timeout=WAIT_S) is None
        assert near[0].join(WAIT_S)
        assert near[1].usable
        assert near[0].payload_sent + near[1].payload_sent == 201 * FRAME_LIMIT_BYTES
        assert near[0].payload_sent <= before + FRAME_LIMIT_BYTES  # what it had in hand
    finally:
        for lane in near + far:
            lane.abort()
            assert lane.join(WAIT_S)


def test_lanes_share_a_queue_that_outlives_a_fault_of_one_but_not_of_all() -> None:
    queue = FrameQueue()
    ends = [(tcp_pair(), agree()) for _ in range(2)]
    near = [make_lane(pair[0], keys[0], RecordingSink(), queue=queue) for pair, keys in ends]
    header, payload = frame(FIRST, 0)
    for number in range(200):  # nobody reads
        near[0].post(replace(header, chunk=number), payload)
    near[0].abort()
    assert near[0].join(WAIT_S)
    assert queue.queued_bytes > 100 * FRAME_LIMIT_BYTES
    near[1].abort()
    assert near[1].join(WAIT_S)
    assert queue.queued_bytes == 0
    for pair, _ in ends:
        pair[1].close()


def test_queue_says_which_chunks_no_lane_has_begun() -> None:
    queue = FrameQueue()
    model, payload = frame(FIRST, 7)
    whole = FRAME_LIMIT_BYTES + 10
    header = replace(model, total=whole, length=0)
    with queue.changed:
        for piece in split_chunk(header, memoryview(bytes(whole))):
            queue.put(*piece)
        queue.put(replace(model, chunk=8, flags=1), payload)
    put(queue, FIRST, 9)
    put(queue, SECOND, 10)
    assert queue.waiting(FIRST) == {(FrameKind.STATE, 7), (FrameKind.STATE, 9)}
    ((taken, _),) = queue.take(0)
    assert (taken.chunk, taken.offset) == (7, 0)
    assert (FrameKind.STATE, 7) not in queue.waiting(FIRST)
    assert queue.waiting(b"another.") == frozenset()
