"""Control socket of the node: commands on the same machine reach it this way, and nobody else.

Whoever may open the socket may stop the node, so it belongs to its user alone (mode 0600, set before anyone can
connect). `control_client` says where it lies and what travels on it. A connection may carry several requests, one
after the other; whatever is sent on it, the worst that follows is that this one connection ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import trio

from shoal.node.control_client import (
    POINTER_NAME,
    REQUEST_LIMIT_BYTES,
    SOCKET_NAME,
    SOCKET_PATH_LIMIT_BYTES,
    JsonValue,
    socket_path,
)
from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.errors import ConfigError, ShoalError, StorageError
from shoal.protocol.private_folder import make_private

CONNECTION_LIMIT = 16  # to the control socket
IDLE_DEADLINE_S = 10.0
HANDLER_DEADLINE_S = 30.0
SEND_DEADLINE_S = 10.0
_BACKLOG = 16
_PARTIAL_SUFFIX = ".new"
_FOLDER_PREFIX = "shoal-"

Handler = Callable[[], Awaitable[Mapping[str, JsonValue]]]
Order = Callable[[Sequence[str]], Awaitable[Mapping[str, JsonValue]]]
"""A handler of an op that takes arguments."""

log = logging.getLogger(__name__)


class _Request(msgspec.Struct, frozen=True):
    op: str
    arguments: tuple[str, ...] = ()


class _BadRequest(Exception):
    """Reason to refuse a line; the connection may go on."""


class ControlServer:
    """Answers requests on the data folder's control socket with one handler, or order, per op.

    A handler takes nothing, an order the request's arguments; both return what the reply says beside `ok`. They may
    raise ShoalError, whose text becomes the reply's error. Those of different connections run at the same time.
    """

    def __init__(
        self, data_dir: Path, handlers: Mapping[str, Handler], orders: Mapping[str, Order] | None = None
    ) -> None:
        self._data_dir = data_dir
        self._handlers = dict(handlers)
        self._orders = dict(orders or {})
        self._slots = trio.CapacityLimiter(CONNECTION_LIMIT)

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; tells the socket's path once it can be connected to.

        Raises ConfigError if another process answers for this folder, StorageError if the socket cannot be made.
        Cancellation: open connections end, the socket and its pointer are removed.
        """
        with _bound(self._data_dir) as (listening, path):
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
            task_status.started(path)
            await trio.serve_listeners(self._serve, [listener])

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Raises nothing but Cancelled."""
        async with stream:
            try:
                self._slots.acquire_on_behalf_of_nowait(stream)
            except trio.WouldBlock:
                with contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
                    await _send(stream, {"ok": False, "error": "the node has too many requests at once; try again"})
                return
            try:
                await self._answer_requests(stream)
            except (trio.BrokenResourceError, trio.TooSlowError):
                log.debug("a control connection ended early")
            except Exception:  # the boundary: a bug in one handler must not stop the node
                log.exception("a control request failed")
            finally:
                self._slots.release_on_behalf_of(stream)

    async def _answer_requests(self, stream: trio.SocketStream) -> None:
        received = bytearray()
        while True:
            with trio.fail_after(IDLE_DEADLINE_S):
                line = await _receive_line(stream, received)
            if line is None:
                return
            try:
                reply: Mapping[str, JsonValue] = {**await self._handle(line), "ok": True}
            except (_BadRequest, ShoalError) as error:
                reply = {"ok": False, "error": str(error)}
            except trio.TooSlowError:
                reply = {"ok": False, "error": f"the node did not finish this in {HANDLER_DEADLINE_S:g} s"}
            except Exception:
                await _send(stream, {"ok": False, "error": "a bug in the node, see its log"})
                raise
            await _send(stream, reply)

    async def _handle(self, line: bytes) -> Mapping[str, JsonValue]:
        try:
            asked = msgspec.json.decode(line, type=_Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _BadRequest('a request is one line of JSON such as {"op":"status"}') from None
        handler, order = self._handlers.get(asked.op), self._orders.get(asked.op)
        if handler is None and order is None:
            known = ", ".join(sorted(self._handlers.keys() | self._orders.keys()))
            raise _BadRequest(f"unknown op {asked.op[:64]!r}; this node knows {known}")
        with trio.fail_after(HANDLER_DEADLINE_S):
            if order is not None:
                return await order(asked.arguments)
            assert handler is not None
            return await handler()


async def _receive_line(stream: trio.SocketStream, received: bytearray) -> bytes | None:
    """The next line out of `received` and what follows it on the stream; None at its end or for an endless line."""
    while b"\n" not in received:
        if len(received) > REQUEST_LIMIT_BYTES:
            await _send(stream, {"ok": False, "error": f"a request has at most {REQUEST_LIMIT_BYTES} bytes"})
            return None
        part = await stream.receive_some(REQUEST_LIMIT_BYTES)
        if not part:
            return None
        received += part
    line, _, rest = bytes(received).partition(b"\n")
    received[:] = rest
    return line


async def _send(stream: trio.SocketStream, reply: Mapping[str, JsonValue]) -> None:
    with trio.fail_after(SEND_DEADLINE_S):
        await stream.send_all(msgspec.json.encode(reply) + b"\n")  # NaN becomes null


@contextlib.contextmanager
def _bound(data_dir: Path) -> Iterator[tuple[socket.socket, Path]]:
    """A listening socket that only this user can connect to, at a path where clients look; removed on exit."""
    with contextlib.ExitStack() as undo:
        with disk_errors(data_dir):
            make_private(data_dir)
            _retire_predecessor(data_dir)
            path = data_dir.absolute() / SOCKET_NAME
            if not _fits(path):
                path = _private_folder(undo) / SOCKET_NAME
                undo.callback(_remove, data_dir / POINTER_NAME)
                write_atomically(data_dir / POINTER_NAME, os.fsencode(path))
            listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listen_privately(listening, path, undo)
        yield listening, path


def listen_privately(listening: socket.socket, path: Path, undo: contextlib.ExitStack) -> None:
    """Bind a socket of this user's alone to `path`, until `undo` unwinds.

    It is bound under another name first: under its own, it is private and listening from the first moment.
    """
    partial = path.with_name(path.name + _PARTIAL_SUFFIX)
    _remove(partial)
    undo.callback(_remove, partial)
    listening.bind(str(partial))
    partial.chmod(0o600)
    listening.listen(_BACKLOG)
    partial.rename(path)
    undo.callback(_remove, path)


def _remove(path: Path) -> None:
    """Unlink a file or remove a folder, if it is there and can be."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) + len(_PARTIAL_SUFFIX) <= SOCKET_PATH_LIMIT_BYTES


def _private_folder(undo: contextlib.ExitStack) -> Path:
    """A new folder (0700) with a short path, gone again when `undo` unwinds."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if not parent or not _fits(Path(parent) / f"{_FOLDER_PREFIX}xxxxxxxx" / SOCKET_NAME):
            continue
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
            undo.callback(_remove, folder)
            return folder
    raise StorageError("no folder for the control socket has a path short enough; choose a shorter --data-dir")


def _retire_predecessor(data_dir: Path) -> None:
    """Remove what a node that died left behind. Raises ConfigError if it is alive."""
    path = socket_path(data_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise ConfigError(
            f"a node is already running on {data_dir}; stop it with "
            f"`shoal leave --data-dir {shlex.quote(str(data_dir))}` or choose another --data-dir"
        )
    if path.is_socket():
        _remove(path)
        if path.parent.name.startswith(_FOLDER_PREFIX) and path.parent != data_dir.absolute():
            _remove(path.parent)
    _remove(data_dir / POINTER_NAME)
