"""Messages over one libp2p stream, cancel-safe both ways; and the bounded mailbox that events wait in.

A libp2p stream moves bytes, loses some when a read is cancelled, and ends the same way whether its peer
closed it, reset it or was killed. So a `MessageStream` does three things:

* **One pump reads.** Whoever wants a message waits on our own buffer; cancelling that wait touches no socket.
* **A write is whole.** It runs under a lock and a shield, so a cancelled sender never leaves half a message.
* **Every message carries its length.** An end inside a message is a fault, and so is a length over the limit.

    message = length (4 bytes, big-endian) ‖ that many bytes

Nothing here knows libp2p: `RawStream` is what the adapter provides and what the tests fake.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import trio

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId

MESSAGE_LIMIT_BYTES = 4 << 20  # one message on a control stream
READ_BYTES = 64 << 10
# The pump stops reading when this much is unread and not needed to complete the message in front.
BACKLOG_LIMIT_BYTES = 256 << 10
# After we have closed our side, how long the far end may take to close its own before we reset the stream.
LINGER_DEADLINE_S = 5.0
# How long saying goodbye (a FIN or a reset) may take before it is given up.
FAREWELL_DEADLINE_S = 2.0

LENGTH_BYTES = 4
RECEIVED_LIMIT_MESSAGES = 64
"""Taken at once; then others have their turn."""

T = TypeVar("T")


class StreamEnded(NetworkError):
    """The far end closed its side between two messages.

    Not a proof that it was done: a killed process looks the same. A protocol that needs to know says so in a message.
    """


class RawStream(Protocol):
    """The byte stream under a `MessageStream`. Every method raises NetworkError where the stream is broken."""

    async def read(self, limit_bytes: int) -> bytes:
        """At least one byte and at most `limit_bytes`; empty at the end. Cancelling it may lose bytes."""

    async def write(self, data: bytes) -> None:
        """All of `data`. Cancelling it may leave a part written."""

    async def finish(self) -> None:
        """Close our side; the far end may still send."""

    async def reset(self) -> None:
        """Drop the stream in both directions, at once."""


class Memory(Protocol):
    """Bounds the bytes that wait to be read."""

    def take(self, peer: PeerId, size: int) -> bool:
        """Make room for bytes of a peer; False if there is none."""

    def free(self, peer: PeerId, size: int) -> None:
        """They were read, or dropped."""


class Traffic:
    """Payload bytes of control messages that passed, summed over a host's streams and gossip."""

    __slots__ = ("bytes_received", "bytes_sent")

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0


