"""Network namespaces: who reaches whom, how fast, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.protocol.errors import ConfigError
from shoal.testnet.links import namespaces
from shoal.testnet.links.namespaces import (
    CONTROL_PORT,
    LANE_PORT,
    Network,
    Uplink,
    network,
    pairs_between,
    sweep,
    why_not,
)

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SILENCE_S = 0.3
"""How long nothing has to come for a link to be blocked: hundreds of times what a packet takes."""
DEADLINE_S = 20.0

CONNECT = """
import socket, sys
probe = socket.socket()
probe.settimeout(float(sys.argv[3]))
try:
    probe.connect((sys.argv[1], int(sys.argv[2])))
except ConnectionRefusedError:
    print("reached")
except TimeoutError:
    print("silence")
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
"""
RECEIVE = """
import socket, sys, time
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("up", flush=True)
connection, _ = listening.accept()
began = time.monotonic()
try:
    while connection.recv(1 << 16):
        pass
    print(time.monotonic() - began, flush=True)
except ConnectionResetError:
    print("reset", flush=True)
"""


SEND_DRAWN = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(int(sys.argv[3]))
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    connection.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""
RECEIVE_DRAWN = """
import hashlib, socket, sys
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("up", flush=True)
connection, _ = listening.accept()
digest = hashlib.sha256()
while data := connection.recv(1 << 16):
    digest.update(data)
