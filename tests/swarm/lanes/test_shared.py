from __future__ import annotations

import fcntl
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
from msgspec.structs import replace

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.swarm.lanes import shared
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, HEADER_BYTES, LARGE_FRAME_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.seal import LANE_ID_BYTES, SEAL_OVERHEAD_BYTES, TAG_BYTES
from shoal.swarm.lanes.shared import (
    CREDIT_SLOTS,
    SHARED_LEAST_BYTES,
    SHARED_LIMIT_BYTES,
    SHARED_RETRY_S,
    SHARED_SLOTS,
    SharedIn,
    SharedOffer,
    SharedOut,
    memory_bytes,
)
from tests.swarm.lane_ends import FAR, NOTE, WAIT_S, RecordingSink, agree, make_lane, tcp_pair, two_lanes
from tests.swarm.lanes.test_lane import Raw, receive_exactly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares memory by /proc, which is Linux's")

LARGE = FrameHeader(kind=FrameKind.STATE, length=SHARED_LEAST_BYTES, total=SHARED_LEAST_BYTES)


LANE = bytes(LANE_ID_BYTES)
SHARE = FrameHeader(kind=FrameKind.SHARE, length=0)


def large(number: int) -> tuple[FrameHeader, bytes]:
    return replace(LARGE, chunk=number), bytes([number % 251]) * LARGE.length