class MessageStream:
    """Messages to and from `peer`. `send` and `receive` may run at once, each from any number of tasks."""

    def __init__(
        self,
        raw: RawStream,
        *,
        peer: PeerId,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        traffic: Traffic | None = None,
        memory: Memory | None = None,
        over: object | None = None,
    ) -> None:
        """over: what carries the stream, to be told from what takes its place."""
        self.peer = peer
        self.over = over
        self._memory = memory
        self._raw = raw
        self._limit_bytes = limit_bytes
        self._traffic = traffic or Traffic()
        self._buffer = bytearray()
        self._ended = ""  # why no more bytes will come; empty while they may
        self._closing = trio.Event()  # we have closed our side, or are about to
        self._write_lock = trio.Lock()
        self._receivers = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._done = trio.Event()

    async def run(self) -> None:
        """Read until the stream ends; whoever made the stream runs this in a nursery it owns.

        Returns when both sides have closed, when the stream broke, or after `abort`. On return the stream is
        released below. Cancellation resets the stream; messages that are complete can still be received.
        """
        clean = False
        try:
            with self._scope:
                clean = await self._pump()
        finally:
            self._end("the stream was closed on this side")
            if self._memory is not None:
                self._memory.free(self.peer, len(self._buffer))
                self._memory = None  # nothing more can come; what is left is read, or goes with the stream
            with trio.move_on_after(FAREWELL_DEADLINE_S, shield=True), contextlib.suppress(NetworkError):
                # Where both sides have closed, `finish` only releases what the connection keeps of the stream.
                await (self._raw.finish() if clean else self._raw.reset())
            self._done.set()

    async def send(self, message: bytes, *, deadline_s: float) -> None:
        """Send one message, whole.

        Raises LocalError for a message over the limit, NetworkError when the stream is closed or broken or the
        deadline passes; if that happens inside the write the stream is reset, since what the peer got is unknown.
        Cancellation: while waiting for another sender nothing was sent; once the write began it is completed
        (within the deadline) and then Cancelled is raised.
        """
        await self.send_all((message,), deadline_s=deadline_s)

    async def send_all(self, messages: Sequence[bytes], *, deadline_s: float) -> None:
        """Send several messages in one write, which costs both ends little more than one message. As `send`."""
        longest = max(map(len, messages))
        if longest > self._limit_bytes:
            raise LocalError(f"a message of {longest} bytes exceeds the limit of {self._limit_bytes}")
        deadline = trio.current_time() + deadline_s
        with trio.CancelScope(deadline=deadline) as waiting:
            await self._write_lock.acquire()
        if waiting.cancelled_caught:
            raise NetworkError(f"{self.peer} did not take the previous message within {deadline_s:g} s")
        try:
            await self._write_whole(messages, deadline, deadline_s)
        finally:
            self._write_lock.release()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _write_whole(self, messages: Sequence[bytes], deadline: float, deadline_s: float) -> None:
        if self._closing.is_set() or self._done.is_set():
            raise NetworkError(self._ended or "the stream was closed on this side")
        with trio.CancelScope(deadline=deadline, shield=True) as writing:
            await self._raw.write(b"".join(len(one).to_bytes(LENGTH_BYTES, "big") + one for one in messages))
        if writing.cancelled_caught:
            self._end("a write timed out")
            self._scope.cancel()
            raise NetworkError(f"{self.peer} did not take a message within {deadline_s:g} s")
        self._traffic.bytes_sent += sum(map(len, messages))

    async def receive(self, *, deadline_s: float | None) -> bytes:
        """The next message; `deadline_s` None waits as long as the stream lives.

        Raises StreamEnded at an end between messages, NetworkError at an end inside one or when the deadline
        passes, RemoteError for a message over the limit. Cancellation loses nothing: the message stays.
        """
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(deadline=_after(deadline_s)) as waiting:
            while (message := self._take()) is None:
                await self._receivers.park()
        # No checkpoint from here on: a message that was taken is returned.
        if waiting.cancelled_caught:
            raise NetworkError(f"nothing from {self.peer} within {deadline_s:g} s")
        assert message is not None
        self._traffic.bytes_received += len(message)
        return message

    async def receive_all(self) -> list[bytes]:
        """The next message and those complete ones that came with it, RECEIVED_LIMIT_MESSAGES at most. As `receive`."""
        messages = [await self.receive(deadline_s=None)]
        with contextlib.suppress(NetworkError, RemoteError):  # what breaks after these is for the next call to say
            while len(messages) < RECEIVED_LIMIT_MESSAGES and (message := self._take()) is not None:
                self._traffic.bytes_received += len(message)
                messages.append(message)
        return messages

    async def aclose(self) -> None:
        """Close our side; the far end has LINGER_DEADLINE_S to close its own, in the background.

        What it sends meanwhile is dropped. Cancellation: closed all the same.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._drop(len(self._buffer))
        with trio.move_on_after(FAREWELL_DEADLINE_S, shield=True) as parting:
            try:
                async with self._write_lock:
                    await self._raw.finish()
            except NetworkError:
                self._scope.cancel()
        if parting.cancelled_caught:
            self._scope.cancel()
        self._scope.deadline = trio.current_time() + LINGER_DEADLINE_S
        self._end("the stream was closed on this side")
        self._room.unpark_all()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def abort(self) -> None:
        """Reset the stream in both directions, and wait until it is gone (bounded). Cancellation: gone all the same."""
        self._closing.set()
        self._drop(len(self._buffer))
        self._end("the stream was aborted on this side")
        self._scope.cancel()
        with trio.move_on_after(FAREWELL_DEADLINE_S + 1, shield=True):
            await self._done.wait()

    async def _pump(self) -> bool:
        """Read into the buffer until the far end closes; true once both sides have closed, in order."""
        while True:
            while len(self._buffer) > self._wanted_bytes() and not self._closing.is_set():
                await self._room.park()
            try:
                data = await self._raw.read(READ_BYTES)
            except NetworkError as error:
                self._end(str(error))
                return False
            if not data:
                self._end(f"{self.peer} closed the stream")
                await self._closing.wait()
                return True
            if self._closing.is_set():
                continue  # lingering: only the end is of interest
            if self._memory is not None and not self._memory.take(self.peer, len(data)):
                self._end("more than this node has room for is waiting to be read")
                return False
            self._buffer += data
            self._receivers.unpark_all()

    def _wanted_bytes(self) -> int:
        """Bytes that may be buffered: the message in front (if its length is allowed), or the backlog limit."""
        front_bytes = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        return max(BACKLOG_LIMIT_BYTES, LENGTH_BYTES + min(front_bytes, self._limit_bytes))

    def _take(self) -> bytes | None:
        """The message in front, None if it is not complete yet. Raises what `receive` says."""
        if len(self._buffer) >= LENGTH_BYTES:
            length_bytes = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if length_bytes > self._limit_bytes:
                self._scope.cancel()
                raise RemoteError(
                    f"a message of {length_bytes} bytes exceeds the limit of {self._limit_bytes}", peer=self.peer
                )
            end = LENGTH_BYTES + length_bytes
            if len(self._buffer) >= end:
                message = bytes(self._buffer[LENGTH_BYTES:end])
                self._drop(end)
                self._room.unpark_all()
                return message
        if not self._ended:
            return None
        if self._buffer:
            raise NetworkError(f"the stream ended inside a message: {self._ended}")
        raise StreamEnded(self._ended)

    def _drop(self, size: int) -> None:
        """The first bytes of the buffer are done with."""
        del self._buffer[:size]
        if self._memory is not None:
            self._memory.free(self.peer, size)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._receivers.unpark_all()


class Mailbox(Generic[T]):
    """A bounded queue from one producer that never waits to one reader; when full, the oldest item is dropped.

    Iterating it ends when the producer has closed it and it is empty.
    """

    def __init__(self, limit_items: int) -> None:
        self.dropped = 0
        self._items: deque[T] = deque()
        self._limit_items = limit_items
        self._closed = False
        self._readers = trio.lowlevel.ParkingLot()

    def put(self, item: T) -> None:
        """Add an item; from the trio thread only."""
        if self._closed:
            return
        if len(self._items) >= self._limit_items:
            self._items.popleft()
            self.dropped += 1
        self._items.append(item)
        self._readers.unpark()

    def close(self) -> None:
        """No more items will come, from either end's point of view; what is queued can still be read."""
        self._closed = True
        self._readers.unpark_all()

    @property
    def closed(self) -> bool:
        return self._closed

    async def receive(self) -> T:
        """The oldest item. Raises trio.EndOfChannel when closed and empty. Cancellation loses nothing."""
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self._closed:
                raise trio.EndOfChannel
            await self._readers.park()
        return self._items.popleft()

    def __aiter__(self) -> Mailbox[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


def _after(deadline_s: float | None) -> float:
    return float("inf") if deadline_s is None else trio.current_time() + deadline_s
