"""A child's end of the pipe to its daemon: what cannot be read ends the child, which would wait for orders for ever."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest

from shoal.node.child_process import running_child
from shoal.node.pipe import EXIT_CONFUSED, EXIT_ORPHANED, Stop, frame_of
from shoal.protocol.errors import LocalError

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
    assert ended.stderr == f"<3>child: the daemon's orders cannot be followed: {error}: nonsense\n"


def test_child_whose_daemon_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        command = [sys.executable, "-c", CHILD.format(error="LocalError"), str(theirs.fileno())]
        ended = subprocess.run(command, pass_fds=(theirs.fileno(),), timeout=DEADLINE_S, check=False)
    assert ended.returncode == EXIT_ORPHANED


SPEAKS = """
import logging, sys
from shoal.node.pipe import ParentPipe, Stop

pipe = ParentPipe(int(sys.argv[1]), lambda frame: Stop(), who="child")
print("printed")
logging.getLogger("shoal.x").info("nobody asked for this")
logging.getLogger("shoal.x").warning("a text of a model: %s", "ab\\n<3>c")
logging.getLogger("shoal.x").error("broken")
pipe.receive()
"""


async def test_what_a_child_warns_of_is_a_warning_of_its_parent_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def unpack(frame: bytes) -> Stop:
        raise LocalError("the child sends nothing")

    logger = logging.getLogger("shoal.child")
    with caplog.at_level("INFO", logger="shoal.child"):
        async with running_child(["-c", SPEAKS], unpack=unpack, stop_s=DEADLINE_S, logger=logger) as child:
            await child.stop()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "printed"),
        ("WARNING", "a text of a model: ab <3>c"),
        ("ERROR", "broken"),
    ]