print(digest.hexdigest())
"""


def python(links: Network, node: int, script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [*links.place(node).enter, sys.executable, "-S", "-E", "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def reaches(links: Network, one: int, other: int, port: int = CONTROL_PORT) -> bool:
    said, _ = python(links, one, CONNECT, links.place(other).host, port, SILENCE_S).communicate(timeout=DEADLINE_S)
    return {"reached": True, "silence": False}[said.strip()]


def seconds_for(links: Network, one: int, other: int, size: int) -> float:
    """How long the other end takes to receive so many bytes."""
    with python(links, other, RECEIVE, links.place(other).host, LANE_PORT) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        with python(links, one, SEND, links.place(other).host, LANE_PORT, size):
            return float(receiver.stdout.readline())


def names() -> list[str]:
    return [name for name in namespaces._names() if name.startswith(f"shoal-{os.getpid()}-")]


def test_pairs_between_are_those_of_different_groups() -> None:
    assert pairs_between([[0, 3], [2, 1]]) == {(0, 2), (0, 1), (2, 3), (1, 3)}
    assert pairs_between([[0], [1], [5]]) == {(0, 1), (0, 5), (1, 5)}
    assert pairs_between([[0, 1]]) == frozenset()


def test_why_not_names_the_tools_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_SEARCH_PATH", "/nowhere")
    reason = why_not.__wrapped__()
    assert reason == "network namespaces need ip and tc and nft: install iproute2 and nftables"
    monkeypatch.setattr(namespaces, "why_not", lambda: reason)
    with pytest.raises(ConfigError, match="install iproute2 and nftables"), network(2):
        pass


@needs_namespaces
def test_blocked_pairs_do_not_reach_each_other_and_all_others_do() -> None:
    with network(3) as links:
        assert reaches(links, 0, 1)
        links.block({(1, 0)})
        links.block({(0, 1)})
        assert [reaches(links, *pair) for pair in ((0, 1), (1, 0))] == [False, False]
        assert [reaches(links, *pair) for pair in ((0, 2), (2, 1))] == [True, True]
        links.unblock({(0, 1)})
        assert not reaches(links, 0, 1), "it was blocked twice"
        assert links.is_apart((1, 0))
        links.unblock({(1, 0)})
        assert reaches(links, 0, 1)
        assert not links.is_apart((0, 1))


@needs_namespaces
def test_lanes_and_control_are_blocked_apart_until_all_is_restored() -> None:
    with network(2) as links:
        for what, blocked, other in (("lanes", LANE_PORT, CONTROL_PORT), ("control", CONTROL_PORT, LANE_PORT)):
            links.block({(0, 1)}, what)  # type: ignore[arg-type]
            assert (reaches(links, 0, 1, blocked), reaches(links, 1, 0, blocked)) == (False, False)
            assert (reaches(links, 0, 1, other), reaches(links, 1, 0, other)) == (True, True)
            assert links.is_apart((0, 1)) is (what == "control")
            links.restore()
            assert reaches(links, 0, 1, blocked)


@needs_namespaces
def test_narrow_links_and_uplinks_carry_what_they_are_said_to() -> None:
    size, rate_mbit = 400_000, 8.0
    takes_s = size * 8 / (rate_mbit * 1e6)
    with network(3, [Uplink(nodes=(0, 1), rate_mbit=rate_mbit)]) as links:
        assert 0.8 * takes_s < seconds_for(links, 0, 2, size) < DEADLINE_S
        assert 0.8 * takes_s < seconds_for(links, 2, 1, size) < DEADLINE_S
        near_s = seconds_for(links, 0, 1, size)
        links.narrow(1, rate_mbit)
        assert max(near_s, 0.8 * takes_s) < seconds_for(links, 0, 1, size)
        links.widen(1)
        links.widen(1)
        assert seconds_for(links, 0, 1, size) < 0.8 * takes_s


@needs_namespaces
def test_uplink_with_a_delay_takes_that_long_each_way() -> None:
    with network(2, [Uplink(nodes=(0,), rate_mbit=50, delay_s=0.1)]) as links:
        began = time.monotonic()
        assert reaches(links, 0, 1) or reaches(links, 0, 1)  # the first may only find out where the other is
        assert time.monotonic() - began >= 0.2


@needs_namespaces
@pytest.mark.long
def test_uplink_that_loses_packets_out_of_bursts_changes_no_byte() -> None:
    """What is left of a burst has the right places and sums, or its receiver would refuse it, or be given the wrong."""
    with network(2, [Uplink(nodes=(0,), rate_mbit=400, delay_s=0.003, jitter_s=0.001, loss=0.005)]) as links:
        for sender, receiver in ((0, 1), (1, 0)):
            address = (links.place(receiver).host, LANE_PORT + receiver)
            with python(links, receiver, RECEIVE_DRAWN, *address) as receiving:
                assert receiving.stdout is not None
                assert receiving.stdout.readline() == "up\n"
                sent, _ = python(links, sender, SEND_DRAWN, *address, 8_000_000).communicate(timeout=DEADLINE_S)
                assert receiving.stdout.readline() == sent != ""


@needs_namespaces
def test_lanes_are_reset_under_both_ends() -> None:
    with network(2) as links:
        assert links.reset_lanes(0) == 0
        with python(links, 1, RECEIVE, links.place(1).host, LANE_PORT) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "up\n"
            # More than fits on its way, so that the sender is at it when its socket is destroyed.
            with python(links, 0, SEND, links.place(1).host, LANE_PORT, 1 << 30) as sender:
                ends_at = time.monotonic() + DEADLINE_S
                while not links.reset_lanes(0):
                    assert time.monotonic() < ends_at
                assert receiver.stdout.readline() == "reset\n"
                assert sender.wait(DEADLINE_S) != 0


@needs_namespaces
def test_nothing_is_left_whatever_happens() -> None:
    with contextlib.suppress(KeyError), network(2, [Uplink(nodes=(0,), rate_mbit=5, delay_s=0.01)]) as links:
        assert len(names()) == 4
        left = python(links, 0, "import time; time.sleep(600)")
        raise KeyError
    assert names() == []
    with left:
        try:
            assert left.wait(DEADLINE_S) == -signal.SIGKILL, "what ran in it is ended"
        finally:
            left.kill()


@needs_namespaces
def test_namespaces_of_a_process_that_was_killed_are_swept() -> None:
    script = "import os, signal, sys; from shoal.testnet.links.namespaces import network\n"
    script += "with network(2):\n    print(os.getpid(), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    prefix = f"shoal-{killed.stdout.strip()}-"
    assert any(name.startswith(prefix) for name in namespaces._names())
    with network(1) as links:
        assert not any(name.startswith(prefix) for name in namespaces._names())
        sweep()
        assert links.place(0).enter[-1] in namespaces._names(), "those of who lives stay"


@needs_namespaces
def test_bytes_of_an_uplink_are_those_that_leave_the_place_and_come_in() -> None:
    size = 1_000_000
    uplinks = (Uplink(nodes=(0, 1), rate_mbit=100), Uplink(nodes=(2,), rate_mbit=100), Uplink(nodes=(3,), rate_mbit=1))
    with network(4, uplinks) as links:
        before = links.uplink_bytes()
        seconds_for(links, 0, 1, size)
        within = links.uplink_bytes()
        assert all(later - first < size // 20 for first, later in zip(before, within, strict=True))
        seconds_for(links, 0, 2, size)
        carried = [later - first for first, later in zip(within, links.uplink_bytes(), strict=True)]
        assert all(size <= one < size * 1.1 for one in carried[:2])
        assert carried[2] < size // 20
