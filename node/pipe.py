"""Framed messages between the processes of one user: what every pipe carries, and the end of it that is not trio's.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one tagged struct. Both ends run code of one
installation, yet every frame is bounded and converted strictly, so a confused process shows up as a clear error and not
as a wrong number. Which messages there are is said beside whom they are for (`trainer_messages`, `rank_messages`,
`loop_messages`, `agent_messages`); those that every child of the daemon knows are here. The daemon's end is
`child_process`. This module does not import torch.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from shoal.node.own_frames import own_place, own_traceback
from shoal.protocol.errors import ConfigError, LocalError

FRAME_LIMIT_BYTES = 4 << 20
TRACEBACK_LIMIT_CHARS = 16_000
SUMMARY_LIMIT_CHARS = 500
ORDER_QUEUE_LIMIT = 256
READ_BYTES = 64 << 10
LENT_LIMIT = 8
"""Descriptors that are taken with one read; the kernel gives those of one message at a time."""
EXIT_ORPHANED = 3
EXIT_CONFUSED = 4
EXIT_FAILED = 5
EXIT_RANK_DIED = 6
"""Exit code of a child that exits because another process of its own has died."""
SEVERITIES = {logging.ERROR: "<3>", logging.WARNING: "<4>"}
"""How a line on stderr says that it is more than what was printed.

Source: sd-daemon(3).
"""

_LENGTH = struct.Struct(">I")

Order = TypeVar("Order")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything on a pipe; the struct's name is its tag."""


class Pause(Message, frozen=True, kw_only=True):
    """Order to leave the accelerator alone after the current step."""


class Resume(Message, frozen=True, kw_only=True):
    """Order to go on with what `Pause` interrupted."""


class Stop(Message, frozen=True, kw_only=True):
    """Order to exit cleanly at the next step boundary."""


class Failed(Message, frozen=True, kw_only=True):
    """Report that the user's code raised, or (`configuration`) cannot be had as named. The process exits after this."""

    summary: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)]
    traceback: Annotated[str, Meta(max_length=TRACEBACK_LIMIT_CHARS)]
    configuration: bool = False