def descriptors() -> set[str]:
    """What this process has open, by name."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def let_go(lane: Lane) -> None:
    """Wait until `lane` has counted what it sent: a frame may be there before that."""
    until = time.monotonic() + WAIT_S
    while lane.queued_bytes > 0:
        assert time.monotonic() < until
        time.sleep(0.001)


def share(near: Lane, far: Lane, far_sink: RecordingSink) -> None:
    """Send large frames from `near` until they go through memory."""
    far_sink.regions[0] = bytearray(LARGE.length)
    for _ in range(10_000):
        if near._sharing.bytes_sent:
            break
        near.post(*large(0))
        assert far_sink.frames.get(timeout=WAIT_S)[0].kind is FrameKind.STATE
    assert near._sharing.bytes_sent > 0
    let_go(near)
    assert far._sharing.bytes_received == near._sharing.bytes_sent


# -- lanes --------------------------------------------------------------------------------------------------------


def test_large_frames_go_through_memory_and_small_ones_keep_their_place() -> None:
    with two_lanes() as (near, near_sink, far, far_sink):
        share(near, far, far_sink)
        share(far, near, near_sink)
        before = near.moved, far.moved, near.bytes_sent, near._sharing.bytes_sent
        for sink in (near_sink, far_sink):
            sink.regions = {number: bytearray(LARGE.length) for number in range(0, 60, 2)}
        for number in range(60):
            for lane in (near, far):
                lane.post(*(large(number) if number % 2 == 0 else (replace(NOTE, chunk=number), b"small")))
        for sink in (near_sink, far_sink):
            found = [sink.frames.get(timeout=WAIT_S) for _ in range(60)]
            assert [header.chunk for header, _ in found] == list(range(60))
            assert all(data == (large(n)[1] if n % 2 == 0 else b"small") for n, (_, data) in enumerate(found))
        wire = 30 * (LARGE.length + SEAL_OVERHEAD_BYTES) + 30 * (5 + SEAL_OVERHEAD_BYTES)
        kernel = 30 * HEADER_BYTES + 30 * (5 + SEAL_OVERHEAD_BYTES)
        let_go(near)
        assert near.bytes_sent - before[2] == wire
        assert near._sharing.bytes_sent - before[3] == wire - kernel
        assert far.moved.received - before[1].received == wire
        assert wire - kernel <= near.moved.taken - before[0].taken <= wire  # not all may be acknowledged yet
        near.close()
        assert near_sink.closed.get(timeout=WAIT_S) is None
        assert far_sink.closed.get(timeout=WAIT_S) is None
        assert near.queued_bytes == 0


@pytest.mark.parametrize(
    "limits",
    [LaneLimits(shares=False), LaneLimits(upload=RateLimit(1 << 30)), LaneLimits(download=RateLimit(1 << 30))],
    ids=["not wanted", "upload capped", "download capped"],
)
def test_who_may_not_share_sends_and_receives_over_the_connection(limits: LaneLimits) -> None:
    with two_lanes(far_limits=limits) as (near, near_sink, far, far_sink):
        for sink in (near_sink, far_sink):
            sink.regions[0] = bytearray(LARGE.length)
        for _ in range(3):
            near.post(*large(0))
            far.post(*large(0))
            assert [sink.frames.get(timeout=WAIT_S)[1] for sink in (near_sink, far_sink)] == [large(0)[1]] * 2
        assert near._sharing.bytes_sent == far._sharing.bytes_sent == 0
        assert far._sharing._out is None


def test_a_relayed_lane_shares_nothing() -> None:
    connection, other = tcp_pair()
    ends, sink, offers = agree(), RecordingSink(), []
    lane = Lane(
        connection, peer=FAR, sealer=ends[0][0], opener=ends[0][1], sink=sink, limits=LaneLimits(), dialled=True
    )
    lane.relayed, lane.share = True, lambda lane, offer: offers.append(offer)
    lane.start()
    with other:
        lane.post(*large(0))
        assert FrameHeader.decode(receive_exactly(other, HEADER_BYTES)).kind is FrameKind.STATE
        assert offers == []
        out = SharedOut(LANE)
        with pytest.raises(NetworkError, match="shares no memory"):
            lane.take_memory(out.offer)
        out.close()
        lane.abort()
        assert lane.join(WAIT_S)


def test_one_memory_is_taken_for_each_way() -> None:
    with two_lanes() as (near, _, far, far_sink):
        share(near, far, far_sink)
        out = SharedOut(LANE)
        with pytest.raises(NetworkError, match="takes no memory"):
            far.take_memory(out.offer)
        far.abort()
        assert far.join(WAIT_S)
    with pytest.raises(NetworkError, match="takes no memory"):
        far.take_memory(out.offer)
    out.close()


def test_what_comes_from_another_machine_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_lanes() as (_, _, far, _):
        out = SharedOut(LANE)
        monkeypatch.setattr(shared, "on_one_machine", lambda connection: False)
        with pytest.raises(NetworkError, match="takes no memory"):
            far.take_memory(out.offer)
        out.close()


def test_memory_that_was_taken_and_never_used_gives_way() -> None:
    before = descriptors()
    with raw_lane() as raw:
        first = SharedOut(LANE)
        raw.lane.take_memory(first.offer)  # and the peer never hears of it
        first.close()
        raw.sink.regions[0] = bytearray(LARGE.length)
        sharing = RawSharing(raw)
        sharing.send(*large(0))
        assert raw.sink.frames.get(timeout=WAIT_S)[1] == large(0)[1]
        sharing.out.close()
    assert descriptors() == before


def test_lanes_leave_no_descriptor_behind() -> None:
    before = descriptors()
    for end in ("close", "abort"):
        with two_lanes() as (near, near_sink, far, far_sink):
            share(near, far, far_sink)
            share(far, near, near_sink)
            kept = descriptors()
            assert sum("pipe:" in one for one in kept - before) == 4  # one end each, of each way
            getattr(near, end)()
    assert descriptors() == before


def test_who_waits_for_a_slot_is_woken_when_the_lane_ends() -> None:
    with two_lanes() as (near, _, far, far_sink):
        share(near, far, far_sink)
        release = threading.Event()
        far_sink.region = lambda peer, header: release.wait(WAIT_S) and None  # type: ignore[method-assign,assignment,func-returns-value]
        for number in range(SHARED_SLOTS + 2):
            near.post(*large(number))
        assert near._sharing._out is not None
        until = threading.Event()
        while (
            near._sharing._out._free or near.queued_bytes > 3 * LARGE.length
        ):  # of what `share` sent one may be untold
            assert not until.wait(0.01)
        near.abort("enough")
        assert near.join(WAIT_S)
        release.set()


def test_a_slot_that_is_never_freed_ends_the_lane() -> None:
    with two_lanes(LaneLimits(stall_s=0.3)) as (near, near_sink, far, far_sink):
        share(near, far, far_sink)
        release = threading.Event()
        far_sink.region = lambda peer, header: release.wait(WAIT_S) and None  # type: ignore[method-assign,assignment,func-returns-value]
        for number in range(SHARED_SLOTS + 2):
            near.post(*large(number))
        error = near_sink.closed.get(timeout=WAIT_S)
        release.set()
        assert isinstance(error, NetworkError)
        assert "no slot" in str(error)


# -- one end by hand ----------------------------------------------------------------------------------------------


class RawSharing:
    """The far end of a lane, with the memory that it offered in the test's hands."""

    def __init__(self, raw: Raw, frame_bytes: int = LARGE_FRAME_BYTES) -> None:
        self.raw = raw
        self.out = SharedOut(LANE, frame_bytes)
        raw.lane.take_memory(self.out.offer)
        self.out.settle()
        raw.socket.sendall(raw.seal(SHARE, b""))

    def send(self, header: FrameHeader, payload: bytes, *, spoil: int | None = None) -> None:
        slot = self.out.take(self.raw.socket, WAIT_S)
        self.raw.sealer.seal_into(header, payload, slot)
        if spoil is not None:
            slot[HEADER_BYTES + spoil] ^= 1
        self.raw.socket.sendall(slot[:HEADER_BYTES])


