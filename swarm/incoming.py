"""Incoming TCP connections before anything is known of who made them."""

from __future__ import annotations

import contextlib
import socket
import struct

import trio


def address_of(stream: trio.SocketStream) -> str:
    """The IP address at the other end of a connection; empty if that is gone already."""
    try:
        return str(stream.socket.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return ""


def reset(stream: trio.SocketStream) -> None:
    """Close a connection such that the system keeps nothing of it."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()
