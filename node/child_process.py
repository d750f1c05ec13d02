"""One child process as the daemon holds it: spawned, spoken with over a framed pipe, stopped, reaped.

`running_child` owns the process from spawn to reaping. What comes of it is told by exceptions: `ChildDied` when it
ended unasked, `ChildRaised` when it reported what the user's code raised. Whoever runs it says which program, which
messages, and what to do about its end; how often a kind of child may die is counted by `Deaths`. The child's end of the
pipe is `pipe.ParentPipe`, which ends the process when the daemon is gone. `Connection` is the part that does not care
whose process it is.
"""

from __future__ import annotations

import array
import logging
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from shoal.node.pipe import EXIT_RANK_DIED, READ_BYTES, SEVERITIES, Failed, Framing, Message, Stop, frame_of

SEND_DEADLINE_S = 30.0
REAP_DEADLINE_S = 2.0
"""From the end of a child's stream to the end of its process."""
LOG_DEADLINE_S = 1.0
LOG_LINE_LIMIT_BYTES = 4096
RESTART_LIMIT = 3
"""Deaths within RESTART_WINDOW_S after which a child is started again."""
RESTART_WINDOW_S = 600.0
"""Of work: a wait for a child that hung is no time in which it did well, however long it is."""
RESTART_PAUSE_S = 0.5

Report = TypeVar("Report")


class ChildDied(Exception):
    """The child ended, or had to be ended, without being asked to; the text says how.

    waited_s: how long it was waited for in vain, if it was ended for that.
    """

    def __init__(self, how: str, *, waited_s: float = 0.0) -> None:
        super().__init__(how)
        self.waited_s = waited_s


class ChildRaised(Exception):
    """The child reported what the user's code raised."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.summary)
        self.failed = failed


class Connection(ABC, Generic[Report]):
    """The daemon's end of a pipe: one task receives, any task sends."""

    def __init__(self, stream: trio.SocketStream, *, pid: int, unpack: Callable[[bytes], Report]) -> None:
        self.pid = pid
        self._stream = stream
        self._unpack = unpack
        self._sending = trio.Lock()
        self._framing = Framing()
        self._frames: deque[bytes] = deque()

    @abstractmethod
    def _give_up(self) -> None:
        """End a child that reads no orders, or at least the stream."""

    @abstractmethod
    async def _ending(self) -> str:
        """The stream ended: say how its process did."""

    async def send(self, message: Message, *, lent: int | None = None) -> None:
        """Send an order; to a dead child it goes nowhere, which `receive` will notice. lent: a descriptor with it.

        A child that does not read for `SEND_DEADLINE_S` is given up. Cancellation: delivered whole or not at all, since
        half a frame would garble what follows.
        """
        data = frame_of(message)
        async with self._sending:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_DEADLINE_S) as scope:
                try:
                    await self._send_all(data, lent)
                except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                    return
            if scope.cancelled_caught:
                logging.getLogger(__name__).warning("child %d reads no orders; ending it", self.pid)
                self._give_up()

    async def _send_all(self, data: bytes, lent: int | None) -> None:
        """Send a frame, and a descriptor beside its first byte. Raises what trio does, and OSError."""
        if lent is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lent]))]
            data = data[await self._stream.socket.sendmsg([data], rights) :]
        if data:
            await self._stream.send_all(data)

    async def receive(self) -> Report:
        """Return the next report. Raises `ChildDied` at its end, `ChildRaised` in place of a `Failed`, LocalError.

        Cancellation: nothing is lost.
        """
        report = self._unpack(await self.receive_frame())
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

    async def _say_stop(self, deadline_s: float) -> None:
        """Ask the other end to stop, if it reads. Cancellation: it is asked all the same."""
        gone = suppress(trio.BrokenResourceError, trio.ClosedResourceError)
        with trio.CancelScope(shield=True), trio.move_on_after(deadline_s), gone:
            async with self._sending:
                await self._stream.send_all(frame_of(Stop()))


