"""A limit of memory: what is in it cannot have more, what was let out can, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.lab.memory_limit import MemoryLimit, memory_limit
from shoal.protocol.errors import ConfigError

LIMIT = 64 << 20
TOUCH = "import sys; sys.stdin.read(1); held = bytearray(256 << 20); print(len(held))"
"""Waits for a byte, then takes four times the limit."""
ABLE = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, to make control groups"
)


def touching(limit: MemoryLimit) -> subprocess.Popen[bytes]:
    """A process in the limit that is about to take more."""
    command = [*limit.prefix, sys.executable, "-c", TOUCH]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@ABLE
def test_who_takes_more_than_the_limit_is_killed_and_who_was_let_out_is_not() -> None:
    with memory_limit("test", LIMIT) as limit:
        with touching(limit) as bound:
            assert limit.processes() in ([], [bound.pid])  # before, or after it put itself there
            bound.communicate(b"x")
        assert bound.returncode in (-9, 1)  # killed, or told that there is none
        with touching(limit) as free:
            while free.pid not in limit.processes():
                assert free.poll() is None
            limit.let_out(free.pid)
            assert free.pid not in limit.processes()
            said, _ = free.communicate(b"x")
            assert said.strip() == str(256 << 20).encode()
        limit.let_out(free.pid)  # it has ended
        assert limit.processes() == []
        with pytest.raises(ConfigError, match="no control group of memory can be made"), memory_limit("test", LIMIT):
            pass  # it is there
    with memory_limit("test", LIMIT):
        pass  # nothing was left of the first
