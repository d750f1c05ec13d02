"""One libp2p connection: the socket under it, and the yamux above it, as Shoal needs them.

* `Wire`     — the socket: notices a dead peer within seconds, can be closed without waiting, and takes little of a peer
  that nobody knows yet.
* `Muxer`    — yamux: a cancelled task never leaves half a frame on the wire; a heartbeat; a memory bound; credit for
  what was read is given in few frames rather than after every read; pings by which a peer can be asked for a sign of
  life at next to no cost: both ends are known to each other, so nothing is signed, and no stream has to be read.
* `Secured`  — what is between them: strangers are read when it is their turn.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from shoal.protocol.identity import PeerId
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.limits import HANDSHAKE_LIMIT_BYTES, NOBODY, SMALL_FRAME_BYTES, Memory

with only_what_runs():
    from libp2p.exceptions import BaseLibp2pError
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.io.exceptions import ConnectionClosedError
    from libp2p.network.exceptions import SwarmException
    from libp2p.peer.id import ID
    from libp2p.stream_muxer.yamux import yamux
    from libp2p.stream_muxer.yamux.yamux import (
        DEFAULT_WINDOW_SIZE,
        FLAG_ACK,
        FLAG_SYN,
        HEADER_SIZE,
        TYPE_DATA,
        TYPE_PING,
        YAMUX_HEADER_FORMAT,
        Yamux,
        YamuxStream,
    )

# Unacknowledged data for this long breaks the connection (Linux); probes find a peer that went away silently.
USER_TIMEOUT_MS = 8_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 3

# A frame is at most 64 KiB; one that the socket does not take in this time means a hung peer.
FRAME_STALL_DEADLINE_S = 5.0
# A frame that was begun may finish for this long after its sender gave up, to spare the connection.
FRAME_GRACE_S = 1.0
# A stopped process (SIGSTOP) keeps its TCP connections; only what it says proves that it runs. The failure detector
# (shoal.protocol.membership) finds a member long before; this is for all others, and for all of a member's connections
# to cost next to nothing at rest.
HEARTBEAT_INTERVAL_S = 30.0
HEARTBEAT_DEADLINE_S = 15.0
PINGS_WAITING_LIMIT = 16
"""Pings and answers of one connection that are yet to be written; beyond it the oldest is dropped."""
CLOSE_DEADLINE_S = 2.0
CONNECTION_HANDSHAKE_DEADLINE_S = 10.0
"""For Noise and yamux on a connection of any kind."""
# What a socket is read for at once: libp2p's messages are that long at most, and frames are read in such pieces.
READ_LIMIT_BYTES = 64 << 10
READ_AHEAD_BYTES = 2 << 10
"""Taken from a socket beyond what was asked for: a message and the length before it come in one step, not two."""
FRAME_BODY_DEADLINE_S = 60.0
# To which the room of a stream that is read quickly grows; libp2p's 16 MiB on a few streams are more than a peer has.
WINDOW_LIMIT_BYTES = 2 << 20  # of a stream
yamux.MAX_WINDOW_SIZE = WINDOW_LIMIT_BYTES  # looked up there by name
# Between two looks for streams that ended and were not read to their end; each is one wake-up of every connection.
yamux._STALE_STREAM_SWEEP_INTERVAL = 120.0  # looked up there by name
# Bytes of a stream that are read before its sender is told: so much of its window it may find missing, and no more.
CREDIT_BYTES = DEFAULT_WINDOW_SIZE // 4

# What libp2p's streams and connections raise when the world, rather than our code, is at fault.
FOREIGN_ERRORS = (BaseLibp2pError, trio.BrokenResourceError, trio.ClosedResourceError, OSError, ValueError)


class Allowance:
    """Allowance of one connection: few bytes until its ends are known; then only what there is room for may wait.

    `counts` is told of everything that is read. What is read and not enough yet is `waiting`, and in `Memory`.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self._holder = NOBODY
        self._waiting = 0
        self._left: int | None = HANDSHAKE_LIMIT_BYTES

    def known(self, peer: PeerId) -> None:
        """Note that the connection is this peer's, from now on, and lift the limit."""
        self.wait(0)
        self._holder, self._left = peer, None

    def counts(self, size: int) -> bool:
        """Count so many bytes more; return True if they may be read."""
        if self._left is None:
            return True
        self._left -= size
        return self._left >= 0

    def read(self, size: int) -> None:
        """So many of the bytes that were waiting were read."""
        self.wait(max(0, self._waiting - size))

    def wait(self, size: int) -> bool:
        """Have so many bytes waiting, all told; False if there is no room for them."""
        more, self._waiting = size - self._waiting, size
        if self._memory is None or more == 0:
            return True
        if more < 0:
            self._memory.free(self._holder, -more)
        elif not self._memory.take(self._holder, more):
            self._waiting -= more
            return False
        return True


