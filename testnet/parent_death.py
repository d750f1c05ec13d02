"""End of a testnet's programs with their parent: a few lines that run in place of a program and then become it.

    python -I -S parent_death.py PARENT PROGRAM ARGUMENT…

Nobody cleans up after a testnet or a benchmark that is killed by SIGKILL, and its nodes lead sessions of their own. So
each asks the kernel for its own death before it is a node (PR_SET_PDEATHSIG, which a program inherits from what it
replaces). No function between fork and exec does it, which would be unsafe beside threads.

To the kernel the parent is the *thread* that started the process: only one that outlives the process may start it. A
worker thread of trio's, as `trio.lowlevel.open_process` takes, ends when it has been idle for a while.

This module imports nothing of Shoal's, so that a node starts no later for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def ended_with_parent(command: Sequence[str]) -> list[str]:
    """The command line by which the thread that starts it, and all processes it becomes, end together. On Linux."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def tie_to(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends; False if that has ended before. On Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def main() -> None:
    """Become the program of the command line, tied to its parent; end at once if that is dead already."""
    parent, *command = sys.argv[1:]
    if tie_to(int(parent)):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
