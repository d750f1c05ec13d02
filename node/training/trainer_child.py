"""One trainer process as the daemon holds it: spawned, spoken with, stopped, reaped.

`running_child` owns the process from spawn to reaping. What comes of it is told by exceptions: `ChildDied` when
it ended unasked, `ChildRaised` when it reported what its workload raised. The policy (start again or give up)
is `shoal.node.training.trainer`'s. `TrainerConnection` is the part that does not care whose process it is.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import IO

import trio

from shoal.node.training.rank_messages import EXIT_RANK_DIED
from shoal.node.training.trainer_messages import Command, Failed, Framing, Report, Stop, pack, unpack_report

SEND_DEADLINE_S = 30.0
STOP_DEADLINE_S = 2.0
LOG_DEADLINE_S = 1.0
LOG_LINE_LIMIT_BYTES = 4096
READ_BYTES = 64 << 10
PROGRAM: tuple[str, ...] = ("-m", "shoal.node.training.trainer_start")

logger = logging.getLogger("shoal.trainer")


class ChildDied(Exception):
    """The child ended, or had to be ended, without being asked to; the text says how."""


class ChildRaised(Exception):
    """The child reported what its workload raised."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.summary)
        self.failed = failed


class TrainerConnection(ABC):
    """The daemon's end of a trainer's control stream: one task receives, any task sends."""

    def __init__(self, stream: trio.SocketStream, *, pid: int) -> None:
        self.pid = pid
        self._stream = stream
        self._sending = trio.Lock()
        self._framing = Framing()
        self._frames: deque[bytes] = deque()

    @abstractmethod
    def _give_up(self) -> None:
        """It reads no orders: end it, or at least the stream."""

    @abstractmethod
    async def _ending(self) -> str:
        """The stream ended: say how its process did."""

    async def send(self, command: Command) -> None:
        """Send a command; to a dead trainer it goes nowhere, which `receive` will notice. As `send_frame`."""
        await self.send_frame(pack(command))

    async def send_frame(self, data: bytes) -> None:
        """Send a frame as it is; a child that does not read for `SEND_DEADLINE_S` is given up.

        Cancellation: delivered whole or not at all, since half a frame would garble what follows.
        """
        async with self._sending:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_DEADLINE_S) as scope:
                try:
                    await self._stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
            if scope.cancelled_caught:
                logger.warning("a child reads no orders; ending it")
                self._give_up()

    async def receive(self) -> Report:
        """Return the next report. Raises `ChildDied` at its end, `ChildRaised` in place of a `Failed`.

        Cancellation: nothing is lost.
        """
        report = unpack_report(await self.receive_frame())
        if isinstance(report, Failed):
            raise ChildRaised(report)
        return report

    async def receive_frame(self) -> bytes:
        """Return the next frame as it came. Raises `ChildDied` at the stream's end. Cancellation: nothing is lost."""
        while not self._frames:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise ChildDied(await self._ending())
            self._frames.extend(self._framing.feed(data))
        return self._frames.popleft()


class TrainerChild(TrainerConnection):
    """A trainer that the daemon spawned."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        super().__init__(stream, pid=process.pid)
        self.process = process

    def _give_up(self) -> None:
        self.process.kill()

    async def _ending(self) -> str:
        await self._reap(timeout_s=STOP_DEADLINE_S)
        return _describe_exit(self.process.returncode)

    async def stop(self) -> None:
        """Ask the child to stop, kill it if it does not, and reap it. Cancellation: finishes all the same."""
        with trio.CancelScope(shield=True):
            if self.process.poll() is None:
                with suppress(trio.BrokenResourceError), trio.move_on_after(STOP_DEADLINE_S):
                    async with self._sending:
                        await self._stream.send_all(pack(Stop()))
                    await self.process.wait()
            await self._reap(timeout_s=0)
            await self._stream.aclose()

    async def _reap(self, *, timeout_s: float) -> None:
        """Wait for a child that should be exiting; kill it if it lingers."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(timeout_s):
                await self.process.wait()
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()


@asynccontextmanager
async def running_child(
    *, memory: int, threads: int, log_path: str | None, processes: int = 1
) -> AsyncIterator[TrainerChild]:
    """Spawn a trainer that inherits the descriptor `memory`; stop and reap it on leaving.

    With several `processes`, each of so many `threads`, it is the one that starts the others and ends with them.

    Its output goes to the file `log_path`, or else to the logger `shoal.trainer`, line by line. The body must
    not let `ChildDied` or `ChildRaised` out: around it is a nursery, which would wrap them in a group.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(theirs)
        stack.callback(ours.close)
        output: IO[bytes] | int = subprocess.PIPE
        if log_path is not None:
            output = stack.enter_context(open(log_path, "ab"))  # noqa: ASYNC230  a local file, opened once
        process = await _spawn((theirs.fileno(), memory), processes, threads, output)
        theirs.close()  # or the end of the child would not be the end of the stream
        child = TrainerChild(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        async with trio.open_nursery() as nursery:
            if process.stdout is not None:
                nursery.start_soon(_log_lines, process.stdout)
            try:
                yield child
            finally:
                await child.stop()
                nursery.cancel_scope.deadline = trio.current_time() + LOG_DEADLINE_S


async def _spawn(descriptors: tuple[int, int], processes: int, threads: int, output: IO[bytes] | int) -> trio.Process:
    return await trio.lowlevel.open_process(
        [sys.executable, "-P", "-X", "faulthandler", *PROGRAM, *map(str, descriptors), str(processes)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        process_group=0,  # Ctrl-C goes to the daemon alone
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
    )


async def _log_lines(output: trio.abc.ReceiveStream) -> None:
    """Log what the child prints, a line at a time; a longer line than the limit is cut into several."""
    line = bytearray()
    async with output:
        async for data in output:
            line += data
            while (end := line.find(b"\n")) >= 0 or len(line) > LOG_LINE_LIMIT_BYTES:
                cut = min(end if end >= 0 else LOG_LINE_LIMIT_BYTES, LOG_LINE_LIMIT_BYTES)
                logger.info("%s", line[:cut].decode(errors="replace"))
                del line[: cut + (cut == end)]
    if line:
        logger.info("%s", line.decode(errors="replace"))


def _describe_exit(status: int | None) -> str:
    if status == EXIT_RANK_DIED:
        return "ended, since another of its processes died; its log says which"
    if status is None or status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
