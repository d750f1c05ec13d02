"""A long, narrow, lossy link between two network namespaces, as a process, for kernels without `netem`.

    python -m shoal.testnet.wan_relay NAMESPACE/DEVICE NAMESPACE/DEVICE RATE_MBIT DELAY_S LOSS

Makes a TAP device in each namespace, says so with a line on stdout, and carries every Ethernet frame from the one to
the other: over a queue that is drained at the rate, delayed, some of them lost. Ends when its stdin does, so it does
not outlive who started it; the devices end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import Final

from shoal.protocol.errors import NetworkError

QUEUE_S: Final = 0.2
QUEUE_LEAST_BYTES: Final = 64 << 10
"""What waits for a link: more is dropped, as at a router."""
FRAME_LIMIT_BYTES: Final = 65_536
BURST_LIMIT_FRAMES: Final = 64
"""Taken from one side before the other has its turn."""

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TAP_WITHOUT_HEADER: Final = 0x1002
_NAMESPACES: Final = "/var/run/netns"


class Link:
    """One direction: what is sent comes out later, at the rate, or never.

    rate_bytes_per_s: of the narrowest place. delay_s: of the way beyond it. loss: the share that is lost there.
    """

    def __init__(self, *, rate_bytes_per_s: float, delay_s: float, loss: float, draw: random.Random) -> None:
        self._rate = rate_bytes_per_s
        self._delay_s = delay_s
        self._loss = loss
        self._draw = draw
        self._queue_limit_s = max(QUEUE_S, QUEUE_LEAST_BYTES / rate_bytes_per_s)
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def send(self, frame: bytes, now: float) -> bool:
        """Take a frame; False if it is dropped, for want of room or by chance."""
        starts_at = max(now, self._free_at)
        if starts_at - now > self._queue_limit_s:
            return False
        self._free_at = starts_at + len(frame) / self._rate
        if self._draw.random() < self._loss:
            return False  # it took its time on the link all the same
        self._under_way.append((self._free_at + self._delay_s, frame))
        return True

    def arrived(self, now: float) -> list[bytes]:
        """The frames that are at the other end by now, in order; each once."""
        frames = []
        while self._under_way and self._under_way[0][0] <= now:
            frames.append(self._under_way.popleft()[1])
        return frames

    def next_at(self) -> float | None:
        """When the next frame arrives; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None


def open_tap(namespace: str, device: str) -> int:
    """A TAP device in a namespace, as a non-blocking file descriptor. Raises NetworkError."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with open("/proc/self/ns/net", "rb") as home, open(f"{_NAMESPACES}/{namespace}", "rb") as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _TAP_WITHOUT_HEADER))
            finally:
                if libc.setns(home.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
    except OSError as error:
        raise NetworkError(f"no TAP device {device} in {namespace}: {error}; it takes root and /dev/net/tun") from error
    return tap


def carry(taps: tuple[int, int], links: tuple[Link, Link], stop: int) -> None:
    """Carry frames between two devices, each over its own link, until the descriptor `stop` can be read."""
    poll = select.epoll()
    for descriptor in (*taps, stop):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        _deliver(taps, links)
        soonest = min((at for link in links if (at := link.next_at()) is not None), default=None)
        ready = poll.poll(None if soonest is None else max(0.0, soonest - time.monotonic()))
        for descriptor, _ in ready:
            if descriptor == stop:
                return
            _take(descriptor, links[taps.index(descriptor)])


def _deliver(taps: tuple[int, int], links: tuple[Link, Link]) -> None:
    now = time.monotonic()
    for side, link in enumerate(links):
        for frame in link.arrived(now):
            with contextlib.suppress(OSError):  # a device that is down, or full, drops it
                os.write(taps[1 - side], frame)


def _take(tap: int, link: Link) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(BURST_LIMIT_FRAMES):
            link.send(os.read(tap, FRAME_LIMIT_BYTES), time.monotonic())


def main(arguments: list[str]) -> int:
    """Run the relay; 2 for wrong usage, 1 if a device cannot be had."""
    try:
        one, other, *numbers = arguments
        rate_mbit, delay_s, loss = map(float, numbers)
        ends = [end.split("/") for end in (one, other)]
        (one_space, one_device), (other_space, other_device) = ends
    except ValueError:
        print("usage: wan_relay NAMESPACE/DEVICE NAMESPACE/DEVICE RATE_MBIT DELAY_S LOSS", file=sys.stderr)
        return 2

    def link() -> Link:
        return Link(rate_bytes_per_s=rate_mbit * 1e6 / 8, delay_s=delay_s, loss=loss, draw=random.Random(one))

    try:
        taps = (open_tap(one_space, one_device), open_tap(other_space, other_device))
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 1
    print("up", flush=True)
    carry(taps, (link(), link()), sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
