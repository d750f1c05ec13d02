"""How much has moved over a TCP connection, as its kernel counts it: far finer than frames, which may be half a MiB."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_COUNTERS = struct.Struct("QQ")
_OFFSET = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info (include/uapi/linux/tcp.h, since 4.1)."""
_TIMES = struct.Struct("QQQ")
_TIMES_OFFSET = 168
"""Of tcpi_busy_time, tcpi_rwnd_limited and tcpi_sndbuf_limited there, in microseconds (since 4.10)."""
_INFO_BYTES = _TIMES_OFFSET + _TIMES.size


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
    """What has moved over an open TCP connection; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _OFFSET + _COUNTERS.size:
        return None
    taken, received = _COUNTERS.unpack_from(info, _OFFSET)
    if len(info) < _INFO_BYTES:
        return Moved(received, taken)
    busy, *held = _TIMES.unpack_from(info, _TIMES_OFFSET)
    return Moved(received, taken, busy / 1e6, sum(held) / 1e6)