@contextmanager
def raw_lane() -> Iterator[Raw]:
    (near, far), ends, sink = tcp_pair(), agree(), RecordingSink()
    lane = make_lane(near, ends[0], sink)
    with far:
        yield Raw(lane, sink, far, *ends[1])
        lane.abort()
        assert lane.join(WAIT_S)


def test_a_frame_in_memory_is_opened_where_it_belongs() -> None:
    with raw_lane() as raw:
        raw.sink.regions = {n: bytearray(LARGE_FRAME_BYTES) for n in range(3 * SHARED_SLOTS)}
        sharing = RawSharing(raw)
        for number in range(3 * SHARED_SLOTS):  # slots are used again, with frames of other sizes
            size = LARGE_FRAME_BYTES - number * FRAME_LIMIT_BYTES // 8
            sharing.send(
                FrameHeader(kind=FrameKind.FINAL, length=size, total=size, chunk=number), bytes([number]) * size
            )
            assert raw.sink.frames.get(timeout=WAIT_S)[1] == bytes([number]) * size
        sharing.out.close()


def payload_of(number: int, size: int) -> bytes:
    return bytes([number + 1]) * (size - 1) + bytes([number + 101])


def test_a_large_payload_goes_in_one_frame_through_memory_and_in_two_over_a_connection() -> None:
    size = LARGE_FRAME_BYTES
    with two_lanes() as (near, _, far, far_sink):
        far_sink.regions = {n: bytearray(size) for n in range(2)}
        for number, lengths in enumerate(((FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES), (size,))):
            whole = FrameHeader(kind=FrameKind.FINAL, length=size, total=size, chunk=number)
            near.post(whole, payload_of(number, size))
            for place, length in enumerate(lengths):
                header, payload = far_sink.frames.get(timeout=WAIT_S)
                assert header == replace(whole, length=length, offset=place * FRAME_LIMIT_BYTES)
                assert payload == payload_of(number, size)[header.offset :][:length]
            if number == 0:
                share(near, far, far_sink)
                far_sink.regions[1] = bytearray(size)


def test_a_large_frame_that_nobody_wants_is_opened_and_dropped() -> None:
    size = LARGE_FRAME_BYTES
    with two_lanes() as (near, _, far, far_sink):
        share(near, far, far_sink)
        near.post(FrameHeader(kind=FrameKind.FINAL, length=size, total=size, chunk=99), bytes(size))
        near.post(NOTE, b"hello")
        assert far_sink.frames.get(timeout=WAIT_S) == (NOTE, b"hello")
        assert far._sharing.bytes_received >= size


