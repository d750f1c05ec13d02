"""The sockets of lanes: their options, what their kernel says of them, whole reads, and the buffers beside them.

The kernel counts far finer than frames do, which may be half a MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import socket
import struct
from dataclasses import dataclass
from functools import cache

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
WMEM_MAX = pathlib.Path("/proc/sys/net/core/wmem_max")
TCP_WMEM = pathlib.Path("/proc/sys/net/ipv4/tcp_wmem")
BUFFERS_BYTES = 2 << 20
"""A huge page, where the system has them: both directions' buffers fit in one."""

TRUSTED_SHARE = 1 / 8
"""Of a window per round trip: a rate measured far below it was that of a lane with little to send."""
RTT_LEAST_S = 1e-6

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_U32, _U64 = struct.Struct("I"), struct.Struct("Q")
_MSS, _RTT_US, _WINDOW, _UNSENT, _RATE = 16, 68, 80, 144, 160
"""Offsets of tcpi_snd_mss, _rtt, _snd_cwnd, _notsent_bytes and _delivery_rate in Linux's tcp_info (since 4.9)."""
_PATH_BYTES = _RATE + _U64.size
_COUNTERS = struct.Struct("QQ")
_COUNTERS_OFFSET = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info (include/uapi/linux/tcp.h, since 4.1)."""
_TIMES = struct.Struct("QQQ")
_TIMES_OFFSET = 168
"""Of tcpi_busy_time, tcpi_rwnd_limited and tcpi_sndbuf_limited there, in microseconds (since 4.10)."""
_MOVED_BYTES = _TIMES_OFFSET + _TIMES.size

# Without it recv_into may return early, and who reads goes round once more.
MSG_WAITALL = getattr(socket, "MSG_WAITALL", 0)


def reason_of(error: BaseException) -> str:
    """Return the system's own words for an error, without the number and the call that others put around them."""
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


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


@dataclass(frozen=True, slots=True)
class Path:
    """A connection as its kernel sees it. bytes_per_s: what it moves. unsent_bytes: what has not been sent yet."""

    rtt_s: float
    bytes_per_s: float
    unsent_bytes: int = 0

    def seconds(self, size: int) -> float:
        """About how long until `size` bytes more have been acknowledged, if it becomes no faster.

        A window that has just opened may well do; one that opened where others fill the way already does not for long.
        """
        return self.rtt_s + (size + self.unsent_bytes) / self.bytes_per_s


def ends_of(connection: socket.socket) -> tuple[str, str] | None:
    """The IP addresses of the own and of the other end of an open TCP connection; None of one that ended."""
    try:
        own, other = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return None
    return str(own).removeprefix("::ffff:"), str(other).removeprefix("::ffff:")


def path_of(connection: socket.socket) -> Path | None:
    """The path of an open TCP connection; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _PATH_BYTES)
    except OSError:
        return None
    if len(info) < _PATH_BYTES:
        return None
    mss, rtt_us, window, unsent = (_U32.unpack_from(info, at)[0] for at in (_MSS, _RTT_US, _WINDOW, _UNSENT))
    rtt_s, measured = max(rtt_us / 1e6, RTT_LEAST_S), float(_U64.unpack_from(info, _RATE)[0])
    possible = max(1, mss * window) / rtt_s
    return Path(rtt_s, measured if measured > TRUSTED_SHARE * possible else possible, unsent)


@dataclass(frozen=True, slots=True)
class Moved:
    """received: bytes that came from the peer. taken: bytes that its kernel has acknowledged.

    busy_s: how long there was something to send. held_s: of that, how long a buffer of either end held it back, and not
    the network; both 0 where the system does not tell.
    """

    received: int = 0
    taken: int = 0
    busy_s: float = 0.0
    held_s: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.received + other.received,
            self.taken + other.taken,
            self.busy_s + other.busy_s,
            self.held_s + other.held_s,
        )


def moved(connection: socket.socket) -> Moved | None:
    """Traffic over an open TCP connection, as the kernel counted it; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _MOVED_BYTES)
    except OSError:
        return None
    if len(info) < _COUNTERS_OFFSET + _COUNTERS.size:
        return None
    taken, received = _COUNTERS.unpack_from(info, _COUNTERS_OFFSET)
    if len(info) < _MOVED_BYTES:
        return Moved(received, taken)
    busy, *held = _TIMES.unpack_from(info, _TIMES_OFFSET)
    return Moved(received, taken, busy / 1e6, sum(held) / 1e6)


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill `view` from a blocking socket. Raises NetworkError if the stream ends before."""
    while view:
        got = connection.recv_into(view, len(view), MSG_WAITALL)
        if got == 0:
            raise NetworkError("the connection ended early")
        view = view[got:]


def frame_buffers(*, huge: bool = True) -> tuple[memoryview, memoryview, memoryview]:
    """Room for the frames to send, for one sealed payload received, and for one that is opened and not wanted.

    (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES,), (FRAME_LIMIT_BYTES + TAG_BYTES,), (FRAME_LIMIT_BYTES,) uint8, in one
    mapping. Memory is taken when it is first written: as a huge page if the mapping is to ask for that, else as much as
    the frames need.
    """
    sizes = (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES, FRAME_LIMIT_BYTES + TAG_BYTES, FRAME_LIMIT_BYTES)
    mapping = mmap.mmap(-1, BUFFERS_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(advice)
    whole, start, parts = memoryview(mapping), 0, []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return parts[0], parts[1], parts[2]
