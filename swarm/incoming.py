"""Incoming TCP connections before anything is known of who made them.

They are taken in batches: who is refused costs three calls into the system, no task, no line in a log and no
cryptography. After a batch of which many were refused there is a pause, in which the system's backlog does the waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

BATCH = 128
PAUSE_S = 0.05
"""After a batch of which many were refused: so no more than BATCH / PAUSE_S are looked at in a second."""
CROWDED = 16
"""So many refused of one batch are a flood."""
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
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handle` with each connection that `lets_in` takes, by its IP address; the rest are reset.

    Each is closed when its `handle` returns, which raises nothing. Runs until cancelled; then all are closed.
    """
    async with contextlib.AsyncExitStack() as stack:
        for listener in listeners:
            await stack.enter_async_context(listener)
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_take, listener, lets_in, partial(_handle, handle), nursery)
            task_status.started()


async def _handle(handle: Handler, stream: trio.SocketStream, address: str) -> None:
    try:
        await handle(stream, address)
    finally:
        await trio.aclose_forcefully(stream)


async def _take(
    listener: trio.SocketListener, lets_in: Callable[[str], bool], handle: Handler, nursery: trio.Nursery
) -> None:
    with socket.socket(fileno=os.dup(listener.socket.fileno())) as door:
        door.setblocking(False)
        while True:
            await trio.lowlevel.wait_readable(door)
            refused = 0
            for _ in range(BATCH):
                try:
                    connection, remote = door.accept()
                except BlockingIOError:
                    break
                except ConnectionError:
                    continue  # it was gone before it was taken
                except OSError:  # no more files: those that are open have to end first
                    await trio.sleep(OUT_OF_FILES_S)
                    break
                address = plain(str(remote[0]))
                if lets_in(address):
                    connection.setblocking(False)
                    stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
                    nursery.start_soon(handle, stream, address)
                else:
                    refused += 1
                    turn_away(connection)
            if refused >= CROWDED:
                await trio.sleep(PAUSE_S)


def turn_away(connection: socket.socket) -> None:
    """Close a connection such that the system keeps nothing of it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    connection.close()
