from __future__ import annotations

import mmap
import socket
from pathlib import Path

import pytest

from shoal.protocol.errors import NetworkError
from shoal.swarm.lanes import socket as lane_socket
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES
from shoal.swarm.lanes.seal import SEAL_OVERHEAD_BYTES, TAG_BYTES
from shoal.swarm.lanes.socket import frame_buffers, prepare, receive_exactly
from tests.swarm.lane_ends import tcp_pair


def test_prepare_makes_loopback_blocking_and_unpaced() -> None:
    near, far = tcp_pair()
    with near, far:
        prepare(near, 30.0)
        assert near.gettimeout() is None
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_CONGESTION"):
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


@pytest.mark.skipif(not hasattr(socket, "TCP_WINDOW_CLAMP"), reason="the system has no TCP_WINDOW_CLAMP")
def test_prepare_bounds_what_waits_in_the_kernel_of_one_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody gets far ahead of who shares a processor with it; a far window may grow as it must."""
    for loopback in (True, False):
        monkeypatch.setattr(lane_socket, "_is_loopback", lambda connection, loopback=loopback: loopback)
        near, far = tcp_pair()
        with near, far:
            prepare(near, 30.0)
            window = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)
            unsent = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert (window == lane_socket.LOOPBACK_WINDOW_BYTES) is loopback
        assert (unsent == lane_socket.LOOPBACK_WINDOW_BYTES // 2) is loopback


def system(folder: Path, monkeypatch: pytest.MonkeyPatch, *, wmem_max: str, tcp_wmem: str) -> None:
    """Have the system's limits for send buffers be these."""
    for name, text in (("WMEM_MAX", wmem_max), ("TCP_WMEM", tcp_wmem)):
        (folder / name).write_text(text)
        monkeypatch.setattr(lane_socket, name, folder / name)
    monkeypatch.setattr(lane_socket, "_send_buffer_to_ask", lane_socket._send_buffer_to_ask.__wrapped__)


@pytest.mark.parametrize(
    ("wmem_max", "tcp_wmem", "asked"),
    [
        ("4194304", "4096\t16384\t4194304", 4 << 20),
        ("212992\n", "4096\t16384\t4194304\n", 0),  # Linux's own defaults: the kernel's tuning reaches farther
        ("2097152", "4096 16384 4194304", 0),
        ("1073741824", "4096 16384 4194304", 16 << 20),
        ("what", "4096 16384 4194304", 0),
        ("4194304", "", 0),
    ],
)
def test_send_buffer_is_asked_for_only_where_that_gains_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wmem_max: str, tcp_wmem: str, asked: int
) -> None:
    system(tmp_path, monkeypatch, wmem_max=wmem_max, tcp_wmem=tcp_wmem)
    assert lane_socket._send_buffer_to_ask() == asked


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no TCP_NOTSENT_LOWAT")
def test_prepare_widens_the_send_buffer_of_a_far_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system allows here is less than it says, and is enough to see whether it was asked for."""
    system(tmp_path, monkeypatch, wmem_max="100000", tcp_wmem="4096 16384 100000")
    for loopback in (True, False):
        monkeypatch.setattr(lane_socket, "_is_loopback", lambda connection, loopback=loopback: loopback)
        near, far = tcp_pair()
        with near, far:
            prepare(near, 30.0)
            size = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            unsent = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert (size == 200_000) is not loopback
        assert (unsent == lane_socket.UNSENT_LIMIT_BYTES) is not loopback


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


@pytest.mark.parametrize("huge", [True, False])
def test_frame_buffers_ask_for_a_huge_page_or_for_none(huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    frame_buffers(huge=huge)
    assert asked == [mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE]


def test_frame_buffers_hold_the_largest_frame_and_do_not_overlap() -> None:
    buffers = frame_buffers()
    sizes = (FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES, FRAME_LIMIT_BYTES + TAG_BYTES, FRAME_LIMIT_BYTES)
    assert tuple(len(buffer) for buffer in buffers) == sizes
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number + 1]) * len(buffer)
    for number, buffer in enumerate(buffers):
        assert buffer == bytes([number + 1]) * len(buffer)
