"""A child's end of the pipe to its daemon: what cannot be read ends the child, which would wait for orders for ever."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from shoal.node.pipe import EXIT_CONFUSED, EXIT_ORPHANED, Stop, frame_of

DEADLINE_S = 60.0
CHILD = """
import sys
from shoal.node.pipe import ParentPipe
from shoal.protocol.errors import LocalError

def unpack(frame):
    raise {error}("nonsense")

ParentPipe(int(sys.argv[1]), unpack, who="child").receive()
"""


@pytest.mark.parametrize("error", ["LocalError", "MemoryError"])
def test_child_whose_orders_cannot_be_read_says_so_and_ends(error: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame_of(Stop()))
        command = [sys.executable, "-c", CHILD.format(error=error), str(theirs.fileno())]
        ended = subprocess.run(
            command, pass_fds=(theirs.fileno(),), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert ended.returncode == EXIT_CONFUSED
    assert ended.stderr == f"child: the daemon's orders cannot be followed: {error}: nonsense\n"


def test_child_whose_daemon_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        command = [sys.executable, "-c", CHILD.format(error="LocalError"), str(theirs.fileno())]
        ended = subprocess.run(command, pass_fds=(theirs.fileno(),), timeout=DEADLINE_S, check=False)
    assert ended.returncode == EXIT_ORPHANED
