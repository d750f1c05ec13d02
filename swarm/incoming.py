"""Incoming TCP connections before anything is known of who made them.

They are taken in batches: who is refused costs three calls into the system, no task, no line in a log and no
cryptography. After a batch of which anybody was refused there is a pause, in which the system's backlog does the
waiting: connections that come one by one then cost one look for all of them. Where an address has spent its allowance
its connections are left hanging for a while before they are closed, a bounded number of them, without a task: who
comes again as soon as it is turned away then comes less often.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

BATCH = 128
PAUSE_S = 0.05
"""After a batch of which anybody was refused: so no more than BATCH / PAUSE_S are looked at in a second then."""
HANGING_S, HANGING_LIMIT = 5.0, 256
"""So long connections of an address that has spent its allowance hang, and so many; of more the oldest are closed."""
OUT_OF_FILES_S = 0.1
LINGER_NOT = struct.pack("ii", 1, 0)

Handler = Callable[[trio.SocketStream, str], Awaitable[None]]


def plain(host: str) -> str:
    """An IP address without what says that it is IPv4 in IPv6."""
    return host.removeprefix("::ffff:")


async def take_in(
    listeners: Sequence[trio.SocketListener],
    lets_in: Callable[[str], bool],
    handle: Handler,
    *,
    is_spent: Callable[[str], bool] = lambda address: False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handle` with each connection that `lets_in` takes, by its IP address; the rest are reset.

    Each is closed when its `handle` returns, which raises nothing. Runs until cancelled; then all are closed.
    is_spent: asked of who is refused, whether its connection is to hang first.
    """
    async with contextlib.AsyncExitStack() as stack:
        for listener in listeners:
            await stack.enter_async_context(listener)
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_take, listener, lets_in, is_spent, partial(_handle, handle), nursery)
            task_status.started()


async def _handle(handle: Handler, stream: trio.SocketStream, address: str) -> None:
    try:
        await handle(stream, address)
    finally:
        await trio.aclose_forcefully(stream)


class _Hanging:
    """Connections that are refused and not closed yet, the oldest first."""

    def __init__(self) -> None:
        self._connections: deque[tuple[float, socket.socket]] = deque()

    def take(self, connection: socket.socket, now: float) -> None:
        """Have it hang from `now` on."""
        self._connections.append((now + HANGING_S, connection))
        if len(self._connections) > HANGING_LIMIT:
            turn_away(self._connections.popleft()[1])

    def close_due(self, now: float) -> float:
        """Close those whose time is over; when that of the next will be, infinity if there is none."""
        while self._connections and self._connections[0][0] <= now:
            turn_away(self._connections.popleft()[1])
        return self._connections[0][0] if self._connections else math.inf


async def _take(
    listener: trio.SocketListener,
    lets_in: Callable[[str], bool],
    is_spent: Callable[[str], bool],
    handle: Handler,
    nursery: trio.Nursery,
) -> None:
    hanging = _Hanging()
    try:
        with socket.socket(fileno=os.dup(listener.socket.fileno())) as door:
            door.setblocking(False)
            while True:
                with trio.move_on_at(hanging.close_due(trio.current_time())):
                    await trio.lowlevel.wait_readable(door)
                if await _take_batch(door, lets_in, is_spent, handle, nursery, hanging):
                    await trio.sleep(PAUSE_S)
    finally:
        hanging.close_due(math.inf)


async def _take_batch(
    door: socket.socket,
    lets_in: Callable[[str], bool],
    is_spent: Callable[[str], bool],
    handle: Handler,
    nursery: trio.Nursery,
    hanging: _Hanging,
) -> int:
    """Take who is waiting, up to BATCH; how many of them were refused."""
    refused = 0
    for _ in range(BATCH):
        try:
            connection, remote = door.accept()
        except BlockingIOError:
            break
        except ConnectionError:
            continue  # it was gone before it was taken
        except OSError:  # no more files: those that are open have to end first
            hanging.close_due(math.inf)
            await trio.sleep(OUT_OF_FILES_S)
            break
        address = plain(str(remote[0]))
        if lets_in(address):
            connection.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            nursery.start_soon(handle, stream, address)
            continue
        refused += 1
        if is_spent(address):
            hanging.take(connection, trio.current_time())
        else:
            turn_away(connection)
    return refused


def turn_away(connection: socket.socket) -> None:
    """Close a connection such that the system keeps nothing of it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    connection.close()