def test_a_frame_that_is_larger_than_a_slot_ends_the_lane() -> None:
    with raw_lane() as raw:
        sharing = RawSharing(raw, FRAME_LIMIT_BYTES)
        size = FRAME_LIMIT_BYTES + 1
        raw.socket.sendall(FrameHeader(kind=FrameKind.FINAL, length=size, total=size).encode())
        error = raw.end()
        assert isinstance(error, RemoteError)
        assert f"{FRAME_LIMIT_BYTES} is the most" in str(error)
        sharing.out.close()


def test_a_large_frame_over_the_connection_ends_the_lane() -> None:
    with raw_lane() as raw:
        size = FRAME_LIMIT_BYTES + 1
        raw.socket.sendall(FrameHeader(kind=FrameKind.FINAL, length=size, total=size).encode())
        error = raw.end()
        assert isinstance(error, RemoteError)
        assert f"{FRAME_LIMIT_BYTES} is the most" in str(error)


@pytest.mark.parametrize("beside", [True, False])
def test_a_neighbour_waits_while_something_is_queued_for_it(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.swarm.lanes.lane.on_one_machine", lambda connection: beside)
    with two_lanes() as (near, _, far, far_sink):
        share(near, far, far_sink)
        release = threading.Event()
        far_sink.region = lambda peer, header: release.wait(WAIT_S) and None  # type: ignore[method-assign,assignment,func-returns-value]
        for number in range(2 * SHARED_SLOTS):
            near.post(*large(number))
        assert near.queued_bytes > 0
        assert near.neighbour_waits is beside
        release.set()
        until = time.monotonic() + WAIT_S
        while near.queued_bytes:
            assert time.monotonic() < until
        assert not near.neighbour_waits


@pytest.mark.parametrize("place", [0, LARGE.length - 1, LARGE.length, LARGE.length + TAG_BYTES - 1])
def test_a_frame_changed_in_memory_does_not_open(place: int) -> None:
    with raw_lane() as raw:
        raw.sink.regions[0] = bytearray(LARGE.length)
        sharing = RawSharing(raw)
        sharing.send(*large(0), spoil=place)
        error = raw.end()
        assert isinstance(error, RemoteError)
        assert "authentication" in str(error)
        assert raw.sink.frames.empty()
        sharing.out.close()


def test_a_frame_in_memory_opens_once() -> None:
    with raw_lane() as raw:
        raw.sink.regions[0] = bytearray(LARGE.length)
        sharing = RawSharing(raw)
        slot = sharing.out.take(raw.socket, WAIT_S)
        raw.sealer.seal_into(*large(0), slot)
        raw.socket.sendall(slot[:HEADER_BYTES])
        assert raw.sink.frames.get(timeout=WAIT_S)[1] == large(0)[1]
        sharing.out.take(raw.socket, WAIT_S)[: slot.nbytes] = slot
        raw.socket.sendall(slot[:HEADER_BYTES])
        error = raw.end()
        assert isinstance(error, RemoteError)
        assert "authentication" in str(error)
        sharing.out.close()


@pytest.mark.parametrize("takes", [False, True])
def test_who_begins_to_share_what_was_not_taken_or_twice_ends_the_lane(takes: bool) -> None:
    with raw_lane() as raw:
        if takes:
            RawSharing(raw).out.close()
        raw.socket.sendall(raw.seal(SHARE, b""))
        error = raw.end()
        assert isinstance(error, RemoteError)
        assert "was not taken" in str(error)


def test_a_lane_whose_memory_is_not_taken_goes_on_and_offers_some_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with raw_lane() as raw:
        offers: list[SharedOffer] = []
        sizes: list[int] = []

        def decline(lane: Lane, offer: SharedOffer) -> None:
            offers.append(offer)
            sizes.append(os.stat(f"/proc/self/fd/{offer.memory}").st_size)
            lane.answered(taken=False)

        raw.lane.share = decline
        before = descriptors()
        for number in range(4):
            if number == 2:
                monkeypatch.setattr(raw.lane._sharing, "_next_offer", 0.0)  # as SHARED_RETRY_S later
            raw.lane.post(*large(number))
            head = receive_exactly(raw.socket, HEADER_BYTES)
            assert FrameHeader.decode(head) == large(number)[0]
            opened, body = bytearray(LARGE.length), bytearray(receive_exactly(raw.socket, LARGE.length + TAG_BYTES))
            raw.opener.open_into(head, memoryview(body), memoryview(opened))
            assert opened == large(number)[1]
            assert len(offers) == 1 + (number >= 2)
        assert sizes == [memory_bytes(LARGE_FRAME_BYTES), memory_bytes(FRAME_LIMIT_BYTES)]  # as nodes of before take it
        assert raw.lane._sharing._next_offer > time.monotonic() + SHARED_RETRY_S / 2
        assert descriptors() == before


# -- what is believed ---------------------------------------------------------------------------------------------


NONCE = b"\1" * 32
MEMORY_BYTES = memory_bytes(LARGE_FRAME_BYTES)


def memory_file(
    name: str = "shoal-lane", *, size: int = MEMORY_BYTES, sealed: bool = True, nonce: bytes = NONCE
) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, nonce, 0)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: memory_file("another"), "something else"),
        (lambda: memory_file(size=MEMORY_BYTES + 1), "change its size"),
        (lambda: memory_file(sealed=False), "change its size"),
        (lambda: os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC), "something else"),
        (lambda: memory_file(nonce=bytes(32)), "another lane's"),
    ],
    ids=["another name", "another size", "may be cut", "a device", "another nonce"],
)
def test_only_the_memory_of_that_very_offer_is_read_and_no_pipe_before(make: Callable[[], int], named: str) -> None:
    memory = make()
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = descriptors()
    try:
        offer = SharedOffer(lane=LANE, pid=os.getpid(), memory=memory, pipe=writable, nonce=NONCE)
        with pytest.raises(NetworkError, match=named):
            SharedIn(offer)
        assert descriptors() == before
        assert not select.select([readable], [], [], 0)[0]
    finally:
        for descriptor in (memory, readable, writable):
            os.close(descriptor)


