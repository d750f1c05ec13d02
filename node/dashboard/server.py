"""hypercorn on sockets that cannot hold up the node: so many connections, none of which waits for its reader for long.

hypercorn finishes what it sends whatever happens, so that a browser that does not read would keep a daemon from ending.
Here a connection that takes nothing for `SEND_DEADLINE_S` is broken, and all are closed when serving is cancelled.
"""

from __future__ import annotations

import logging
import socket
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

CONNECTION_LIMIT = 64
SEND_DEADLINE_S = 10.0
IDLE_DEADLINE_S = 15.0
HEADERS_LIMIT_BYTES = 16 << 10
BODY_LIMIT_BYTES = 16 << 10

logger = logging.getLogger(__name__)


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
        self._app = wrap_app(app, BODY_LIMIT_BYTES, "asgi")
        self._config = config
        self._open: set[_Connection] = set()

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection to its end. Raises Cancelled only."""
        if len(self._open) >= CONNECTION_LIMIT:
            await trio.aclose_forcefully(stream)
            return
        connection = _Connection(stream)
        self._open.add(connection)
        try:
            await TCPServer(self._app, self._config, WorkerContext(None), ConnectionState({}), connection)  # type: ignore[arg-type]
        except Exception:  # the boundary: whatever one client brings about ends its connection and no other
            logger.exception("a connection to the page failed")
        finally:
            self._open.discard(connection)
            connection.close()

    async def close_in_the_end(self) -> None:
        """Wait to be cancelled, and close them all then."""
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._open:
                connection.close()


class _Connection:
    """A stream as hypercorn uses it, that breaks when its other end does not read."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

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
        """At once, also while others wait for it: they see ClosedResourceError."""
        self.socket.close()
