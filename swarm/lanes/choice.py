"""Which of the lanes to one peer takes the next frame. No thread and no socket here, but for `path_of`.

All lanes take from one queue, each when it has room. That is as fast as can be while the queue is long. At its end a
lane whose window is still small, or has just collapsed, would take a frame that another is through with long before,
and everybody waits for it. So a lane takes a frame only if it is likely to be through with it before the others have
emptied the queue and the best of them has sent one frame more; else it leaves it to them. Who is much longer at a frame
than it should be does not count: what looked best may be stuck.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Hashable
from dataclasses import dataclass

TRUSTED_SHARE = 1 / 8
"""Of a window per round trip: a rate measured far below it was that of a lane with little to send."""
OVERDUE = 4.0
"""So many times as long as expected, and a lane is taken to be stuck; OVERDUE_LEAST_S at least."""
OVERDUE_LEAST_S = 1.0
RTT_LEAST_S = 1e-6

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_U32, _U64 = struct.Struct("I"), struct.Struct("Q")
_MSS, _RTT_US, _WINDOW, _UNSENT, _RATE = 16, 68, 80, 144, 160
"""Where tcpi_snd_mss, _rtt, _snd_cwnd, _notsent_bytes and _delivery_rate are in Linux's struct tcp_info (since 4.9)."""
_INFO_BYTES = _RATE + _U64.size


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


def path_of(connection: socket.socket) -> Path | None:
    """The path of an open TCP connection; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return None
    mss, rtt_us, window, unsent = (_U32.unpack_from(info, at)[0] for at in (_MSS, _RTT_US, _WINDOW, _UNSENT))
    rtt_s, measured = max(rtt_us / 1e6, RTT_LEAST_S), float(_U64.unpack_from(info, _RATE)[0])
    possible = max(1, mss * window) / rtt_s
    return Path(rtt_s, measured if measured > TRUSTED_SHARE * possible else possible, unsent)


class Lineup:
    """The lanes that take from one queue. Whoever uses it holds the queue's lock."""

    def __init__(self) -> None:
        self._paths: dict[Hashable, Path] = {}
        self._sending: dict[Hashable, float] = {}  # until when it is not overdue

    def takes(self, lane: Hashable, path: Path, now: float, *, size: int, waiting: int) -> bool:
        """Whether `lane` takes the next frame of `size` bytes, of `waiting` that are not yet given to any kernel.

        Who takes it is sending until it `rests`.
        """
        self._paths[lane] = path
        if self._leaves(lane, size, waiting, now):
            return False
        self._sending[lane] = now + max(OVERDUE_LEAST_S, OVERDUE * path.seconds(size))
        return True

    def someone_else_would(self, lane: Hashable, now: float, *, size: int, waiting: int) -> bool:
        """Whether a lane that rests would take the frame that `lane` leaves, and so has to be woken."""
        resting = self._paths.keys() - self._sending.keys() - {lane}
        return any(not self._leaves(other, size, waiting, now) for other in resting)

    def rests(self, lane: Hashable) -> None:
        """`lane` has given to its kernel what it had taken."""
        self._sending.pop(lane, None)

    def goes(self, lane: Hashable) -> None:
        """`lane` takes nothing any more."""
        self.rests(lane)
        self._paths.pop(lane, None)

    def _leaves(self, lane: Hashable, size: int, waiting: int, now: float) -> bool:
        others = [
            path for other, path in self._paths.items() if other != lane and now <= self._sending.get(other, math.inf)
        ]
        if not others:
            return False
        bytes_per_s = sum(path.bytes_per_s for path in others)
        best_s = min(path.seconds(size) for path in others)
        return self._paths[lane].seconds(size) > best_s + waiting / bytes_per_s
