"""How much has moved over a TCP connection, as its kernel counts it: far finer than frames, which may be half a MiB."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_COUNTERS = struct.Struct("QQ")
_OFFSET = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info (include/uapi/linux/tcp.h, since 4.1)."""
_INFO_BYTES = _OFFSET + _COUNTERS.size


@dataclass(frozen=True, slots=True)
class Moved:
    """received: bytes that came from the peer. taken: bytes that its kernel has acknowledged."""

    received: int = 0
    taken: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.received + other.received, self.taken + other.taken)


def moved(connection: socket.socket) -> Moved | None:
    """What has moved over an open TCP connection; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return None
    taken, received = _COUNTERS.unpack_from(info, _OFFSET)
    return Moved(received, taken)