def frame_of(message: Message) -> bytes:
    """Frame a message. Raises `LocalError` if it is over `FRAME_LIMIT_BYTES`."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > FRAME_LIMIT_BYTES:
        raise LocalError(f"{type(message).__name__} of {len(payload)} bytes, over {FRAME_LIMIT_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def unpacker(of: Any, what: str) -> Callable[[bytes], Any]:
    """Return what decodes a frame as `of`, a message or a union of them. what: that it should be, with its article.

    It raises `LocalError` if the frame is something else.
    """
    decoder = msgspec.msgpack.Decoder(of)

    def unpack(frame: bytes) -> Any:
        try:
            return decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LocalError(f"not {what}: {error}") from error

    return unpack


class Framing:
    """Cuts a byte stream into frames; bytes in, whole payloads out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every frame that `data` completes.

        Raises `LocalError` on a frame over `FRAME_LIMIT_BYTES`; the stream is then of no further use.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_LIMIT_BYTES:
                raise LocalError(f"control frame of {length} bytes, over {FRAME_LIMIT_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield frame


def limit_sends(connection: socket.socket, seconds: int) -> None:
    """Have what is sent over it raise OSError if the other end takes nothing for so long; who reads waits on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


class FrameSocket:
    """Frames over a connected socket; one thread receives, any sends.

    lends: whether the other end lends files, whose descriptors come with frames (`take_descriptor`).
    """

    def __init__(self, connection: socket.socket, *, lends: bool = False) -> None:
        self.connection = connection
        self._lends = lends
        self._lent: deque[int] = deque()
        self._sending = threading.Lock()
        self._framing = Framing()
        self._frames: deque[bytes] = deque()

    def send(self, message: Message) -> None:
        """Send it whole. Raises OSError where the other end is gone, LocalError for a message that is too long."""
        data = frame_of(message)
        with self._sending:
            self.connection.sendall(data)

    def receive(self) -> bytes | None:
        """Wait for the next frame; None at the end of the stream. Raises OSError, LocalError."""
        while not self._frames:
            data = self._read()
            if not data:
                return None
            self._frames.extend(self._framing.feed(data))
        return self._frames.popleft()

    def take_descriptor(self) -> int:
        """Return the descriptor that came first of those that are left, which the caller closes.

        From any thread. Raises LocalError if there is none.
        """
        try:
            return self._lent.popleft()
        except IndexError:
            raise LocalError("a file was to come with a message, and did not") from None

    def close(self) -> None:
        """Close the socket, and what came and was not taken; a thread that still sends gets an OSError."""
        self.connection.close()
        while self._lent:
            os.close(self._lent.popleft())

    def _read(self) -> bytes:
        if not self._lends:
            return self.connection.recv(READ_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self.connection, READ_BYTES, LENT_LIMIT)
        self._lent.extend(descriptors)
        return data


class ParentPipe(Generic[Order]):
    """A child's end of the pipe to its parent: sends from any thread, reads in its own.

    A parent that is gone (end of stream) ends the process at once, even in the middle of a long step: nothing that the
    daemon started is ever an orphan. Ctrl-C is the parent's to interpret, and does not reach this process.
    """

    def __init__(
        self,
        descriptor: int,
        unpack: Callable[[bytes], Order],
        *,
        who: str,
        queued: int = ORDER_QUEUE_LIMIT,
        lends: bool = False,
    ) -> None:
        """Read orders from an inherited socket from now on. who: names the process where it has to complain.

        lends: see `FrameSocket`.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _log_to_parent()
        self._socket = FrameSocket(socket.socket(fileno=descriptor), lends=lends)
        self._unpack = unpack
        self._who = who
        self._orders: queue.Queue[Order] = queue.Queue(queued)
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a report; a parent that is gone ends the process."""
        try:
            self._socket.send(message)
        except OSError:
            os._exit(EXIT_ORPHANED)

    def receive(self) -> Order:
        """Wait for the next order."""
        return self._orders.get()

    def receive_nowait(self) -> Order | None:
        """Return the next order, or None if there is none yet."""
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def take_descriptor(self) -> int:
        """Return the descriptor that came with an order that was just received; the caller closes it."""
        return self._socket.take_descriptor()

    def take(self, order: Order) -> None:
        """Queue what was read. Called in the reading thread, so that an order can have its effect at once."""
        self._orders.put_nowait(order)

    def _read(self) -> None:
        try:
            while (frame := self._socket.receive()) is not None:
                self.take(self._unpack(frame))
        except OSError:
            pass
        except Exception as error:  # whatever it is: nobody reads orders after it
            logging.error("%s: the daemon's orders cannot be followed: %s", self._who, one_line(error))
            os._exit(EXIT_CONFUSED)
        os._exit(EXIT_ORPHANED)


class _OneLine(logging.Formatter):
    """One line a record, whatever is in it, with its severity."""

    def format(self, record: logging.LogRecord) -> str:
        severity = SEVERITIES.get(record.levelno, "")
        return f"{severity}{' '.join(record.getMessage().split())}"


def _log_to_parent() -> None:
    """Have what this process logs go to stderr, from where the parent logs it; a process with handlers keeps them."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler])


def one_line(error: BaseException) -> str:
    """Describe an exception in one bounded line, as the last line of its traceback would."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split())[:SUMMARY_LIMIT_CHARS]


def describe(error: Exception) -> Failed:
    """Turn an exception into what a person is shown: one line, and the user's own frames that it came through.

    One that came through none is Shoal's to explain, by its whole traceback; of a ConfigError the line says all.
    """
    if isinstance(error, ConfigError):
        text = "" if error.__cause__ is None else own_traceback(error.__cause__)
        return Failed(
            summary=str(error)[:SUMMARY_LIMIT_CHARS], traceback=text[-TRACEBACK_LIMIT_CHARS:], configuration=not text
        )
    summary, text = one_line(error), own_traceback(error)
    if text:
        remedy = f"{own_place(error.__traceback__)}; correct it, and start this node again: it goes on where it was"
        summary = f"{summary[: SUMMARY_LIMIT_CHARS - len(remedy)]}{remedy}"
    text = text or "".join(traceback.format_exception(error))
    return Failed(summary=summary[:SUMMARY_LIMIT_CHARS], traceback=text[-TRACEBACK_LIMIT_CHARS:])
