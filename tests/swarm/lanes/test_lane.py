from __future__ import annotations

import queue
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, HEADER_BYTES, FrameHeader, FrameKind, split_chunk
from shoal.swarm.lanes.lane import LANE_WORN_BYTES, Lane
from shoal.swarm.lanes.limits import RATE_LIMIT_MIN_BYTES_PER_S, RATE_OWED_S, RATE_SAVED_S, LaneLimits, RateLimit
from shoal.swarm.lanes.seal import SEAL_OVERHEAD_BYTES, TAG_BYTES, Opener, Sealer
from tests.swarm.lane_ends import FAR, NOTE, WAIT_S, RecordingSink, agree, make_lane, tcp_pair, two_lanes


@dataclass
class Raw:
    """A lane whose other end is a bare socket in the test's hands."""

    lane: Lane
    sink: RecordingSink
    socket: socket.socket
    sealer: Sealer
    opener: Opener

    def seal(self, header: FrameHeader, payload: bytes, sealer: Sealer | None = None) -> bytes:
        out = bytearray(header.length + SEAL_OVERHEAD_BYTES)
        (sealer or self.sealer).seal_into(header, payload, memoryview(out))
        return bytes(out)

    def end(self) -> NetworkError | RemoteError | None:
        """The lane's end; asserts that it came once and that the threads left."""
        error = self.sink.closed.get(timeout=WAIT_S)
        assert self.lane.join(WAIT_S)
        assert self.sink.closed.empty()
        return error


@contextmanager
def raw_lane(limits: LaneLimits | None = None) -> Iterator[Raw]:
    (near, far), ends, sink = tcp_pair(), agree(), RecordingSink()
    lane = make_lane(near, ends[0], sink, limits=limits)
    with far:
        yield Raw(lane, sink, far, *ends[1])
        lane.abort()
        assert lane.join(WAIT_S)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, "ended early"
        data += more
    return data


def test_lane_carries_small_frames_both_ways_in_order() -> None:
    with two_lanes() as (near, near_sink, far, far_sink):
        for number in range(20):
            near.post(replace(NOTE, chunk=number), b"there")
            far.post(replace(NOTE, chunk=number), b"back!")
        for number in range(20):
            assert far_sink.frames.get(timeout=WAIT_S) == (replace(NOTE, chunk=number), b"there")
            assert near_sink.frames.get(timeout=WAIT_S) == (replace(NOTE, chunk=number), b"back!")
        near.close()
        far.close()
        assert near_sink.closed.get(timeout=WAIT_S) is None
        assert far_sink.closed.get(timeout=WAIT_S) is None
        assert near.bytes_sent == far.bytes_received == 20 * (5 + SEAL_OVERHEAD_BYTES) + SEAL_OVERHEAD_BYTES