@pytest.mark.parametrize("frame_bytes", [FRAME_LIMIT_BYTES, LARGE_FRAME_BYTES])
def test_memory_that_is_all_it_should_be_is_read(frame_bytes: int) -> None:
    memory = memory_file(size=memory_bytes(frame_bytes))
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    reader = SharedIn(SharedOffer(lane=LANE, pid=os.getpid(), memory=memory, pipe=writable, nonce=NONCE))
    assert reader.frame_bytes == frame_bytes
    for number in range(1, 2 * CREDIT_SLOTS + 1):
        reader.free()
        told = bool(select.select([readable], [], [], 0)[0])
        assert told == (number % CREDIT_SLOTS == 0)
        assert not told or os.read(readable, 2 * SHARED_SLOTS) == bytes(CREDIT_SLOTS)
    reader.close()
    for descriptor in (memory, readable, writable):
        os.close(descriptor)


def test_a_process_makes_so_much_memory_and_no_more() -> None:
    before = descriptors()
    used = shared._room.used_bytes
    made: list[SharedOut] = []
    try:
        for _ in range((SHARED_LIMIT_BYTES - used) // memory_bytes(LARGE_FRAME_BYTES)):
            made.append(SharedOut(LANE))
        with pytest.raises(OSError, match="shared already"):
            SharedOut(LANE)
        made.pop().close()
        made.append(SharedOut(LANE))
    finally:
        for out in made:
            out.close()
            out.close()  # is given back once
    assert shared._room.used_bytes == used
    assert descriptors() == before


def test_memory_that_could_not_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    used, before = shared._room.used_bytes, descriptors()
    for call in ("memfd_create", "posix_fallocate", "pipe2"):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError("no more")

            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="no more"):
                SharedOut(LANE)
        assert shared._room.used_bytes == used
        assert descriptors() == before


