"""Throughput of bare TCP connections over a link: to be run at its two ends.

    python -m shoal.lab.bench.wan_streams receive HOST PORT CONNECTIONS SECONDS     prints bytes/s, after "up"
    python -m shoal.lab.bench.wan_streams send HOST PORT CONNECTIONS SECONDS CONGESTION_CONTROL

What counts is what the receiver's program gets, all connections together, in SECONDS from the first byte on.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from typing import Final

PIECE_BYTES: Final = 256 << 10
CONNECT_DEADLINE_S: Final = 10.0
SILENCE_LIMIT_S: Final = 30.0


def receive(listening: socket.socket, connections: int, seconds: float) -> float:
    """Bytes per second, from the first byte on. Raises TimeoutError if nobody comes, or nothing."""
    listening.settimeout(SILENCE_LIMIT_S)
    buffer = bytearray(PIECE_BYTES)
    with contextlib.ExitStack() as open_ones, selectors.DefaultSelector() as ready:
        for _ in range(connections):
            connection = open_ones.enter_context(listening.accept()[0])
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_READ)
        if not ready.select(SILENCE_LIMIT_S):
            raise TimeoutError
        began, got = time.monotonic(), 0
        while (left := began + seconds - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                assert isinstance(key.fileobj, socket.socket)
                got += key.fileobj.recv_into(buffer)
        return got / (time.monotonic() - began)


def send(host: str, port: int, seconds: float, congestion_control: str) -> None:
    """Send zeros over a connection for so long, or until the other end has closed it."""
    with socket.create_connection((host, port), CONNECT_DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        piece, ends_at = bytes(PIECE_BYTES), time.monotonic() + seconds
        connection.settimeout(SILENCE_LIMIT_S)
        try:
            while time.monotonic() < ends_at:
                connection.sendall(piece)
        except ConnectionError:
            pass


def main(arguments: list[str]) -> int:
    """Run one end."""
    role, host, port, connections, seconds, *congestion_control = arguments
    if role == "receive":
        with socket.create_server((host, int(port))) as listening:
            print("up", flush=True)
            print(receive(listening, int(connections), float(seconds)), flush=True)
        return 0
    ways = [
        threading.Thread(target=send, args=(host, int(port), float(seconds) + SILENCE_LIMIT_S, *congestion_control))
        for _ in range(int(connections))
    ]
    for way in ways:
        way.start()
    for way in ways:
        way.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
