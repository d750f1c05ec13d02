"""A long, narrow, lossy link between two network namespaces, as a process, for kernels without `netem`.

    python -m shoal.testnet.links.wan_relay NAMESPACE/DEVICE NAMESPACE/DEVICE THERE_MBIT BACK_MBIT DELAY_S JITTER_S LOSS

Makes a TAP device in each namespace, says so with a line on stdout, and carries every Ethernet frame from the one to
the other over a `Link`: THERE_MBIT from the first to the second, BACK_MBIT from the second to the first. Ends when its
stdin does, so it does not outlive who started it; the devices end with it.

What it costs is per frame. So the devices take TCP bursts whole (`wan_frames`), and what is ready is read, and what has
arrived is written, many frames at a time.
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
from typing import Final

from shoal.protocol.errors import NetworkError
from shoal.testnet.links.wan_frames import FRAME_LIMIT_BYTES
from shoal.testnet.links.wan_link import Link

BURST_LIMIT_FRAMES: Final = 64
"""Taken from one side before the other has its turn."""

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TAP_WITH_OFFLOADS: Final = 0x5002  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUMS_AND_TCP: Final = 0x3  # TUN_F_CSUM, TUN_F_TSO4
_NAMESPACES: Final = "/var/run/netns"


def open_tap(namespace: str, device: str) -> int:
    """A TAP device in a namespace, as a non-blocking file descriptor. Raises NetworkError."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with open("/proc/self/ns/net", "rb") as home, open(f"{_NAMESPACES}/{namespace}", "rb") as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _TAP_WITH_OFFLOADS))
                fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS_AND_TCP)
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
    now = time.monotonic()
    with contextlib.suppress(BlockingIOError):
        for _ in range(BURST_LIMIT_FRAMES):
            link.send(os.read(tap, FRAME_LIMIT_BYTES), now)


def main(arguments: list[str]) -> int:
    """Run the relay; 2 for wrong usage, 1 if a device cannot be had."""
    try:
        one, other, *numbers = arguments
        there_mbit, back_mbit, delay_s, jitter_s, loss = map(float, numbers)
        ends = [end.split("/") for end in (one, other)]
        (one_space, one_device), (other_space, other_device) = ends
    except ValueError:
        usage = "NAMESPACE/DEVICE NAMESPACE/DEVICE THERE_MBIT BACK_MBIT DELAY_S JITTER_S LOSS"
        print(f"usage: wan_relay {usage}", file=sys.stderr)
        return 2

    def link(begin: str, rate_mbit: float) -> Link:
        rate = rate_mbit * 1e6 / 8
        draw = random.Random(begin)
        return Link(rate_bytes_per_s=rate, delay_s=delay_s, jitter_s=jitter_s, loss=loss, draw=draw)

    try:
        taps = (open_tap(one_space, one_device), open_tap(other_space, other_device))
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 1
    print("up", flush=True)
    carry(taps, (link(one, there_mbit), link(other, back_mbit)), sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