class Wire(ReadWriteCloser):  # type: ignore[misc]
    """A TCP socket with our options, as libp2p reads and writes it."""

    def __init__(self, stream: trio.SocketStream, memory: Memory | None = None) -> None:
        self._stream = stream
        self._ahead = b""
        self.allowance = Allowance(memory)
        _tune(stream)

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("the connection is closed", transport="tcp") from error

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes, or some where `n` is None; so libp2p's limit of a hundred partial reads is never met."""
        return await read_bounded(self._receive, n, self.allowance)

    async def _receive(self, limit_bytes: int) -> bytes:
        if not self._ahead:
            try:
                self._ahead = await self._stream.receive_some(max(limit_bytes, READ_AHEAD_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError("the connection is closed", transport="tcp") from error
        data, self._ahead = self._ahead[:limit_bytes], self._ahead[limit_bytes:]
        return data

    def sever(self) -> None:
        """Close the socket now; whoever waits on it gets an error."""
        self._stream.socket.close()

    @property
    def closed(self) -> bool:
        return self._stream.socket.fileno() == -1

    async def close(self) -> None:
        self.sever()

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return host, port

    @property
    def own_host(self) -> str | None:
        """The IP address of this end."""
        try:
            return str(self._stream.socket.getsockname()[0]).removeprefix("::ffff:")
        except OSError:
            return None


async def read_bounded(receive: Callable[[int], Awaitable[bytes]], n: int | None, allowance: Allowance) -> bytes:
    """Receive exactly `n` bytes, or some where that is None. Raises ConnectionClosedError at the end of the connection,
    and for more than may be sent."""
    if n is not None and n > READ_LIMIT_BYTES:
        raise ConnectionClosedError(f"{n} bytes are announced at once")
    buffer = bytearray()
    try:
        while not buffer or (n is not None and len(buffer) < n):
            data = await receive(READ_LIMIT_BYTES if n is None else n - len(buffer))
            if not data:
                raise ConnectionClosedError("the peer closed the connection")
            buffer += data
            is_enough = n is None or len(buffer) == n
            if not allowance.counts(len(data)) or not (is_enough or allowance.wait(len(buffer))):
                raise ConnectionClosedError("the peer sends more than there is room for")
        return bytes(buffer)
    finally:
        allowance.wait(0)


def _tune(stream: trio.SocketStream) -> None:
    """Set the options that find a dead peer, as far as the platform has them, and the connection is not over yet."""
    with contextlib.suppress(OSError):  # some systems take none for a connection that was reset
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


class Secured:
    """A secured connection of which every read waits for its `turn`, where that is set, and heads of small frames for
    theirs, and of any frame of a stream that is not open.

    pinged: called with each ping that comes, None, and each answer to one, by its number.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.why_ended = ""
        self.turn: Callable[[], Awaitable[None]] | None = None
        self.small_frame: Callable[[], Awaitable[None]] | None = None
        self.is_open: Callable[[int], bool] = lambda stream: True
        self.pinged: Callable[[int | None], None] = lambda number: None
        self.heard_at = trio.current_time()

    async def read(self, n: int) -> bytes:
        """The head of a frame, in its turn: until then it stays where it came, in the system's buffers for the most."""
        head = b""
        while len(head) < n:  # it may come in pieces
            piece = await self.read_body(n - len(head))
            if not piece:
                return head  # of a connection that ends
            head += piece
        _, kind, flags, stream, length = struct.unpack(YAMUX_HEADER_FORMAT, head)
        carries_much = kind == TYPE_DATA and length >= SMALL_FRAME_BYTES and self.is_open(stream)
        if self.small_frame is not None and not carries_much:
            await self.small_frame()
        if kind == TYPE_PING:
            self.pinged(length if flags & FLAG_ACK else None)
        return head

    async def read_body(self, n: int) -> bytes:
        """Read from the connection, in its turn."""
        if self.turn is not None:
            await self.turn()
        try:
            data: bytes = await self._connection.read(n)
        except FOREIGN_ERRORS as error:
            self.note_end(str(error))
            raise
        self.heard_at = trio.current_time()
        return data

    def note_end(self, why: str) -> None:
        """Note why the connection ends; what is said first counts, for the rest follows from it."""
        self.why_ended = self.why_ended or why

    @property
    def decrypted_bytes(self) -> int:
        """Number of bytes that were decrypted and are read next."""
        session = self._connection
        return int(getattr(session, "high_watermark", 0) - getattr(session, "low_watermark", 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _Stream(YamuxStream):  # type: ignore[misc]
    """libp2p's, whose sender is told once CREDIT_BYTES were read: where little is said, that is never.

    libp2p looks after every read, and doubles the window, a frame for each: three on a stream of two messages.
    """

    _read_bytes = 0

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        self._read_bytes += bytes_read
        if self._read_bytes >= CREDIT_BYTES:
            read_bytes, self._read_bytes = self._read_bytes, 0
            await super()._auto_tune_and_send_window_update(bytes_read=read_bytes)


yamux.YamuxStream = _Stream  # looked up there by name


class Muxer(Yamux):  # type: ignore[misc]
    """yamux whose frames are whole whatever is cancelled, with a heartbeat and a bound on unread bytes."""

    def __init__(self, secured_conn: Any, peer_id: ID, *, is_initiator: bool, memory: Memory | None = None) -> None:
        super().__init__(Secured(secured_conn), peer_id, is_initiator=is_initiator)
        self._unread = Allowance(memory)
        self._unread.known(PeerId(str(peer_id)))
        self.secured_conn.is_open = self.streams.__contains__
        self.began_at = trio.current_time()
        """When its handshake began; whoever shook hands says so."""
        self.opened_at = math.inf
        """When both ends were agreed that there is this connection."""
        # Of two ends one asks, and the other has heard of it then: it asks only if that one does not.
        self._silence_s = HEARTBEAT_INTERVAL_S if is_initiator else 1.5 * HEARTBEAT_INTERVAL_S
        self._begun = False
        self._answered = False
        self._ping_id = 0
        self._settled = trio.Event()  # the far end answered, or the connection is over
        self._pings: deque[bytes] = deque(maxlen=PINGS_WAITING_LIMIT)
        self._pings_wait = trio.Event()

    async def confirm(self) -> None:
        """Wait until the far end's muxer answers, which it does only once that side has accepted us."""
        await self._settled.wait()
        if not self._answered:
            raise SwarmException(f"{self.peer_id} refused the connection")

    async def start(self) -> None:
        """Run until the connection ends, and always leave it cleaned up. A second start does nothing."""
        if self._begun:
            return
        self._begun = True
        try:
            await super().start()
        finally:
            self._unread.wait(0)
            self._settled.set()
            if not self.event_closed.is_set():
                with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                    await self._cleanup_on_error()

    @property
    def why_ended(self) -> str:
        """Why the connection ended, as far as it was said."""
        return str(self.secured_conn.why_ended)

    def take_turns(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Wait for this before every read from now on."""
        self.secured_conn.turn = turn

    def pace(self, small_frame: Callable[[], Awaitable[None]]) -> None:
        """Wait for this after the head of every frame that carries little from now on."""
        self.secured_conn.small_frame = small_frame

    def on_ping(self, pinged: Callable[[int | None], None]) -> None:
        """Call this with each ping that comes from now on, None, and each answer to one, by its number."""
        self.secured_conn.pinged = pinged

    def ping(self, number: int) -> None:
        """Ask whether the far end is there; its answer has the number (32 bits). Never waits."""
        self._ping_sent_time = trio.current_time()
        self._owe(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, number))

    def _owe(self, frame: bytes) -> None:
        self._pings.append(frame)
        self._pings_wait.set()

    async def _write_pings(self) -> None:
        """Write pings and answers, until cancelled or the connection breaks.

        Whoever reads does not: where neither end read on before it has written, neither would.
        """
        try:
            while True:
                await self._pings_wait.wait()
                self._pings_wait = trio.Event()
                while self._pings:
                    await self._write_whole(self._pings.popleft())
        except FOREIGN_ERRORS:
            return  # the reading side sees the same break and cleans up

    async def _write_frame(self, data: bytes) -> None:
        if len(data) == HEADER_SIZE:
            _, kind, flags, _, _ = struct.unpack(YAMUX_HEADER_FORMAT, data)
            if kind == TYPE_PING and flags & FLAG_ACK:
                self._owe(data)
                return
        await self._write_whole(data)

    async def _write_whole(self, data: bytes) -> None:
        await self._begin_frame()
        try:
            now = trio.current_time()
            timeout_s = trio.current_effective_deadline() - now
            timeout_s = min(max(timeout_s, FRAME_GRACE_S), FRAME_STALL_DEADLINE_S)
            with trio.CancelScope(deadline=now + timeout_s, shield=True) as scope:
                await self.secured_conn.write(data)
            if scope.cancelled_caught:
                # Part of an encrypted frame may be out: nothing after it could be read.
                raise await self._ended(f"took no data for {timeout_s:.1f} s")
        finally:
            self._write_lock.release()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _begin_frame(self) -> None:
        """Acquire the right to write; at once where nobody has it, for others have their turn while it is written."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._write_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._write_lock.acquire()

    async def _read_data_body(self, length: int) -> bytes:
        """A frame's body, piece by piece: what is announced and does not come takes no room."""
        body = bytearray()
        with trio.fail_after(FRAME_BODY_DEADLINE_S):
            while len(body) < length:
                body += await self.secured_conn.read_body(min(length - len(body), READ_LIMIT_BYTES))
                if not self._has_room(len(body)):
                    raise await self._ended("sends more than there is room for")
        return bytes(body)

    async def _ended(self, why: str) -> ConnectionClosedError:
        """The error to raise, with the connection closed, of which the peer is the reason."""
        self.secured_conn.note_end(f"the peer {why}")
        await self.secured_conn.close()
        return ConnectionClosedError(f"{self.peer_id} {why}")

    def _has_room(self, body_bytes: int) -> bool:
        """Count what waits on this connection, such a body of a frame included; whether there is room for it."""
        in_streams = sum(map(len, self.stream_buffers.values()))
        return self._unread.wait(body_bytes + in_streams + self.secured_conn.decrypted_bytes)

    async def read_stream(self, stream_id: int, n: int = -1) -> bytes:
        """Read what a stream has received, which then counts as unread no more."""
        data: bytes = await super().read_stream(stream_id, n)
        self._unread.read(len(data))
        return data

    async def _measure_rtt_loop(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_pings)
            await self._keep_beating()
            nursery.cancel_scope.cancel()

    async def _keep_beating(self) -> None:
        """Ping at once, and whenever nothing came for long; close the connection to a peer that does not answer."""
        try:
            while not self.event_shutting_down.is_set():
                self._ping_id = (self._ping_id + 1) & 0xFFFF_FFFF
                self._ping_event = answer = trio.Event()
                self._ping_sent_time = trio.current_time()
                await self._write_frame(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, self._ping_id))
                with trio.move_on_after(HEARTBEAT_DEADLINE_S) as waiting:
                    await answer.wait()
                if waiting.cancelled_caught:
                    await self._ended(f"answered no heartbeat for {HEARTBEAT_DEADLINE_S:g} s")
                    return
                self._answered = True
                self._settled.set()
                await self._until_silent()
        except FOREIGN_ERRORS:
            return  # the reading side sees the same break and cleans up

    async def _until_silent(self) -> None:
        """Return when nothing has come for long, or the connection is over."""
        while not self.event_shutting_down.is_set():
            self._has_room(0)  # what streams held that were reset is counted no longer
            silent_at = self.secured_conn.heard_at + self._silence_s
            if trio.current_time() >= silent_at:
                return
            with trio.move_on_at(silent_at):
                await self.event_shutting_down.wait()
