"""One lane: one TCP connection to a peer, run by one receiving and one sending thread.

    post ──► bounded queue ──► send thread: seal into one buffer, one send ──► socket
    sink ◄── receive thread: header, ask for a region, decrypt straight into it ◄── socket

Threads and blocking sockets, because the work is in the kernel and in the cipher: an event loop would only add
copies and wake-ups. Payloads are queued by reference and must not change until they are sent.

How a lane ends. A CLOSE frame ends one direction: who gets one sends what it has queued, then its own CLOSE.
A lane on which both were seen has lost nothing. Anything else (end of stream, a reset, a frame that does not
open, a stall, `abort`) is a fault and may have lost frames. The socket is shut down by whoever notices first,
which wakes both threads, and closed by the thread that leaves last: a descriptor closed under a thread's feet
could be another connection's by the time the thread reads from it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.frame import BULK_KINDS, FRAME_LIMIT_BYTES, HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.seal import (
    LANE_LIMIT_BYTES,
    LANES_PER_PEER_LIMIT,
    SEAL_OVERHEAD_BYTES,
    TAG_BYTES,
    Opener,
    Sealer,
)

QUEUE_LIMIT_FRAMES = 4096
STALL_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0
JOIN_DEADLINE_S = 5.0
LANE_WORN_BYTES = LANE_LIMIT_BYTES - LANE_LIMIT_BYTES // 16
KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3

RATE_LIMIT_MIN_BYTES_PER_S = 64 * 1024
RATE_BURST_S = 0.1
PACED_PIECE_BYTES = 64 * 1024
METER_FRAME_BYTES = 64 * 1024  # smaller frames say nothing of the rate
METER_SAMPLE_BYTES = 1024 * 1024
METER_WINDOW_S = 8.0

# Without it recv_into may return early, and `_fill` goes round once more.
_MSG_WAITALL = getattr(socket, "MSG_WAITALL", 0)

logger = logging.getLogger(__name__)


class FrameSink(Protocol):
    """Where frames of all lanes arrive. Called in lanes' receive threads, several at once: be thread-safe, be quick.

    A RemoteError raised by `region` or `received` ends that lane only and is handed to `lane_closed`. Any other
    exception is a bug of ours: it is logged and ends the lane too.
    """

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Where a bulk frame's payload goes: writable, contiguous, exactly header.length bytes.

        Asked for bulk kinds only, *before* the frame is authenticated. The header may be forged and the region
        may be filled with rubbish when the frame does not open, so it must not hold bytes already
        counted as valid. What is not followed by `received` did not arrive.

        None: the frame is not wanted. It is opened into scratch, to keep the lane in step, and dropped.
        """
        ...

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """An authentic frame. `payload` is the region of a bulk frame; of other kinds it lasts for this call only."""
        ...

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """A lane ended; called once per lane, after its last frame.

        None: in order, nothing was lost (other lanes to the peer may live on). Otherwise frames queued here or on
        their way may be lost.
        """
        ...


class RateLimit:
    """A cap in bytes per second, shared by the threads of all lanes it is given to."""

    def __init__(self, bytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_s < RATE_LIMIT_MIN_BYTES_PER_S:
            raise ConfigError(
                f"a rate limit of {bytes_per_s} bytes/s is too low; give at least {RATE_LIMIT_MIN_BYTES_PER_S}"
            )
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = clock()

    def reserve(self, size: int) -> float:
        """Take `size` bytes from the budget; returns how many seconds to wait before taking more."""
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - RATE_BURST_S) + size / self._bytes_per_s
            return max(0.0, self._paid_until - now)


class RateMeter:
    """Bytes per second while busy; what is older than METER_WINDOW_S busy seconds fades by halves.

    One thread adds, any thread reads. A burst smaller than the kernel's buffers reads too fast on the sending side.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count `size` bytes that took `seconds`."""
        self._bytes += size
        self._seconds += seconds
        if self._seconds > METER_WINDOW_S:
            self._bytes /= 2
            self._seconds /= 2

    @property
    def bytes_per_s(self) -> float | None:
        """The measured rate; None until enough bytes went by."""
        if self._bytes < METER_SAMPLE_BYTES or self._seconds <= 0:
            return None
        return self._bytes / self._seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """What bounds the lanes of one node. Raises ConfigError if a value makes no sense."""

    lanes_per_peer: int = 1
    queue_frames: int = QUEUE_LIMIT_FRAMES
    stall_s: float = STALL_DEADLINE_S
    upload: RateLimit | None = None
    download: RateLimit | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.lanes_per_peer <= LANES_PER_PEER_LIMIT:
            raise ConfigError(f"lanes per peer must be 1 to {LANES_PER_PEER_LIMIT}, not {self.lanes_per_peer}")
        if self.queue_frames < 1 or self.stall_s <= 0:
            raise ConfigError("a lane needs room for one frame and some time to send it")


