"""hypercorn on sockets that cannot hold up the node: so many connections, none of which waits for its reader for long.

hypercorn finishes what it sends whatever happens, so that a browser that does not read would keep a daemon from ending.
Here a connection that takes nothing for `SEND_DEADLINE_S` is broken, and all are closed when serving is cancelled.

    open ──(a whole request is here)──► answering ──(it is answered)──► open …

Where there is no room for another connection, the one that has been open the longest without a whole request gives way.
So whoever sends half a request, or none, keeps nobody from the page; only answers under way can fill it. And it is
HTTP/1.1 alone that is spoken: in HTTP/2 it is for the client to say how much of an answer may be sent, and while it
says nothing no deadline of a connection runs.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import h11
import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, ConnectionState, Scope
from hypercorn.utils import wrap_app

CONNECTION_LIMIT = 64
SEND_DEADLINE_S = 10.0
IDLE_DEADLINE_S = 15.0
HEADERS_LIMIT_BYTES = 16 << 10
BODY_LIMIT_BYTES = 16 << 10

logger = logging.getLogger(__name__)


class Client(NamedTuple):
    """The other end of a connection: no two have the same at a time."""

    host: str
    port: int


async def serve(
    app: ASGIFramework,
    listening: socket.socket,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI application over HTTP until cancelled; closes `listening`.

    Raises nothing for what a client does: trouble with one connection is logged and ends that connection.
    Cancellation: all connections are closed.
    """
    config = Config()
    config.errorlog = logger
    config.accesslog = None
    config.keep_alive_timeout = IDLE_DEADLINE_S
    config.h11_max_incomplete_size = HEADERS_LIMIT_BYTES
    config.include_server_header = False
    connections = _Connections(app, config)
    listening.setblocking(False)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.close_in_the_end)
        nursery.start_soon(partial(trio.serve_listeners, connections.serve, [listener]))
        task_status.started()


class _Connections:
    """All open connections."""

    def __init__(self, app: ASGIFramework, config: Config) -> None:
        self._app = wrap_app(_Noting(app, self._answering), BODY_LIMIT_BYTES, "asgi")
        self._config = config
        self._open: dict[Client, _Connection] = {}
        """By the other end's address; whoever began to wait for a request last is last."""

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Raises Cancelled only."""
        try:
            client = Client(*stream.socket.getpeername()[:2])
        except OSError:  # gone again
            client = None
        if client is None or not self._has_room():
            await trio.aclose_forcefully(stream)
            return
        self._open[client] = connection = _Connection(stream)
        try:
            await _Server(self._app, self._config, WorkerContext(None), ConnectionState({}), connection)  # type: ignore[arg-type]
        except Exception:  # the boundary: whatever one client brings about ends its connection and no other
            logger.exception("a connection to the page failed")
        finally:
            if self._open.get(client) is connection:
                del self._open[client]
            connection.close()

    def _has_room(self) -> bool:
        """True if there may be one more connection, for which another is closed if need be."""
        if len(self._open) < CONNECTION_LIMIT:
            return True
        waiting = next((client for client, connection in self._open.items() if not connection.answers), None)
        if waiting is None:
            return False
        self._open.pop(waiting).close()
        return True

    @contextmanager
    def _answering(self, client: Client) -> Iterator[None]:
        """Keep a connection open while a request of it is answered."""
        connection = self._open.get(client)
        if connection is None:  # it gave way this moment
            yield
            return
        connection.answers += 1
        try:
            yield
        finally:
            connection.answers -= 1
            if self._open.get(client) is connection:
                self._open[client] = self._open.pop(client)

    async def close_in_the_end(self) -> None:
        """Wait to be cancelled, and close them all then."""
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._open.values():
                connection.close()


class _Server(TCPServer):
    """hypercorn's server of one connection, which no client takes to HTTP/2."""

    async def _read_data(self) -> None:
        made = self.protocol
        made.protocol = _Http11(
            made.app,
            made.config,
            made.context,
            made.task_group,
            made.state,
            made.ssl,
            made.client,
            made.server,
            made.send,
        )
        await super()._read_data()


class _Http11(H11Protocol):
    """hypercorn's HTTP/1.1, that a request's wish for another protocol does not end."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Stay with it: whoever begins in HTTP/2 is answered that this is no request."""


class _Noting:
    """Application that notes which client's request it answers."""

    def __init__(self, app: ASGIFramework, answering: Callable[[Client], AbstractContextManager[None]]) -> None:
        self._app = app
        self._answering = answering

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        host, port = ("", 0) if scope["type"] == "lifespan" else scope["client"] or ("", 0)
        with self._answering(Client(host, port)):
            await self._app(scope, receive, send)


class _Connection:
    """A stream as hypercorn uses it, that breaks when its other end does not read. answers: how many are under way."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self.answers = 0

    async def receive_some(self, limit_bytes: int) -> bytes | bytearray:
        return await self._stream.receive_some(limit_bytes)

    async def send_all(self, data: bytes) -> None:
        """Raises BrokenResourceError also when nobody takes it in time."""
        with trio.move_on_after(SEND_DEADLINE_S) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            self.close()
            raise trio.BrokenResourceError("it does not read what it asked for")

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        """Close at once, also while others wait for it: they see ClosedResourceError."""
        self.socket.close()