class Child(Connection[Report]):
    """A process that the daemon spawned."""

    def __init__(
        self, process: trio.Process, stream: trio.SocketStream, *, unpack: Callable[[bytes], Report], stop_s: float
    ) -> None:
        super().__init__(stream, pid=process.pid, unpack=unpack)
        self.process = process
        self._stop_s = stop_s

    def _give_up(self) -> None:
        self.process.kill()

    async def _ending(self) -> str:
        await self._reap(timeout_s=REAP_DEADLINE_S)
        return _describe_exit(self.process.returncode)

    async def stop(self) -> None:
        """Ask the child to stop, kill it if it does not within `stop_s`, and reap it.

        What it still says is read, since it may end only once that is taken. Cancellation: finishes all the same.
        """
        with trio.CancelScope(shield=True):
            if self.process.poll() is None:
                with trio.move_on_after(self._stop_s):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._drain)
                        await self._say_stop(self._stop_s)
                        await self.process.wait()
                        nursery.cancel_scope.cancel()
            await self._reap(timeout_s=0)
            await self._stream.aclose()

    async def _drain(self) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await self._stream.receive_some(READ_BYTES):
                pass

    async def _reap(self, *, timeout_s: float) -> None:
        """Wait for a child that should be exiting; kill it if it lingers."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(timeout_s):
                await self.process.wait()
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Spawned:
    """A process that was spawned, and the daemon's end of its pipe."""

    process: trio.Process
    stream: trio.SocketStream

    async def end(self) -> None:
        """Kill and reap it. Cancellation: it is killed."""
        self.process.kill()
        await self.process.wait()
        if self.process.stdout is not None:
            await self.process.stdout.aclose()
        await self.stream.aclose()


async def spawn(
    program: Sequence[str],
    *arguments: int,
    threads: int = 0,
    inherited: Sequence[int] = (),
) -> Spawned:
    """Spawn ``python PROGRAM PIPE ARGUMENT…``; what is given is as for `running_child`.

    Cancellation: there is a process to be ended, or none.
    """
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-X", "faulthandler", *program, str(theirs.fileno()), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), *inherited),
            process_group=0,  # Ctrl-C goes to the daemon alone
            env={**os.environ, **limits},
        )
        undo.pop_all()
        return Spawned(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))


@asynccontextmanager
async def running_child(
    program: Sequence[str],
    *arguments: int,
    unpack: Callable[[bytes], Report],
    stop_s: float,
    logger: logging.Logger,
    threads: int = 0,
    inherited: Sequence[int] = (),
    spawned: Spawned | None = None,
) -> AsyncIterator[Child[Report]]:
    """Run ``python PROGRAM PIPE ARGUMENT…``, where PIPE is the descriptor of its end; stop and reap it on leaving.

    unpack: of its reports, `Failed` among them. stop_s: from the order to stop to its end. threads: for its arithmetic,
    0 for as many as its libraries like. inherited: descriptors that it gets beside the pipe. Its output goes to
    `logger`, line by line. spawned: one that was spawned so already, to be run.

    The body must not let `ChildDied` or `ChildRaised` out: around it is a nursery, which would wrap them in a group.
    """
    if spawned is None:
        spawned = await spawn(program, *arguments, threads=threads, inherited=inherited)
    process = spawned.process
    child = Child(process, spawned.stream, unpack=unpack, stop_s=stop_s)
    async with trio.open_nursery() as nursery:
        if process.stdout is not None:
            nursery.start_soon(_log_lines, process.stdout, logger)
        try:
            yield child
        finally:
            await child.stop()
            nursery.cancel_scope.deadline = trio.current_time() + LOG_DEADLINE_S


async def _log_lines(output: trio.abc.ReceiveStream, logger: logging.Logger) -> None:
    """Log what the child prints, a line at a time; a longer line than the limit is cut into several."""
    line = bytearray()
    async with output:
        async for data in output:
            line += data
            while (end := line.find(b"\n")) >= 0 or len(line) > LOG_LINE_LIMIT_BYTES:
                cut = min(end if end >= 0 else LOG_LINE_LIMIT_BYTES, LOG_LINE_LIMIT_BYTES)
                _log_line(line[:cut].decode(errors="replace"), logger)
                del line[: cut + (cut == end)]
    if line:
        _log_line(line.decode(errors="replace"), logger)


def _log_line(text: str, logger: logging.Logger) -> None:
    level = next((level for level, severity in SEVERITIES.items() if text.startswith(severity)), logging.INFO)
    logger.log(level, "%s", text.removeprefix(SEVERITIES.get(level, "")))


def _describe_exit(status: int | None) -> str:
    if status == EXIT_RANK_DIED:
        return "ended, since another of its processes died; its log says which"
    if status is None or status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Deaths:
    """The deaths of one kind of child, which is started again after each, until there are too many in a while."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._at: deque[float] = deque(maxlen=RESTART_LIMIT)
        self._waited_s = 0.0

    async def count(self, died: ChildDied) -> str | None:
        """Note one more, and return after a pause; or at once, with the reason, where it was one too many."""
        self._waited_s += died.waited_s
        now = trio.current_time() - self._waited_s
        if len(self._at) == RESTART_LIMIT and now - self._at[0] < RESTART_WINDOW_S:
            return f"{self._what} died {RESTART_LIMIT + 1} times within {RESTART_WINDOW_S:g} s of work; last: {died}"
        self._at.append(now)
        await trio.sleep(RESTART_PAUSE_S)
        return None
