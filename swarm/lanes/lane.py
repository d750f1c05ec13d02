"""One lane: one TCP connection to a peer, run by one receiving and one sending thread.

    post ──► the peer's queue ──► send thread: seal into one buffer, one send ──► socket
    sink ◄── receive thread: header, ask for a region, decrypt straight into it ◄── socket

Threads and blocking sockets, because the work is in the kernel and in the cipher: an event loop would only add
copies and wake-ups. Payloads are queued by reference and must not change until they are sent. Lanes to one peer may
share a queue. One that closes leaves it to the others; what is on none of them when the last one ends is lost.

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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import BULK_KINDS, HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.queue import CHUNKS_PER_EMPTY_FRAME, Frame, FrameQueue, Later
from shoal.swarm.lanes.seal import LANE_LIMIT_BYTES, TAG_BYTES, Opener, Sealer
from shoal.swarm.lanes.shared import SharedOffer, Sharing, on_one_machine
from shoal.swarm.lanes.socket import MSG_WAITALL, Moved, ends_of, frame_buffers, moved, path_of, prepare, reason_of

CLOSE_DEADLINE_S = 5.0
JOIN_DEADLINE_S = 5.0
LANE_WORN_BYTES = LANE_LIMIT_BYTES - LANE_LIMIT_BYTES // 16
BATCH_BYTES = 64 * 1024  # of small frames in one send
ASIDE_S = 0.05  # a lane that has left a frame to others looks again

logger = logging.getLogger(__name__)


class FrameSink(Protocol):
    """Receiver of frames of all lanes. Called in their receive threads, several at once: be thread-safe, be quick.

    A RemoteError raised by `region` or `received` ends that lane only and is handed to `lane_closed`. Any other
    exception is a bug of ours: it is logged and ends the lane too.
    """

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Return the place for a bulk frame's payload: writable, contiguous, exactly header.length bytes.

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


class FrameTaker(Protocol):
    """Receiver of frames of some kinds. Called as a `FrameSink` is."""

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """As of a `FrameSink`."""
        ...

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """As of a `FrameSink`."""
        ...

    def lane_failed(self, peer: PeerId) -> None:
        """A lane broke: what was queued on it or on its way may be lost."""
        ...


class FrameTakers:
    """The sink of all lanes of a node: each frame goes to who registered for its kind, before any lane is up."""

    def __init__(self) -> None:
        self._takers: dict[FrameKind, FrameTaker] = {}
        self.is_leaving: Callable[[PeerId], bool] = lambda peer: False
        """True for a peer to which the end of a lane was to be expected."""

    def register(self, kinds: Iterable[FrameKind], taker: FrameTaker) -> None:
        """Give frames of these kinds to `taker`."""
        self._takers.update(dict.fromkeys(kinds, taker))

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """See `FrameSink`."""
        return self._taker(peer, header).region(peer, header)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """See `FrameSink`."""
        self._taker(peer, header).received(peer, header, payload)

    def _taker(self, peer: PeerId, header: FrameHeader) -> FrameTaker:
        taker = self._takers.get(header.kind)
        if taker is None:
            raise RemoteError(f"a frame of kind {header.kind.name} is of no use here", peer=peer)
        return taker

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """See `FrameSink`."""
        if error is not None:
            told = error if isinstance(error, NetworkError) else f"the connection with {peer} broke: {error}"
            logger.log(logging.DEBUG if self.is_leaving(peer) else logging.INFO, "%s", told)
            for taker in dict.fromkeys(self._takers.values()):
                taker.lane_failed(peer)


class Lane:
    """A sealed connection to `peer`, after both hellos.

    queue: shared by all lanes to the peer; one of its own if not given. huge: its buffers are a huge page, where
    there are such. `ended` is called once, in a lane thread, when nothing runs any more and before the sink's
    `lane_closed`.
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
        queue: FrameQueue | None = None,
        huge: bool = True,
        ended: Callable[[Lane], None] | None = None,
    ) -> None:
        self.peer = peer
        self.dialled = dialled  # by us
        self.relayed = False  # through a third; its pool says so
        self.id = b""  # of the key agreement, likewise
        self.share: Callable[[Lane, SharedOffer], None] | None = None
        """Tells the peer of memory to share, and has `answered` called; in the sending thread. None: shares nothing."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.payload_sent = 0  # bytes of payload given to the kernel
        self._socket = connection
        self._sealer = sealer
        self._opener = opener
        self._sink = sink
        self._limits = limits
        self._ended = ended
        self._queue = limits.queue() if queue is None else queue
        self._sharing = Sharing(connection)
        self._begins_sharing = False  # is to tell the peer so
        self._in_hand = 0  # bytes of payload taken from the queue
        # The lock of `_changed` guards all below, and every shutdown or close of the socket. All lanes of a queue
        # share it.
        self._changed = self._queue.changed
        self._closing = False
        self._dead = False
        self._died = threading.Event()
        self._error: NetworkError | RemoteError | None = None
        self._running = 2
        self._moved = Moved()
        out, sealed, scratch = frame_buffers(huge=huge)
        self._threads = tuple(
            threading.Thread(target=self._guard, args=(body,), name=f"lane {name} {peer[-6:]}", daemon=True)
            for name, body in (
                ("send", partial(self._send_frames, out)),
                ("receive", partial(self._receive_frames, sealed, scratch)),
            )
        )

    def start(self) -> None:
        """Make the socket blocking and start both threads. Raises NetworkError, and it has ended, if there are none."""
        with self._changed:
            self._queue.lanes += 1
            self._queue.open_lanes += 1
        try:
            prepare(self._socket, self._limits.stall_s)
        except OSError as error:  # reset already; the threads find out at once and say so
            self._fail(NetworkError(f"the connection with {self.peer} broke: {reason_of(error)}"))
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # as many run as the system, or a container, allows
            self._fail(NetworkError(f"no threads for a lane to {self.peer}: {error}"))
            for _ in filter(lambda thread: thread.ident is None, self._threads):
                self._leave()
            raise NetworkError(f"no threads for a lane to {self.peer}: {error}") from None

    @property
    def usable(self) -> bool:
        """True if frames can still be posted."""
        return not (self._closing or self._dead)

    @property
    def worn(self) -> bool:
        """True if its keys are nearly used up, so that another lane should replace it."""
        return max(self._sealer.bytes_used, self._opener.bytes_used) > LANE_WORN_BYTES

    @property
    def queued_bytes(self) -> int:
        """Bytes of payload in its queue or hands, not yet given to the kernel; at 0 no payload is referred to."""
        return self._queue.queued_bytes

    @property
    def neighbour_waits(self) -> bool:
        """True if the peer is on this machine, and something that was posted to it is not on its way yet."""
        return self._queue.queued_bytes > 0 and self.is_local

    @property
    def is_local(self) -> bool:
        """True if the peer is on this machine."""
        return on_one_machine(self._socket)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The IP addresses of its own and of its other end; None when it has ended."""
        with self._changed:
            return ends_of(self._socket) if self._running else None

    @property
    def moved(self) -> Moved:
        """Traffic over this lane, by its kernel's count where there is one; also after its end."""
        with self._changed:
            if self._running:
                self._moved = self._count() or Moved(self.bytes_received, self.bytes_sent)
            return self._moved

    def _count(self) -> Moved | None:
        """Count by the kernel, plus what did not go through it; None where the system has none."""
        counted, sharing = moved(self._socket), self._sharing
        return None if counted is None else counted + Moved(sharing.bytes_received, sharing.bytes_sent)

    def post(self, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
        """Queue a frame; never blocks. `payload` is kept by reference and must not change until it is sent.

        payload: contiguous, header.length bytes.

        Raises NetworkError if the queue is full or the lane is ending, LocalError if the frame is no proper one.
        """
        if header.kind in (FrameKind.HELLO, FrameKind.SHARE, FrameKind.CLOSE):
            raise LocalError(f"{header.kind.name} frames are the lane's own")
        if not callable(payload):
            view = memoryview(payload)
            if not view.c_contiguous or view.nbytes != header.length:
                raise LocalError(f"a payload of {view.nbytes} bytes for a header that says {header.length}")
            payload = view.cast("B")
        with self._changed:
            if not self.usable:
                raise NetworkError(f"the lane to {self.peer} is ending")
            self._queue.put(header, payload)

    @property
    def shares(self) -> bool:
        """True if it may share memory with the peer: there is no cap, and no third between the two."""
        limits = self._limits
        return limits.shares and not limits.capped and not self.relayed

    @property
    def uses_memory(self) -> bool:
        """True if frames are handed over in memory, which heeds no cap."""
        return self._sharing.is_used

    def take_memory(self, offer: SharedOffer) -> None:
        """Make ready to receive in the peer's memory. Raises NetworkError if that cannot be."""
        with self._changed:
            if not self.shares:
                raise NetworkError("the lane shares no memory")
            self._sharing.take(offer)

    def answered(self, taken: bool) -> None:
        """Take the peer's answer to an offer of shared memory. taken: it took the memory."""
        with self._changed:
            self._begins_sharing = self._sharing.answered(taken)
            self._changed.notify_all()

    def begin_close(self) -> None:
        """Take no more frames; send what is queued if no other lane can, then CLOSE. Returns at once."""
        with self._changed:
            self._withdraw()
            self._closing = True
            self._changed.notify_all()

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End the lane in order, or by `abort` when that takes longer than `deadline_s`. Blocks; not for the sink."""
        self.begin_close()
        if not self.join(deadline_s):
            self.abort(f"no orderly close within {deadline_s} s")
            self.join(JOIN_DEADLINE_S)

    def abort(self, reason: str = "it is of no more use") -> None:
        """End the lane at once, from any thread. Returns at once; both threads wake and leave."""
        self._fail(NetworkError(f"the connection with {self.peer} was ended here: {reason}"))

    def join(self, deadline_s: float) -> bool:
        """Wait for both threads; whether they are gone."""
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Sending thread

    def _send_frames(self, out: memoryview) -> None:
        while frames := self._next_frames():
            header, data = frames[0]
            self._offer_memory(header.length)
            slot = self._sharing.slot(header.length, self._limits.stall_s)
            if slot is not None:
                rest = self._sealer.seal_into(header, data, slot) - HEADER_BYTES
                del data
                frames.clear()
                self._send_all(slot[:HEADER_BYTES], header.length)
                self.bytes_sent += rest
                continue
            size = payload = 0
            for header, data in frames:
                size += self._sealer.seal_into(header, data, out[size:])
                payload += header.length
            del data  # the owner may want to free it while this thread waits
            frames.clear()
            self._send_all(out[:size], payload)
            if header.kind is FrameKind.SHARE:
                self._sharing.began()
        size = self._sealer.seal_into(FrameHeader(kind=FrameKind.CLOSE, length=0), b"", out)
        self._send_all(out[:size], 0)

    def _offer_memory(self, size: int) -> None:
        if self.share is not None and self.shares and (offer := self._sharing.offer(self.id, size)) is not None:
            self.share(self, offer)

    def _next_frames(self) -> list[Frame]:
        """Let go of the frames in hand and wait for the next; [] when the lane is closing and need send no more."""
        with self._changed:
            self._let_go()
            while not (self._dead or self._closing or self._begins_sharing or self._takes_next()):
                self._changed.wait(ASIDE_S if self._queue.waits else None)
            self._raise_if_dead()
            if self._closing and self._queue.open_lanes > 0:
                return []
            if self._begins_sharing:
                self._begins_sharing = False
                return [(FrameHeader(kind=FrameKind.SHARE, length=0), memoryview(b""))]
            frames = self._queue.take(BATCH_BYTES, self._sharing.frame_bytes)
            self._in_hand = sum(header.length for header, _ in frames)
        self._queue.observe()
        return frames

    def _takes_next(self) -> bool:
        """Return True if there is a frame for this lane to take; if a resting lane is to take it, wake that one."""
        queue = self._queue
        if not queue.waits or queue.open_lanes < 2 or (path := path_of(self._socket)) is None:
            return queue.waits
        now, size, waiting = time.monotonic(), queue.next_bytes, queue.queued_bytes
        takes = queue.lineup.takes(self, path, now, size=size, waiting=waiting)
        if not takes and queue.lineup.someone_else_would(self, now, size=size, waiting=waiting):
            self._changed.notify()
        return takes

    def _let_go(self) -> None:
        self._queue.done(self._in_hand)
        self._in_hand = 0
        self._queue.lineup.rests(self)

    def _send_all(self, view: memoryview, payload: int) -> None:
        """Send `view`, which holds `payload` bytes of payload."""
        limit = self._limits.upload
        size, before, sent = len(view), self.payload_sent, 0
        while sent < size:
            piece = limit.piece(view[sent:])
            try:
                taken = self._socket.send(piece)
            except BlockingIOError:
                raise NetworkError(f"{self.peer} took no byte for {self._limits.stall_s} s") from None
            sent += taken
            self.bytes_sent += taken
            self.payload_sent = before + payload * sent // size
            self._pace(limit, taken)

    # Receiving thread

    def _receive_frames(self, sealed: memoryview, scratch: memoryview) -> None:
        head = bytearray(HEADER_BYTES)
        while self._receive_next(head, sealed, scratch):
            pass
        self.begin_close()

    def _receive_next(self, head: bytearray, sealed: memoryview, scratch: memoryview) -> bool:
        """Receive one frame; False if it was CLOSE."""
        self._fill(memoryview(head), idle=True)
        header = FrameHeader.decode(head, peer=self.peer)
        shared = self._sharing.sealed(header.length)
        body = sealed[: header.length + TAG_BYTES] if shared is None else shared
        if shared is None:
            self._fill(body)
        else:
            self.bytes_received += len(body)
        self._raise_if_dead()
        region = self._region(header)
        target = _aside(scratch, header.length) if region is None else region
        self._opener.open_into(head, body, target)
        if shared is not None:
            self._sharing.opened()
        if header.kind is FrameKind.HELLO:
            raise RemoteError("a second hello", peer=self.peer)
        if header.kind is FrameKind.CLOSE:
            return False
        if header.kind is FrameKind.SHARE:
            if not self._sharing.begin():
                raise RemoteError("begins to share memory that was not taken")
        elif region is not None or header.kind not in BULK_KINDS:
            self._sink.received(self.peer, header, target)
        if header.length == 0:
            self._hold_back(header)
        return True

    def _hold_back(self, header: FrameHeader) -> None:
        """A frame that carries nothing came: wait until the peer's are within their rate again."""
        further = header.total / CHUNKS_PER_EMPTY_FRAME if header.kind is FrameKind.REQUEST else 0.0
        with self._changed:
            delay_s = self._queue.empty_frames.owe(1.0 + further, time.monotonic())
        if delay_s > 0:
            self._died.wait(delay_s)

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
            piece = limit.piece(view)
            try:
                got = self._socket.recv_into(piece, len(piece), MSG_WAITALL)
            except BlockingIOError:
                if idle:
                    continue
                raise NetworkError(
                    f"the connection with {self.peer} broke: it stopped in the middle of a message"
                ) from None
            if got == 0:
                raise NetworkError(f"the connection with {self.peer} broke: its other end closed it, and took no leave")
            idle = False
            self.bytes_received += got
            view = view[got:]
            self._pace(limit, got)

    # Both threads

    def _pace(self, limit: RateLimit, size: int) -> None:
        delay = limit.reserve(size)
        if delay > 0:
            self._died.wait(delay)

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
            self._fail(NetworkError(f"the connection with {self.peer} broke: {reason_of(error)}"))
        except Exception:  # the peer's task boundary: one lane's bug must not end the node
            logger.exception("lane to %s", self.peer)
            self._fail(NetworkError(f"a fault of ours ended the connection with {self.peer}"))
        finally:
            self._leave()

    def _fail(self, error: NetworkError | RemoteError) -> None:
        """Remember the first fault and wake both threads."""
        with self._changed:
            if self._dead or self._running == 0:
                return
            self._withdraw()
            self._dead = True
            self._died.set()
            # Tracebacks and contexts would keep the buffers of the frame at fault alive.
            error.__context__ = None
            self._error = error.with_traceback(None)
            self._changed.notify_all()
            with contextlib.suppress(OSError):  # not connected any more
                # Unsent bytes go at once: `close` sends a reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._socket.shutdown(socket.SHUT_RDWR)

    def _withdraw(self) -> None:
        """Take nothing more from the queue, unless as the last one."""
        if self.usable:
            self._queue.open_lanes -= 1
            self._queue.lineup.goes(self)

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            if self._running > 0:
                return
            self._withdraw()
            self._closing = True
            self._let_go()
            self._queue.lanes -= 1
            if self._queue.lanes == 0:
                self._queue.clear()
            self._moved = self._count() or self._moved
            self._sharing.close()
            self._socket.close()
        try:
            if self._ended is not None:
                self._ended(self)
            self._sink.lane_closed(self.peer, self._error)
        except Exception:  # the same boundary
            logger.exception("the end of the lane to %s", self.peer)


def _aside(scratch: memoryview, size: int) -> memoryview:
    """Room for a frame that nobody wants; `scratch` has it for all but those that came through memory."""
    return scratch[:size] if size <= len(scratch) else memoryview(bytearray(size))
