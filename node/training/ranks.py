"""The processes of a trainer that has several: rank 0 starts the others, speaks to them, and ends with them.

The daemon spawns one process, as for a trainer on one device, and that process spawns the rest. So rank 0 has the
daemon's socket and shared memory, one supervisor (the daemon) decides about restarts, and the group lives and dies as
one. An elastic launcher (`torchrun`) would stand between the two with descriptors closed, a restart policy of its own
and a rendezvous that listens on a TCP port without a password.

* The ranks find each other through a file in memory that they inherit (a `FileStore`), and their collectives are bound
  to the loopback interface: nothing of the group can be reached from the network.
* Orders go over one socket pair for each rank, as bounded msgpack frames. An idle group waits there, where no
  collective can time out, and the end of the stream is how each side learns at once that the other has died.
* A rank that dies ends rank 0 with `EXIT_RANK_DIED`, which kills the others first; the daemon then starts a new group
  as it does any dead trainer. The kernel kills the other ranks when rank 0 dies (PR_SET_PDEATHSIG), a stopped one too.

This module does not import torch, so that all ranks import it at the same time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.node.pipe import EXIT_RANK_DIED, Failed, FrameSocket
from shoal.node.training.rank_messages import RankOrder
from shoal.node.training.trainer_messages import unpack_report

GROUP_TIMEOUT_S = 900.0
"""Of one collective: beyond the time after which the daemon ends a trainer that hangs."""
BLAME_TIMEOUT_S = 1.0
"""An error in one rank waits so long for the death of another, which would be its cause."""
REAP_DEADLINE_S = 1.0
END_DEADLINE_S = 10.0
"""Seconds for which a thread or a rank waits at most for another to end the process."""
PROGRAM = ("-m", "shoal.node.training.rank_start")
LOOPBACK = "lo"
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class Ranks:
    """Rank 0's hold of the other ranks of its group. Lifetime: construct, `watch`, `tell`, `end`."""

    def __init__(self, processes: int) -> None:
        """Spawn ranks 1 to processes - 1, which begin to import torch. Raises OSError."""
        self.processes = processes
        self.store = os.memfd_create("shoal-ranks", os.MFD_CLOEXEC)
        self._connections: list[FrameSocket] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._ending = threading.Event()
        for _ in range(1, processes):
            ours, theirs = socket.socketpair()
            with theirs:
                self._children.append(_spawn(theirs.fileno(), self.store))
            self._connections.append(FrameSocket(ours))

    def watch(self, on_failed: Callable[[Failed], None]) -> None:
        """End this process from now on if a rank dies, or after `on_failed` if one says that its workload raised.

        `on_failed` is called in another thread, and must not return.
        """
        for rank, connection in enumerate(self._connections, start=1):
            threading.Thread(
                target=self._watch, args=(rank, connection, on_failed), name=f"rank {rank}", daemon=True
            ).start()

    def tell(self, order: RankOrder) -> None:
        """Give the same order to every other rank. One that is gone is noticed by its watch."""
        for rank in range(1, self.processes):
            self.tell_rank(rank, order)

    def tell_rank(self, rank: int, order: RankOrder) -> None:
        """Give one rank an order."""
        with suppress(OSError):
            self._connections[rank - 1].send(order)

    def await_blame(self) -> None:
        """An error was raised: return if no rank's death is known, after a while, to have been its cause."""
        if self._ending.wait(BLAME_TIMEOUT_S):
            threading.Event().wait(END_DEADLINE_S)  # another thread ends this process meanwhile

    def end(self) -> None:
        """Kill and reap the other ranks: they hold nothing that is to be kept."""
        self._ending.set()
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_DEADLINE_S)

    def _watch(self, rank: int, connection: FrameSocket, on_failed: Callable[[Failed], None]) -> None:
        with suppress(OSError):
            while (frame := connection.receive()) is not None:
                report = unpack_report(frame)
                assert isinstance(report, Failed)  # nothing else is ever answered
                self.await_blame()
                self._ending.set()
                on_failed(report)
        if self._ending.is_set():
            return
        self._end_with(rank)

    def _end_with(self, rank: int) -> None:
        """A rank has died: so does the group."""
        self._ending.set()
        child = self._children[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            child.wait(REAP_DEADLINE_S)
        status = child.returncode
        how = f"killed by {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
        logger.warning("process %d of %d ended (%s); the others end with it", rank, self.processes, how)
        self.end()
        os._exit(EXIT_RANK_DIED)


def _spawn(control: int, store: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", *PROGRAM, str(control), str(store), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=(control, store),
    )


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it is dead already. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_RANK_DIED)