def test_another_users_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    out = SharedOut(LANE)
    offer = out.offer
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NetworkError, match="another user"):
        SharedIn(offer)
    monkeypatch.undo()
    SharedIn(offer).close()
    out.close()


def test_what_is_no_pipe_is_not_written_to() -> None:
    out = SharedOut(LANE)
    offer = out.offer
    other = memory_file("victim", nonce=bytes(32))
    with pytest.raises(NetworkError, match="something else"):
        SharedIn(msgspec.structs.replace(offer, pipe=other))
    assert os.pread(other, 1, 0) == b"\0"
    os.close(other)
    out.close()


def test_the_reader_cannot_write_and_the_memory_keeps_its_size() -> None:
    out = SharedOut(LANE)
    reader = SharedIn(out.offer)
    with pytest.raises(TypeError, match="read-only"):
        reader.take(1)[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(out._memory, 0)
    reader.close()
    out.close()


def test_a_reader_that_frees_more_than_there_is_ends_the_lane() -> None:
    (near, far), out = tcp_pair(), SharedOut(LANE)
    reader = SharedIn(out.offer)
    with near, far:
        for _ in range(SHARED_SLOTS):
            out.take(near, WAIT_S)
        for _ in range(SHARED_SLOTS + CREDIT_SLOTS):
            reader.free()
        with pytest.raises(NetworkError, match=f"{SHARED_SLOTS + CREDIT_SLOTS} slots"):
            out.take(near, WAIT_S)
    reader.close()
    out.close()


def test_a_slot_is_not_given_out_twice_before_it_is_freed() -> None:
    (near, far), out = tcp_pair(), SharedOut(LANE)
    reader = SharedIn(out.offer)
    with near, far:
        for number in range(SHARED_SLOTS):
            out.take(near, WAIT_S)[HEADER_BYTES] = number
        with pytest.raises(NetworkError, match="no slot"):
            out.take(near, 0.05)
        assert [reader.take(1)[0] for _ in range(SHARED_SLOTS)] == list(range(SHARED_SLOTS))
        for _ in range(CREDIT_SLOTS):
            reader.free()
        for number in range(CREDIT_SLOTS):
            out.take(near, WAIT_S)[HEADER_BYTES] = 77 + number
        with pytest.raises(NetworkError, match="no slot"):
            out.take(near, 0.05)
        assert [reader.take(1)[0] for _ in range(CREDIT_SLOTS)] == [77 + number for number in range(CREDIT_SLOTS)]
        near.shutdown(socket.SHUT_RDWR)  # as by the lane's other thread
        with pytest.raises(NetworkError, match="ended"):
            out.take(near, WAIT_S)
    reader.close()
    out.close()


def test_a_reader_that_is_gone_frees_nothing() -> None:
    (near, far), out = tcp_pair(), SharedOut(LANE)
    reader = SharedIn(out.offer)
    out.settle()
    with near, far:
        for _ in range(SHARED_SLOTS):
            out.take(near, WAIT_S)
        reader.close()
        with pytest.raises(NetworkError, match="0 slots"):
            out.take(near, WAIT_S)
    out.close()
    reader.free()  # and the other way round nothing is raised


READER = """
import sys
import msgspec
from shoal.swarm.lanes.shared import SharedIn, SharedOffer
reader = SharedIn(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SharedOffer))
sys.stdout.write(bytes(reader.take(5)).decode())
reader.free()
reader.free()
"""


def test_another_process_reads_it() -> None:
    (near, far), out = tcp_pair(), SharedOut(LANE)
    with near, far:
        for _ in range(SHARED_SLOTS):
            slot = out.take(near, WAIT_S)
            slot[HEADER_BYTES : HEADER_BYTES + 5] = b"hello"
        command = [sys.executable, "-c", READER, msgspec.msgpack.encode(out.offer).hex()]
        assert subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S).stdout == b"hello"
        out.take(near, WAIT_S)
    out.close()
