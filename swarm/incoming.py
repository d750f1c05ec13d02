"""Incoming TCP connections before anything is known of who made them.

They are taken in batches: who is refused costs a few calls into the system, no task, no line in a log and no
cryptography. After a batch of which anybody was refused there is a pause, in which the system's backlog does the
waiting: connections that come one by one then cost one look for all of them.

Who is refused is left hanging before its connection is closed, without a task: who comes again as soon as it is turned
away then comes less often. An address that has spent its allowance hangs longer; the others may be here for the first
time, and are told soon. As many hang as there are files for; of more the oldest are closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

BATCH = 128
PAUSE_S = 0.05
"""After a batch of which anybody was refused: so no more than BATCH / PAUSE_S are looked at in a second then."""
REFUSED_HANGING_S, SPENT_HANGING_S = 2.0, 30.0
HANGING_LIMIT, HANGING_FILES_SHARE = 1024, 1 / 8
"""Of each kind, so many connections or that share of the files this process may open, at one `take_in`'s listeners."""
HANGING_READ_BYTES = 1
"""The system rounds it up to the least: what a connection that hangs may send into its memory."""
FIRST_BYTES = 16
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
    is_noise: Callable[[bytes], bool] = lambda first: False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handle` with each connection that `lets_in` takes, by its IP address; the rest are reset in a while.

    Each is closed when its `handle` returns, which raises nothing. Runs until cancelled; then all are closed.
    is_spent: asked of who is refused, whether its connection is to hang for SPENT_HANGING_S.
    is_noise: asked of what a connection began with, up to FIRST_BYTES, if that is there when it is taken: whether it is
    nothing that `handle` needs to see.
    """
    hanging_limit = _hanging_limit() // max(1, len(listeners))
    async with contextlib.AsyncExitStack() as stack:
        for listener in listeners:
            await stack.enter_async_context(listener)
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                door = stack.enter_context(socket.socket(fileno=os.dup(listener.socket.fileno())))
                door.setblocking(False)
                nursery.start_soon(
                    _Intake(door, lets_in, is_spent, is_noise, partial(_handle, handle), hanging_limit).run, nursery
                )
            task_status.started()


async def _handle(handle: Handler, stream: trio.SocketStream, address: str) -> None:
    try:
        await handle(stream, address)
    finally:
        await trio.aclose_forcefully(stream)


class _Hanging:
    """Connections that are refused and not closed yet, the oldest first; each hangs for `seconds`."""

    def __init__(self, seconds: float, limit: int) -> None:
        self._seconds, self._limit = seconds, limit
        self._connections: deque[tuple[float, socket.socket]] = deque()

    def take(self, connection: socket.socket, now: float) -> None:
        """Have it hang from `now` on."""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HANGING_READ_BYTES)
        self._connections.append((now + self._seconds, connection))
        if len(self._connections) > self._limit:
            turn_away(self._connections.popleft()[1])

    def close_due(self, now: float) -> float:
        """Close those whose time is over; when that of the next will be, infinity if there is none."""
        while self._connections and self._connections[0][0] <= now:
            turn_away(self._connections.popleft()[1])
        return self._connections[0][0] if self._connections else math.inf


class _Intake:
    """One listener's connections."""

    def __init__(
        self,
        door: socket.socket,
        lets_in: Callable[[str], bool],
        is_spent: Callable[[str], bool],
        is_noise: Callable[[bytes], bool],
        handle: Handler,
        hanging_limit: int,
    ) -> None:
        self._door = door
        self._lets_in, self._is_spent, self._is_noise, self._handle = lets_in, is_spent, is_noise, handle
        self._refused = _Hanging(REFUSED_HANGING_S, hanging_limit)
        self._spent = _Hanging(SPENT_HANGING_S, hanging_limit)

    async def run(self, nursery: trio.Nursery) -> None:
        """Take who comes, until cancelled."""
        try:
            while True:
                with trio.move_on_at(self._close_due(trio.current_time())):
                    await trio.lowlevel.wait_readable(self._door)
                if await self._take_batch(nursery):
                    await trio.sleep(PAUSE_S)
        finally:
            self._close_due(math.inf)

    def _close_due(self, now: float) -> float:
        return min(self._refused.close_due(now), self._spent.close_due(now))

    async def _take_batch(self, nursery: trio.Nursery) -> int:
        """Take who is waiting, up to BATCH; how many of them were refused."""
        refused = 0
        for _ in range(BATCH):
            try:
                connection, remote = self._door.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # it was gone before it was taken
            except OSError:  # no more files: those that are open have to end first
                self._close_due(math.inf)
                await trio.sleep(OUT_OF_FILES_S)
                break
            address = plain(str(remote[0]))
            if self._lets_in(address):
                connection.setblocking(False)
                if self._is_noise(_first_bytes(connection)):
                    refused += 1
                    turn_away(connection)
                    continue
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
                nursery.start_soon(self._handle, stream, address)
                continue
            refused += 1
            hanging = self._spent if self._is_spent(address) else self._refused
            hanging.take(connection, trio.current_time())
        return refused


def _hanging_limit() -> int:
    """Number of connections that may hang without taking the files that others need."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return HANGING_LIMIT if files == resource.RLIM_INFINITY else min(HANGING_LIMIT, int(files * HANGING_FILES_SHARE))


def _first_bytes(connection: socket.socket) -> bytes:
    """Bytes that have come so far, FIRST_BYTES at most; they stay there to be read."""
    with contextlib.suppress(OSError):
        return connection.recv(FIRST_BYTES, socket.MSG_PEEK)
    return b""


def turn_away(connection: socket.socket) -> None:
    """Close a connection such that the system keeps nothing of it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    connection.close()
