"""hivemind from outside: its process, started, fed with orders and ended. A second table of meeting points; a relay.

    node ── orders ──► the process `hivemind_process` ── control socket ──► p2pd, hivemind's Go daemon
         ◄─ reports ──                                                       │
                                                       other hivemind DHT nodes, circuits for others

Nothing waits for it for ever: the start, each order and the end have deadlines. A process that dies is started again
after a pause that grows. It is in a process group of its own, so that its daemon ends with it, and it ends by itself
when its standard input does, as it does when the node is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable

import trio

from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.wire import SwarmId
from shoal.swarm.rendezvous.hivemind_messages import (
    LENGTH_BYTES,
    Failed,
    Found,
    Get,
    Order,
    Put,
    Ready,
    Report,
    Start,
    Stored,
    frame,
    length_of,
    read_report,
)
from shoal.swarm.rendezvous.meeting_points import SLOTS, keys_of, open_point, slot_key

START_DEADLINE_S = 120.0
"""Until the process has imported hivemind, started its daemon and reached a peer."""
ORDER_DEADLINE_S = 60.0
END_DEADLINE_S = 15.0
KILL_DEADLINE_S = 5.0
RESTART_S, RESTART_LIMIT_S = 5.0, 300.0
"""Between two starts, doubled each time; as at first after one that got ready."""
LOG_LINE_LIMIT_BYTES = 500
LOG_READ_BYTES = 16 << 10
PENDING_LIMIT = 64

_PEER = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:_-]{1,253}/(tcp|udp)/\d{1,5}(/quic|/quic-v1)?/p2p/[1-9A-HJ-NP-Za-km-z]{20,100}",
    re.ASCII,
)

logger = logging.getLogger(__name__)


def check_installed(what: str) -> None:
    """Raises ConfigError, naming `what` asks for it, where hivemind is not installed."""
    if importlib.util.find_spec("hivemind") is None:
        raise ConfigError(f"{what} needs hivemind; install it with: pip install 'shoal[hivemind]'")


def check_peers(addresses: Iterable[str], what: str) -> None:
    """Raises ConfigError, naming `what` asks for them, for one that is no address, or where hivemind is not installed.

    An address goes into the command line of hivemind's daemon as it is.
    """
    for text in addresses:
        if not _PEER.fullmatch(text):
            raise ConfigError(f"{what}: {text!r} is no peer's address, like /ip4/192.0.2.7/tcp/31337/p2p/12D3KooW…")
    check_installed(what)


class HivemindFailed(NetworkError):
    """The process did not get ready, or carried out no order; the text says why."""


class Hivemind:
    """The process, kept running: a service of the daemon, and a table for `shoal.node.discovery.rendezvous`.

    swarm_id: whose points `look_up` looks for; None where there is no swarm to look for.
    """

    def __init__(
        self, swarm_id: SwarmId | None, start: Start, *, on_ready: Callable[[Ready], None] | None = None
    ) -> None:
        self._swarm_id = swarm_id
        self._start = start
        self._on_ready = on_ready
        self._ids = itertools.count(1)
        self._pending: dict[int, trio.MemorySendChannel[Report]] = {}
        self._process: trio.Process | None = None
        self._ready = trio.Event()
        self._sending = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the process running until cancelled; started at once. Cancellation ends it, within END_DEADLINE_S."""
        task_status.started()
        restarts = Backoff(RESTART_S, RESTART_LIMIT_S)
        restarts.next_s()  # the first pause is for a process that was ready
        while True:
            was_ready = False
            try:
                await self.run_once()
            except HivemindFailed as error:
                was_ready = self._ready.is_set()
                logger.warning("hivemind: %s", error)
            finally:
                self._ready = trio.Event()
            if was_ready:
                restarts.reset()
            await trio.sleep(restarts.next_s())

    async def run_once(self) -> None:
        """One life of the process, which cancellation ends. Raises HivemindFailed when it ends or gets nowhere."""
        failure: HivemindFailed | None = None
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "shoal.swarm.rendezvous.hivemind_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._log, process)
                try:
                    await self._live(process)
                except HivemindFailed as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            self._process = None
            self._pending.clear()
            with trio.CancelScope(shield=True):
                await _end(process)
        if failure is not None:
            raise failure

    async def _live(self, process: trio.Process) -> None:
        reports = _Reports(process)
        self._process = process
        with trio.move_on_after(START_DEADLINE_S) as starting:
            await self._send(self._start)
            first = await reports.next()
        if starting.cancelled_caught:
            raise HivemindFailed(f"its process was not ready within {START_DEADLINE_S:g} s")
        if not isinstance(first, Ready):
            raise HivemindFailed(first.reason if isinstance(first, Failed) else "its process answers out of turn")
        self._ready.set()
        if self._on_ready is not None:
            self._on_ready(first)
        while True:
            report = await reports.next()
            waiting = None if isinstance(report, Ready) else self._pending.pop(report.id, None)
            if waiting is not None:
                waiting.send_nowait(report)

    async def _log(self, process: trio.Process) -> None:
        """Log what hivemind and its daemon say, cut to size, as debug lines."""
        assert process.stderr is not None
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await process.stderr.receive_some(LOG_READ_BYTES):
                for line in data.splitlines():
                    logger.debug("hivemind: %s", line[:LOG_LINE_LIMIT_BYTES].decode(errors="replace"))

    # -- orders ------------------------------------------------------------------------------------------------

    async def _send(self, order: Order) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise HivemindFailed("its process does not run")
        try:
            async with self._sending:
                await process.stdin.send_all(frame(order))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise HivemindFailed("its process ended") from None

    async def _order(self, order: Put | Get) -> Report:
        """Carry out an order once the process is ready. Raises HivemindFailed. Cancellation: it may be carried out."""
        if len(self._pending) >= PENDING_LIMIT:
            raise HivemindFailed(f"{PENDING_LIMIT} orders wait already")
        report: Report | None = None
        answer, wait = trio.open_memory_channel[Report](1)
        try:
            with trio.move_on_after(ORDER_DEADLINE_S), answer, wait:
                await self._ready.wait()
                self._pending[order.id] = answer
                await self._send(order)
                report = await wait.receive()
        finally:
            self._pending.pop(order.id, None)
        if report is None:
            raise HivemindFailed(f"an order was not carried out within {ORDER_DEADLINE_S:g} s")
        if isinstance(report, Failed):
            raise HivemindFailed(report.reason)
        return report

    def know(self, addresses: Iterable[str]) -> None:
        """Its peers are hivemind's own, so Shoal's are of no use to it."""

    async def announce(self, signed: bytes) -> int:
        """Store a signed point; under how many keys. Raises HivemindFailed."""
        point = open_point(signed)
        keys = tuple(key.decode() for key in keys_of(point))
        order = Put(id=next(self._ids), keys=keys, name=point.peer, value=signed, valid_s=point.valid_s)
        report = await self._order(order)
        return report.keys if isinstance(report, Stored) else 0

    async def look_up(self) -> list[bytes]:
        """Signed points, as the DHT has them: not checked. Raises HivemindFailed."""
        if self._swarm_id is None:
            return []
        keys = tuple(slot_key(self._swarm_id, slot).decode() for slot in range(SLOTS))
        report = await self._order(Get(id=next(self._ids), keys=keys))
        return list(report.values) if isinstance(report, Found) else []


class _Reports:
    """Whole reports from the process's standard output."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._buffer = bytearray()

    async def next(self) -> Report:
        """Raises HivemindFailed at the end, or for what is no report."""
        try:
            head = await self._exactly(LENGTH_BYTES)
            return read_report(await self._exactly(length_of(head)))
        except RemoteError as error:
            raise HivemindFailed(f"its process answers nonsense: {error}") from None

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                data = await self._stream.receive_some(LOG_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise HivemindFailed("its process ended")
            self._buffer += data
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


async def _end(process: trio.Process) -> None:
    """End the process in order, by the end of its input, else by force; its daemon goes with its group (bounded)."""
    if process.stdin is not None:
        await process.stdin.aclose()
    with trio.move_on_after(END_DEADLINE_S):
        await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with trio.move_on_after(KILL_DEADLINE_S):
        await process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            await stream.aclose()
