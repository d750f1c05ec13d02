"""One agent process as the daemon holds it: spawned, spoken with, stopped, reaped.

`running_agent` owns the process from spawn to reaping. What comes of it is told by exceptions, as with a trainer:
`ChildDied` when it ended unasked, `ChildRaised` when it reported what its policy, tasks or scorers raised.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import trio

from shoal.node.sapo.agent_messages import AgentReport, Order, unpack_agent_report
from shoal.node.training.trainer_child import ChildDied, ChildRaised, TrainerChild
from shoal.node.training.trainer_messages import Failed, Stop, frame_of

__all__ = ["AgentChild", "ChildDied", "ChildRaised", "running_agent"]

STOP_DEADLINE_S = 10.0
"""From the order to stop to the end: one piece of a round, and a file to write."""
LOG_DEADLINE_S = 1.0
LOG_LINE_LIMIT_BYTES = 4096
PROGRAM = ("-m", "shoal.node.sapo.agent_process")

logger = logging.getLogger("shoal.agent")


class AgentChild(TrainerChild):
    """An agent that the daemon spawned."""

    async def order(self, order: Order) -> None:
        """Send an order; to a dead agent it goes nowhere, which `report` will notice.

        One that does not read for SEND_DEADLINE_S is killed. Cancellation: delivered whole or not at all.
        """
        await self.send_frame(frame_of(order))

    async def report(self) -> AgentReport:
        """The next report. Raises ChildDied at its end, ChildRaised in place of a `Failed`, LocalError for no report.

        Cancellation: nothing is lost.
        """
        report = unpack_agent_report(await self.receive_frame())
        if isinstance(report, Failed):
            raise ChildRaised(report)
        return report

    async def stop(self) -> None:
        """Let the agent save what it knows, and end it if that takes too long. Cancellation: finishes all the same."""
        with trio.CancelScope(shield=True):
            if self.process.poll() is None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(STOP_DEADLINE_S):
                    if not self._sending.locked():
                        await self._stream.send_all(frame_of(Stop()))
                    await self._drain()
            await self._reap(timeout_s=0)
            await self._stream.aclose()

    async def _drain(self) -> None:
        """Read what it still says, since it ends only once that is taken, until it has ended."""
        with suppress(ChildDied):
            while True:
                await self.receive_frame()


@asynccontextmanager
async def running_agent(*, threads: int) -> AsyncIterator[AgentChild]:
    """Spawn an agent; stop and reap it on leaving. Its output goes to the logger `shoal.agent`, line by line.

    The body must not let `ChildDied` or `ChildRaised` out: around it is a nursery, which would wrap them in a group.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(theirs)
        stack.callback(ours.close)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-X", "faulthandler", *PROGRAM, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # Ctrl-C goes to the daemon alone
            env={**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
        )
        theirs.close()  # or the end of the child would not be the end of the stream
        child = AgentChild(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        async with trio.open_nursery() as nursery:
            assert process.stdout is not None
            nursery.start_soon(_log_lines, process.stdout)
            try:
                yield child
            finally:
                await child.stop()
                nursery.cancel_scope.deadline = trio.current_time() + LOG_DEADLINE_S


async def _log_lines(output: trio.abc.ReceiveStream) -> None:
    """Log what the child prints, a line at a time; a longer line than the limit is cut."""
    line = b""
    async with output:
        async for data in output:
            *lines, line = (line + data).split(b"\n")
            for whole in [*lines, line] if len(line) > LOG_LINE_LIMIT_BYTES else lines:
                logger.info("%s", whole[:LOG_LINE_LIMIT_BYTES].decode(errors="replace"))
            line = b"" if len(line) > LOG_LINE_LIMIT_BYTES else line
    if line:
        logger.info("%s", line.decode(errors="replace"))
