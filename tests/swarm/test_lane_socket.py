from __future__ import annotations

import socket

import pytest

from shoal.protocol.errors import NetworkError
from shoal.swarm.frame import FRAME_LIMIT_BYTES
from shoal.swarm.lane_socket import frame_buffers, prepare, receive_exactly
from shoal.swarm.seal import SEAL_OVERHEAD_BYTES, TAG_BYTES
from tests.swarm.lane_ends import tcp_pair


def test_prepare_makes_loopback_blocking_and_unpaced() -> None:
    near, far = tcp_pair()
    with near, far:
        prepare(near, 30.0)
        assert near.gettimeout() is None
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_CONGESTION"):
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_receive_exactly_fills_or_raises() -> None:
    near, far = tcp_pair()
    with near:
        view = memoryview(bytearray(6))
        with far:
            far.sendall(b"abc")
            far.sendall(b"defgh")
        receive_exactly(near, view)
        assert view == b"abcdef"
        with pytest.raises(NetworkError):
            receive_exactly(near, view)


def test_frame_buffers_hold_the_largest_frame_and_do_not_overlap() -> None:
    buffers = frame_buffers()
    sizes = (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES, FRAME_LIMIT_BYTES + TAG_BYTES, FRAME_LIMIT_BYTES)
    assert tuple(len(buffer) for buffer in buffers) == sizes
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number + 1]) * len(buffer)
    for number, buffer in enumerate(buffers):
        assert buffer == bytes([number + 1]) * len(buffer)
