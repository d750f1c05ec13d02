"""Stand-in for a trainer that a fork server forked: what the daemon starts, sees end and may kill in its place.

    python -I -S forked_trainer.py TRAINERS CONTROL MEMORY PROCESSES

It hands the two descriptors, its output and its folder on to the fork server that listens at TRAINERS, waits for the
trainer's end, and ends the same way. If it is killed, the fork server kills the trainer.

This module imports nothing of Shoal's, since it is to start at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

EXIT_DESERTED = 1
STATUS_LIMIT_BYTES = 16


def main(arguments: list[str]) -> int:
    """Stand for one trainer; returns its exit status."""
    trainers, control, memory, processes = arguments
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(trainers)
        socket.send_fds(server, [f"{processes} {os.getcwd()}".encode()], [int(control), int(memory), 1, 2])
        os.close(int(control))  # else the end of the trainer would not be the end of the daemon's stream
        os.close(int(memory))
        status = int(server.recv(STATUS_LIMIT_BYTES) or EXIT_DESERTED)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