class Lane:
    """A sealed connection to `peer`, after both hellos.

    `ended` is called once, in a lane thread, when nothing runs any more and before the sink's `lane_closed`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        peer: PeerId,
        sealer: Sealer,
        opener: Opener,
        sink: FrameSink,
        limits: LaneLimits,
        dialled: bool,
        ended: Callable[[Lane], None] | None = None,
    ) -> None:
        self.peer = peer
        self.dialled = dialled  # by us
        self.bytes_sent = 0
        self.bytes_received = 0
        self.send_meter = RateMeter()
        self.receive_meter = RateMeter()
        self._socket = connection
        self._sealer = sealer
        self._opener = opener
        self._sink = sink
        self._limits = limits
        self._ended = ended
        # The lock of `_changed` guards all below, and every shutdown or close of the socket.
        self._changed = threading.Condition()
        self._queue: deque[tuple[FrameHeader, memoryview]] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._dead = False
        self._error: NetworkError | RemoteError | None = None
        self._running = 2
        self._threads = tuple(
            threading.Thread(target=self._guard, args=(body,), name=f"lane {name} {peer[-6:]}", daemon=True)
            for name, body in (("send", self._send_frames), ("receive", self._receive_frames))
        )

    def start(self) -> None:
        """Make the socket blocking and start both threads."""
        try:
            _prepare(self._socket, self._limits.stall_s)
        except OSError as error:  # reset already; the threads find out at once and say so
            self._fail(NetworkError(f"the connection to {self.peer} broke: {error}"))
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        """Whether frames can still be posted."""
        return not (self._closing or self._dead)

    @property
    def worn(self) -> bool:
        """Whether its keys are nearly used up, so that another lane should replace it."""
        return max(self._sealer.bytes_used, self._opener.bytes_used) > LANE_WORN_BYTES

    @property
    def queued_bytes(self) -> int:
        """Bytes of payload posted and not yet given to the kernel; at 0 no payload is referred to any more."""
        return self._queued_bytes

    def post(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """Queue a frame; never blocks. `payload` is kept by reference and must not change until it is sent.

        payload: contiguous, header.length bytes.

        Raises NetworkError if the queue is full or the lane is ending, LocalError if the frame is no proper one.
        """
        view = memoryview(payload)
        if header.kind in (FrameKind.HELLO, FrameKind.CLOSE):
            raise LocalError(f"{header.kind.name} frames are the lane's own")
        if not view.c_contiguous or view.nbytes != header.length:
            raise LocalError(f"a payload of {view.nbytes} bytes for a header that says {header.length}")
        with self._changed:
            if not self.usable:
                raise NetworkError(f"the lane to {self.peer} is ending")
            if len(self._queue) >= self._limits.queue_frames:
                raise NetworkError(f"the lane to {self.peer} has {len(self._queue)} frames queued already")
            self._queue.append((header, view.cast("B")))
            self._queued_bytes += header.length
            self._changed.notify_all()

    def begin_close(self) -> None:
        """Take no more frames; send what is queued, then CLOSE. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End the lane in order, or by `abort` when that takes longer than `deadline_s`. Blocks; not for the sink."""
        self.begin_close()
        if not self.join(deadline_s):
            self.abort(f"no orderly close within {deadline_s} s")
            self.join(JOIN_DEADLINE_S)

    def abort(self, reason: str = "aborted here") -> None:
        """End the lane at once, from any thread. Returns at once; both threads wake and leave."""
        self._fail(NetworkError(f"lane to {self.peer}: {reason}"))

    def join(self, deadline_s: float) -> bool:
        """Wait for both threads; whether they are gone."""
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Sending thread

    def _send_frames(self) -> None:
        out = memoryview(bytearray(FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES))
        while self._send_next(out):
            pass
        size = self._sealer.seal_into(FrameHeader(kind=FrameKind.CLOSE, length=0), b"", out)
        self._send_all(out[:size])

    def _send_next(self, out: memoryview) -> bool:
        """Send the next queued frame; False when the lane is closing and the queue is empty."""
        with self._changed:
            while not (self._queue or self._closing or self._dead):
                self._changed.wait()
            if self._dead or not self._queue:
                self._raise_if_dead()
                return False
            header, payload = self._queue.popleft()
        size = self._sealer.seal_into(header, payload, out)
        started = time.monotonic()
        self._send_all(out[:size])
        if size >= METER_FRAME_BYTES:
            self.send_meter.add(size, time.monotonic() - started)
        del payload  # the owner may want to free it while this thread waits
        with self._changed:
            self._queued_bytes -= header.length
        return True

    def _send_all(self, view: memoryview) -> None:
        limit = self._limits.upload
        while view:
            try:
                sent = self._socket.send(view if limit is None else view[:PACED_PIECE_BYTES])
            except BlockingIOError:
                raise NetworkError(f"{self.peer} took no byte for {self._limits.stall_s} s") from None
            self.bytes_sent += sent
            view = view[sent:]
            self._pace(limit, sent)

    # Receiving thread

    def _receive_frames(self) -> None:
        head = bytearray(HEADER_BYTES)
        sealed = memoryview(bytearray(FRAME_LIMIT_BYTES + TAG_BYTES))
        scratch = memoryview(bytearray(FRAME_LIMIT_BYTES))
        while self._receive_next(head, sealed, scratch):
            pass
        self.begin_close()

    def _receive_next(self, head: bytearray, sealed: memoryview, scratch: memoryview) -> bool:
        """Receive one frame; False if it was CLOSE."""
        self._fill(memoryview(head), idle=True)
        started = time.monotonic()
        header = FrameHeader.decode(head, peer=self.peer)
        body = sealed[: header.length + TAG_BYTES]
        self._fill(body)
        if header.length >= METER_FRAME_BYTES:
            self.receive_meter.add(header.length, time.monotonic() - started)
        self._raise_if_dead()
        region = self._region(header)
        target = scratch[: header.length] if region is None else region
        self._opener.open_into(head, body, target)
        if header.kind is FrameKind.HELLO:
            raise RemoteError("a second hello", peer=self.peer)
        if header.kind is FrameKind.CLOSE:
            return False
        if region is not None or header.kind not in BULK_KINDS:
            self._sink.received(self.peer, header, target)
        return True

    def _region(self, header: FrameHeader) -> memoryview | None:
        if header.kind not in BULK_KINDS:
            return None
        region = self._sink.region(self.peer, header)
        if region is not None and (region.readonly or region.nbytes != header.length):
            raise LocalError(f"the sink gave {region.nbytes} bytes for a frame of {header.length}")
        return None if region is None else region.cast("B")

    def _fill(self, view: memoryview, *, idle: bool = False) -> None:
        """Receive exactly `view`. `idle`: the first byte may take forever (keepalive finds a dead host)."""
        limit = self._limits.download
        while view:
            piece = view if limit is None else view[:PACED_PIECE_BYTES]
            try:
                got = self._socket.recv_into(piece, len(piece), _MSG_WAITALL)
            except BlockingIOError:
                if idle:
                    continue
                raise NetworkError(f"{self.peer} stopped inside a frame") from None
            if got == 0:
                raise NetworkError(f"the connection to {self.peer} ended without a CLOSE frame")
            idle = False
            self.bytes_received += got
            view = view[got:]
            self._pace(limit, got)

    # Both threads

    def _pace(self, limit: RateLimit | None, size: int) -> None:
        delay = 0.0 if limit is None else limit.reserve(size)
        if delay > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._dead, timeout=delay)

    def _raise_if_dead(self) -> None:
        if self._dead:
            raise NetworkError("the lane ended meanwhile")

    def _guard(self, body: Callable[[], None]) -> None:
        """Run one thread's work and turn whatever ends it into the lane's end."""
        try:
            body()
        except (NetworkError, RemoteError) as error:
            self._fail(error)
        except OSError as error:
            self._fail(NetworkError(f"the connection to {self.peer} broke: {error}"))
        except Exception:  # the peer's task boundary: one lane's bug must not end the node
            logger.exception("lane to %s", self.peer)
            self._fail(NetworkError(f"a fault of ours ended the lane to {self.peer}"))
        finally:
            self._leave()

    def _fail(self, error: NetworkError | RemoteError) -> None:
        """Remember the first fault and wake both threads."""
        with self._changed:
            if self._dead or self._running == 0:
                return
            self._dead = True
            # Tracebacks and contexts would keep the buffers of the frame at fault alive.
            error.__context__ = None
            self._error = error.with_traceback(None)
            self._changed.notify_all()
            with contextlib.suppress(OSError):  # not connected any more
                # Unsent bytes go at once: `close` sends a reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._socket.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            if self._running > 0:
                return
            self._closing = True
            self._queue.clear()
            self._queued_bytes = 0
            self._socket.close()
        try:
            if self._ended is not None:
                self._ended(self)
            self._sink.lane_closed(self.peer, self._error)
        except Exception:  # the same boundary
            logger.exception("the end of the lane to %s", self.peer)


def _prepare(connection: socket.socket, stall_s: float) -> None:
    """Blocking, with time-outs in the kernel: no wait inside a frame or a send outlasts `stall_s` without progress."""
    connection.setblocking(True)
    # A time-out of Python's own would make the descriptor non-blocking, and MSG_WAITALL void.
    interval = struct.pack("ll", int(stall_s), int(stall_s % 1 * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPALIVE", KEEPALIVE_IDLE_S),  # macOS's name for it
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", int(stall_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if hasattr(socket, "TCP_CONGESTION") and not _is_loopback(connection):
        # On a long lossy link BBR moves several times what cubic does. Not every kernel offers it.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def _is_loopback(connection: socket.socket) -> bool:
    try:
        host = str(connection.getpeername()[0])
    except OSError:
        return False
    return host.startswith(("127.", "::1", "::ffff:127."))
