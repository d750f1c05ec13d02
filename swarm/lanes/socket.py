"""The sockets of lanes: their options, whole reads, and the buffers beside them."""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
from functools import cache
from pathlib import Path

from shoal.protocol.errors import NetworkError
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES
from shoal.swarm.lanes.seal import SEAL_OVERHEAD_BYTES, TAG_BYTES

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
SEND_BUFFER_BYTES = 32 << 20
"""Of memory for one lane's unacknowledged bytes; taken as far as the window needs it."""
UNSENT_LIMIT_BYTES = 1 << 20
LOOPBACK_WINDOW_BYTES = 1 << 20
WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")
BUFFERS_BYTES = 2 << 20
"""A huge page, where the system has them: both directions' buffers fit in one."""

# Without it recv_into may return early, and who reads goes round once more.
MSG_WAITALL = getattr(socket, "MSG_WAITALL", 0)


def prepare(connection: socket.socket, stall_s: float) -> None:
    """Blocking, with time-outs in the kernel: no wait inside a frame or a send outlasts `stall_s` without progress."""
    connection.setblocking(True)
    # A time-out of Python's own would make the descriptor non-blocking, and MSG_WAITALL void.
    interval = struct.pack("ll", int(stall_s), int(stall_s % 1 * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPALIVE", KEEPALIVE_IDLE_S),  # macOS's name for it
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", int(stall_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if _is_loopback(connection):
        algorithm = b"reno"
        _keep_in_step(connection)
    else:
        algorithm = b"bbr"
        _widen_send_buffer(connection)
    if hasattr(socket, "TCP_CONGESTION"):
        # On a long lossy link BBR moves several times what cubic does; not every kernel offers it. Where it is the
        # system's choice it paces loopback too, which costs a quarter of its speed.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)


def _keep_in_step(connection: socket.socket) -> None:
    """Let little wait in the kernel of one machine: there a window of that much is never too small.

    With tens of MiB between two of its nodes one could be through with a reduction while another still had much of it
    to read, and what the first then did took the processor from the second.
    """
    for name, limit in (("TCP_WINDOW_CLAMP", LOOPBACK_WINDOW_BYTES), ("TCP_NOTSENT_LOWAT", LOOPBACK_WINDOW_BYTES // 2)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, limit)


def _widen_send_buffer(connection: socket.socket) -> None:
    """Let more be on its way than the kernel's own tuning ever allows, where the system lets a program ask for that.

    The tuning ends at 4 MiB by default, with the kernel's own bookkeeping in it; at 150 ms that is 100 Mbit/s. What
    waits in the kernel unsent stays bounded: frames of another scope would wait behind it, and a slow peer's seconds
    long. A buffer that was asked for is tuned no more, so a smaller one is not asked for.
    """
    asked = _send_buffer_to_ask()
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if asked and lowat is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, lowat, UNSENT_LIMIT_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, asked)


@cache
def _send_buffer_to_ask() -> int:
    """For SO_SNDBUF, of which the kernel allots twice as much; 0 if its tuning reaches as far, or cannot be known."""
    try:
        most = int(WMEM_MAX.read_text())
        tuned = int(TCP_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
    asked = min(most, SEND_BUFFER_BYTES // 2)
    return asked if 2 * asked > tuned else 0


def _is_loopback(connection: socket.socket) -> bool:
    try:
        host = str(connection.getpeername()[0])
    except OSError:
        return False
    return host.startswith(("127.", "::1", "::ffff:127."))


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill `view` from a blocking socket. Raises NetworkError if the stream ends before."""
    while view:
        got = connection.recv_into(view, len(view), MSG_WAITALL)
        if got == 0:
            raise NetworkError("the connection ended early")
        view = view[got:]


def frame_buffers() -> tuple[memoryview, memoryview, memoryview]:
    """Room for the frames to send, for one sealed payload received, and for one that is opened and not wanted.

    (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES,), (FRAME_LIMIT_BYTES + TAG_BYTES,), (FRAME_LIMIT_BYTES,) uint8, in one
    mapping that asks for a huge page. Memory is taken when it is first written.
    """
    sizes = (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES, FRAME_LIMIT_BYTES + TAG_BYTES, FRAME_LIMIT_BYTES)
    mapping = mmap.mmap(-1, BUFFERS_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole, start, parts = memoryview(mapping), 0, []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return parts[0], parts[1], parts[2]