def test_lane_puts_64_mib_where_they_belong() -> None:
    size, chunks = 8 << 20, 8
    data = [bytes([n]) + bytes(range(251)) * (size // 251 + 1) for n in range(chunks)]
    with two_lanes() as (near, _, _, far_sink):
        far_sink.keep_payloads = False
        far_sink.regions = {n: bytearray(size) for n in range(chunks)}
        frames = 0
        for n in range(chunks):
            like = FrameHeader(kind=FrameKind.STATE, length=0, chunk=n)
            for header, part in split_chunk(like, memoryview(data[n])[:size]):
                near.post(header, part)
                frames += 1
        assert frames == chunks * -(-size // FRAME_LIMIT_BYTES)
        for _ in range(frames):
            far_sink.frames.get(timeout=WAIT_S)
        for n in range(chunks):
            assert far_sink.regions[n] == data[n][:size]


def test_lane_opens_unwanted_bulk_and_drops_it() -> None:
    with two_lanes() as (near, _, _, far_sink):
        near.post(FrameHeader(kind=FrameKind.FINAL, length=3, total=3, chunk=77), b"abc")
        near.post(NOTE, b"after")
        assert far_sink.frames.get(timeout=WAIT_S) == (NOTE, b"after")


def test_lane_close_delivers_what_was_queued() -> None:
    with two_lanes() as (near, near_sink, _, far_sink):
        for number in range(200):
            near.post(replace(NOTE, chunk=number), b"later")
        near.close()
        with pytest.raises(NetworkError, match="ending"):
            near.post(NOTE, b"never")
        assert far_sink.closed.get(timeout=WAIT_S) is None  # the far end answered CLOSE by itself
        assert near_sink.closed.get(timeout=WAIT_S) is None
        assert [far_sink.frames.get_nowait()[0].chunk for _ in range(200)] == list(range(200))


def test_lane_lets_go_of_sent_payloads() -> None:
    with two_lanes() as (near, _, _, far_sink):
        payload = bytearray(5)
        near.post(NOTE, memoryview(payload))
        far_sink.frames.get(timeout=WAIT_S)
        until = time.monotonic() + WAIT_S
        while near.queued_bytes:
            assert time.monotonic() < until
        payload.extend(b"x")  # BufferError while a view of it is held


def test_lane_end_of_stream_is_not_a_close() -> None:
    with raw_lane() as raw:
        raw.socket.close()
        error = raw.end()
        assert isinstance(error, NetworkError)
        assert re.fullmatch(rf"the connection with {raw.lane.peer} broke: [^\[\]]+", str(error)), "no error number"


def test_lane_truncated_frame_is_a_fault() -> None:
    with raw_lane() as raw:
        raw.socket.sendall(raw.seal(NOTE, b"hello")[:-1])
        raw.socket.shutdown(socket.SHUT_WR)
        assert isinstance(raw.end(), NetworkError)
        assert raw.sink.frames.empty()


def test_lane_reset_is_a_fault() -> None:
    with raw_lane() as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.socket.close()
        assert isinstance(raw.end(), NetworkError)


def test_lane_answers_close_with_close() -> None:
    with raw_lane() as raw:
        raw.socket.sendall(raw.seal(FrameHeader(kind=FrameKind.CLOSE, length=0), b""))
        wire = receive_exactly(raw.socket, SEAL_OVERHEAD_BYTES)
        assert FrameHeader.decode(wire[:HEADER_BYTES]).kind is FrameKind.CLOSE
        raw.opener.open_into(wire[:HEADER_BYTES], memoryview(wire)[HEADER_BYTES:], memoryview(bytearray(0)))
        assert raw.end() is None
        assert raw.socket.recv(1) == b""


def test_lane_forged_close_is_a_fault() -> None:
    with raw_lane() as raw:
        raw.socket.sendall(FrameHeader(kind=FrameKind.CLOSE, length=0).encode() + bytes(TAG_BYTES))
        assert isinstance(raw.end(), RemoteError)


def refused(raw: Raw, wire: bytes) -> None:
    """The lane takes `wire` for the peer's fault and delivers nothing of it."""
    raw.socket.sendall(wire)
    error = raw.end()
    assert isinstance(error, RemoteError)
    assert error.peer == FAR
    assert raw.sink.frames.empty()


HEADER_BITS = {
    "version": 0,
    "kind": 2,
    "flags": 3,
    "attempt": 8,
    "view": 12,
    "chunk": 16,
    "round": 20,
    "offset": 28,
    "total": 36,
    "scope": 44,
}


@pytest.mark.parametrize("position", HEADER_BITS.values(), ids=HEADER_BITS.keys())
def test_lane_refuses_a_changed_header(position: int) -> None:
    with raw_lane() as raw:
        wire = bytearray(raw.seal(replace(NOTE, total=64), b"hello"))
        wire[position] ^= 1
        refused(raw, bytes(wire))


def test_lane_refuses_a_replay() -> None:
    with raw_lane() as raw:
        wire = raw.seal(NOTE, b"hello")
        raw.socket.sendall(wire)
        assert raw.sink.frames.get(timeout=WAIT_S) == (NOTE, b"hello")
        refused(raw, wire)


def test_lane_refuses_a_huge_frame_before_reading_it() -> None:
    with raw_lane() as raw:
        wire = bytearray(NOTE.encode())
        wire[4:8] = (FRAME_LIMIT_BYTES + 1).to_bytes(4, "little")
        refused(raw, bytes(wire))


def test_lane_refuses_a_second_hello() -> None:
    with raw_lane() as raw:
        refused(raw, raw.seal(FrameHeader(kind=FrameKind.HELLO, length=2), b"hi"))


def test_lane_ends_for_a_remote_error_of_the_sink() -> None:
    with raw_lane() as raw:
        raw.sink.raises = RemoteError("a frame of no plan", peer=FAR)
        raw.socket.sendall(raw.seal(NOTE, b"hello"))
        assert raw.end() is raw.sink.raises


def test_lane_survives_neither_a_bug_of_the_sink_nor_spreads_it(caplog: pytest.LogCaptureFixture) -> None:
    with raw_lane() as raw, two_lanes() as (near, _, _, far_sink):
        raw.sink.raises = ZeroDivisionError()
        raw.socket.sendall(raw.seal(NOTE, b"hello"))
        assert isinstance(raw.end(), NetworkError)  # nobody's score suffers
        assert "ZeroDivisionError" in caplog.text
        near.post(NOTE, b"alive")
        assert far_sink.frames.get(timeout=WAIT_S) == (NOTE, b"alive")


def test_lane_refuses_a_region_of_the_wrong_size(caplog: pytest.LogCaptureFixture) -> None:
    with raw_lane() as raw:
        raw.sink.regions = {1: bytearray(2)}
        raw.socket.sendall(raw.seal(FrameHeader(kind=FrameKind.STATE, length=3, total=3, chunk=1), b"abc"))
        assert isinstance(raw.end(), NetworkError)
        assert "the sink gave 2 bytes" in caplog.text


def fill(raw: Raw) -> int:
    """Post until the queue is full; the peer reads nothing. Returns the frames that were taken."""
    header = FrameHeader(kind=FrameKind.STATE, length=FRAME_LIMIT_BYTES, total=FRAME_LIMIT_BYTES)
    payload = bytes(FRAME_LIMIT_BYTES)
    for taken in range(10_000):
        try:
            raw.lane.post(header, payload)
        except NetworkError:
            return taken
        if raw.lane.queued_bytes < FRAME_LIMIT_BYTES:
            time.sleep(0)  # let the sender run, so that the kernel's buffers fill too
    raise AssertionError("no bound")


def test_lane_queue_is_bounded_and_post_never_blocks() -> None:
    with raw_lane(LaneLimits(queue_frames=4)) as raw:
        taken = fill(raw)
        assert taken >= 4
        assert raw.lane.queued_bytes <= 5 * FRAME_LIMIT_BYTES  # four queued, one in the sender's hands


def test_lane_to_a_peer_that_reads_nothing_can_be_aborted() -> None:
    with raw_lane(LaneLimits(queue_frames=64, stall_s=100 * WAIT_S)) as raw:
        fill(raw)
        raw.lane.abort()
        assert raw.lane.join(WAIT_S)
        assert isinstance(raw.end(), NetworkError)
        assert raw.lane.queued_bytes == 0


def test_lane_to_a_peer_that_reads_nothing_ends_by_itself() -> None:
    with raw_lane(LaneLimits(queue_frames=64, stall_s=0.2)) as raw:
        fill(raw)
        # No word on the text: when the kernel gives up, one thread is told so and the other may see a mere end.
        assert isinstance(raw.end(), NetworkError)


def test_lane_stall_is_found_where_the_kernel_has_no_timeout_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    with raw_lane(LaneLimits(queue_frames=64, stall_s=0.2)) as raw:
        fill(raw)
        error = raw.end()
        assert isinstance(error, NetworkError)
        assert "took no byte" in str(error)


def test_lane_close_to_a_peer_that_reads_nothing_has_a_deadline() -> None:
    with raw_lane(LaneLimits(queue_frames=64)) as raw:
        fill(raw)
        raw.lane.close(deadline_s=0.1)
        error = raw.end()
        assert "no orderly close" in str(error)


def test_lane_peer_that_stops_inside_a_frame_is_a_fault() -> None:
    with raw_lane(LaneLimits(stall_s=0.2)) as raw:
        raw.socket.sendall(raw.seal(NOTE, b"hello")[:-3])
        error = raw.end()
        assert isinstance(error, NetworkError)
        assert "in the middle of a message" in str(error)


def test_lane_may_idle_longer_than_a_stall() -> None:
    with raw_lane(LaneLimits(stall_s=0.05)) as raw:
        with pytest.raises(queue.Empty):
            raw.sink.closed.get(timeout=0.3)
        raw.socket.sendall(raw.seal(NOTE, b"hello"))
        assert raw.sink.frames.get(timeout=WAIT_S) == (NOTE, b"hello")


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (NOTE, b"longer than it says"),
        (FrameHeader(kind=FrameKind.HELLO, length=0), b""),
        (FrameHeader(kind=FrameKind.CLOSE, length=0), b""),
        (NOTE, memoryview(b"0123456789")[::2]),
    ],
)
def test_post_of_an_improper_frame_is_our_fault(header: FrameHeader, payload: memoryview | bytes) -> None:
    with raw_lane() as raw, pytest.raises(LocalError):
        raw.lane.post(header, payload)


def test_lane_is_worn_before_its_keys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LANE_WORN_BYTES == 15 * 2**36
    monkeypatch.setattr("shoal.swarm.lanes.lane.LANE_WORN_BYTES", 100)
    with two_lanes() as (near, _, far, far_sink):
        assert not near.worn
        for _ in range(2):
            near.post(NOTE, b"bytes")
            far_sink.frames.get(timeout=WAIT_S)
        assert near.worn
        assert far.worn


def test_lane_pays_for_every_byte_under_a_rate_limit() -> None:
    class Counting(RateLimit):
        paid = 0

        def reserve(self, size: int) -> float:
            self.paid += size
            return 0.0

    upload, download = Counting(RATE_LIMIT_MIN_BYTES_PER_S), Counting(RATE_LIMIT_MIN_BYTES_PER_S)
    size = 300_000
    with two_lanes(LaneLimits(upload=upload, download=download)) as (near, _, far, far_sink):
        far_sink.regions = {0: bytearray(size)}
        near.post(FrameHeader(kind=FrameKind.STATE, length=size, total=size), bytes(range(250)) * (size // 250))
        far_sink.frames.get(timeout=WAIT_S)
        assert far_sink.regions[0] == bytes(range(250)) * (size // 250)
        for lane in (near, far):
            lane.close()  # joins: bytes are paid for after they went
        assert upload.paid == download.paid == size + 3 * SEAL_OVERHEAD_BYTES  # the frame and two CLOSE frames


def test_lane_paused_by_a_rate_limit_can_be_aborted() -> None:
    class Forever(RateLimit):
        def reserve(self, size: int) -> float:
            return 3600.0

    with raw_lane(LaneLimits(upload=Forever(RATE_LIMIT_MIN_BYTES_PER_S))) as raw:
        raw.lane.post(NOTE, b"hello")
        receive_exactly(raw.socket, 5 + SEAL_OVERHEAD_BYTES)
        raw.lane.abort()
        assert isinstance(raw.end(), NetworkError)


def test_rate_limit_spreads_bytes_over_time() -> None:
    now = 100.0
    limit = RateLimit(1_000_000, clock=lambda: now)
    assert limit.reserve(500_000) == pytest.approx(0.5)
    assert limit.reserve(500_000) == pytest.approx(1.0)  # another thread queues behind the first
    now = 101.0
    assert limit.reserve(0) == 0.0
    now = 200.0  # a long rest saves up no more than this
    assert limit.reserve(1_000_000) == pytest.approx(1.0 - RATE_SAVED_S)


def test_rate_limit_has_nobody_wait_for_little_and_then_for_all() -> None:
    now = 100.0
    limit = RateLimit(1_000_000, clock=lambda: now)
    little = int(1_000_000 * RATE_OWED_S)
    assert limit.reserve(little) == 0.0
    assert limit.reserve(1) == pytest.approx(RATE_OWED_S, abs=1e-5)
    now += RATE_OWED_S / 2  # whoever comes meanwhile waits for what is left, and for what it takes
    assert limit.reserve(little) == pytest.approx(1.5 * RATE_OWED_S, abs=1e-5)


def test_rate_limit_refuses_a_rate_too_low() -> None:
    with pytest.raises(ConfigError):
        RateLimit(RATE_LIMIT_MIN_BYTES_PER_S - 1)


@pytest.mark.parametrize("fields", [{"lanes_per_peer": 0}, {"lanes_per_peer": 17}, {"queue_frames": 0}, {"stall_s": 0}])
def test_limits_refuse_nonsense(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        LaneLimits(**fields)  # type: ignore[arg-type]


def test_lane_peer_that_stops_inside_a_full_frame_is_a_fault() -> None:
    header = FrameHeader(kind=FrameKind.STATE, length=FRAME_LIMIT_BYTES, total=FRAME_LIMIT_BYTES)
    with raw_lane(LaneLimits(stall_s=0.2)) as raw:
        raw.socket.sendall(raw.seal(header, bytes(FRAME_LIMIT_BYTES))[:-3])
        assert "in the middle of a message" in str(raw.end())


def test_lane_takes_small_frames_after_a_full_one() -> None:
    header = FrameHeader(kind=FrameKind.STATE, length=FRAME_LIMIT_BYTES, total=FRAME_LIMIT_BYTES)
    with raw_lane() as raw:
        raw.socket.sendall(raw.seal(header, bytes(FRAME_LIMIT_BYTES)))
        for _ in range(2):
            raw.socket.sendall(raw.seal(NOTE, b"hello"))
            assert raw.sink.frames.get(timeout=WAIT_S) == (NOTE, b"hello")
