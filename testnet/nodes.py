"""The node processes of a testnet: started, watched, signalled and always reaped.

Every node leads a session of its own, so that Ctrl-C does not reach it; a trainer ends or waits when its node does.
Whoever runs `NodeProcess.run` owns the process: however that ends, no process is left. Where this process is killed it
ends nothing any more, and the kernel ends the nodes (see `parent_death`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import trio

from shoal.node.control_client import ControlRefused, JsonValue, request
from shoal.node.options import Hold
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import LogTail
from shoal.node.reporting.events import Listening, RoundEnded
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.testnet.journal import Journal
from shoal.testnet.links.namespaces import LOOPBACK, Place
from shoal.testnet.parent_death import ended_with_parent
from shoal.testnet.throttle import hold_to, processes_of
from shoal.testnet.wall_clock import TrueTimes, WallClock

POLL_S: Final = 0.02
REAP_DEADLINE_S: Final = 10.0
CONTROL_DEADLINE_S: Final = 10.0
REFUSED: Final = 2
REFUSAL: Final = ("is in use elsewhere", "--take-over")
"""How a node ends that sees its key in use elsewhere, and words of its last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings in which one start of a node differs from another.

    rounds: after how many it stops by itself, None for never. place: where it runs. workload: that of the manifest,
    which the testnet wrote. site: of which it says that it is. clock: the file of the wall clock that it has, None for
    the machine's. take_over: its user says that no other copy of its folder is in use.
    """

    manifest: Path
    data_dir: Path
    join: tuple[str, ...] = ()
    rounds: int | None = None
    holds: tuple[Hold, ...] = ()
    place: Place = LOOPBACK
    workload: str = ""
    site: str | None = None
    clock: Path | None = None
    take_over: bool = False


def node_command(launch: Launch) -> list[str]:
    """The command line of a real node."""
    place = launch.place
    clock = () if launch.clock is None else ("shoal.testnet.wall_clock", str(launch.clock))
    command = [*place.enter, sys.executable, "-m", *clock, "shoal.cli.main", "run", str(launch.manifest)]
    command += ["--data-dir", str(launch.data_dir), "--listen", f"/ip4/{place.host}/tcp/{place.control_port}"]
    command += ["--lane-listen", f"{place.host}:{place.lane_port}"]
    command += ["--dashboard", "off", "--no-mdns", "--threads", "1", "--test-mode"]
    if ":" in launch.workload:
        command += ["--allow-workload", launch.workload]
    if launch.site is not None:
        command += ["--site", launch.site]
    for address in launch.join:
        command += ["--join", address]
    for hold in launch.holds:
        command += ["--hold", f"{hold.round}:{hold.phase}:{hold.progress}"]
    if launch.rounds is not None:
        command += ["--rounds", str(launch.rounds)]
    if launch.take_over:
        command.append("--take-over")
    return command


class Ask(Protocol):
    """Asks a running node for one thing; blocks. Raises as `shoal.node.control_client.request` does."""

    def __call__(self, data_dir: Path, op: str, *arguments: str, deadline_s: float) -> dict[str, JsonValue]: ...


class Started(Protocol):
    """A process that was started: what is needed of `subprocess.Popen`. returncode: None until it was waited for."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int:
        """Return its exit code when it has ended, or less than zero if a signal ended it."""
        ...


def environment() -> dict[str, str]:
    """This process's environment without Shoal's own settings: a scenario means the same wherever it is run."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}


def start_process(command: Sequence[str], log: Path) -> Started:
    """Start a node by this thread, which runs the event loop: the process lives no longer than its parent thread."""
    with log.open("ab") as file:
        return subprocess.Popen(
            ended_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Kind of a testnet's nodes: real ones, or stand-ins in tests of the testnet itself.

    start: makes a process of a command line, in a session of its own, with its output at the end of a file. poll_s: how
    often a node's log is looked at.
    """

    command: Callable[[Launch], list[str]] = node_command
    ask: Ask = request
    start: Callable[[Sequence[str], Path], Started] = start_process
    poll_s: float = POLL_S


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One process of a node, from its start to its end; `ended_at` and `exit_code` are None while it runs.

    said_before: how many bytes the processes before it have printed.
    """

    pid: int
    started_at: float
    said_before: int = 0
    ended_at: float | None = None
    exit_code: int | None = None
    ended: trio.Event = field(default_factory=trio.Event)


class NodeProcess:
    """One node: its folder and, while it has one, its process.

    `struck` says what a fault did to it last ("killed", "left", "full", or "refused" for a folder that was put back),
    None if nothing that explains its end. `clock`: its own, None for the machine's. `put_back`: its folder is an old
    copy, so it may refuse to go on. `take_over`: its next start, and no other, says that this copy is to go on.
    """

    def __init__(self, index: int, folder: Path, journal: Journal, runtime: Runtime) -> None:
        self.index = index
        self.folder = folder
        self.peer_id: PeerId = Identity.load_or_create(folder / "node.key").peer_id
        self.lives: list[Life] = []
        self.stopped = False
        self.struck: str | None = None
        self.clock: WallClock | None = None
        self.put_back = self.take_over = False
        self._true_times: TrueTimes | None = None
        self._share: float | None = None
        self._share_changed = trio.Event()
        self._journal = journal
        self._runtime = runtime
        self._tail = LogTail(folder / LOG_NAME)

    @property
    def alive(self) -> bool:
        """True if it has a process, running or stopped."""
        return bool(self.lives) and self.lives[-1].ended_at is None

    @property
    def throttled(self) -> bool:
        """True if it has a share of one core alone."""
        return self._share is not None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses on which it was last seen to listen; empty if its present process does not listen yet."""
        started_at = self.lives[-1].started_at if self.alive else float("inf")
        fresh = [event for event in self._journal.of(Listening, self.index) if event.at >= started_at]
        return fresh[-1].addresses if fresh else ()

    def certified(self, round: int) -> bool:
        """True if it certified this round itself."""
        return any(event.round == round for event in self._journal.of(RoundEnded, self.index))

    async def run(self, launch: Launch) -> None:
        """Start a process and read its events into the journal until it has ended.

        Cancellation: the process is killed, with all its group, and reaped.
        """
        self.stopped, self.struck, self._share = False, None, None
        started_at = time.time()  # before the process is there: it may have logged something when `start` returns
        log = self.folder / "log.txt"
        said_before = log.stat().st_size if log.exists() else 0
        process = self._runtime.start(self._runtime.command(launch), log)
        life = Life(pid=process.pid, started_at=started_at, said_before=said_before)
        self.lives.append(life)
        self._journal.poke()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                nursery.start_soon(self._hold_to_share, process.pid)
                await _ended(process)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _reap(process)
            self._read_events()
            life.ended_at, life.exit_code = time.time(), process.returncode
            if self.put_back and self.struck is None and self._refused(life):
                self.struck = "refused"
            life.ended.set()
            self._journal.poke()

    async def _watch(self) -> None:
        while True:
            self._read_events()
            await trio.sleep(self._runtime.poll_s)

    def _read_events(self) -> None:
        for event in self._tail.read():
            self._journal.add(self.index, event if self._true_times is None else self._true_times.of(event))

    def give_clock(self, path: Path) -> None:
        """Give its processes, from its next start on, a wall clock of their own in the file `path`."""
        self.clock = WallClock(path)
        self._true_times = TrueTimes(self.clock.changes)

    def _refused(self, life: Life) -> bool:
        """True if it ended, in order, since its key is in use elsewhere, and said what its user can do."""
        with (self.folder / "log.txt").open("rb") as file:
            file.seek(life.said_before)
            said = file.read().decode(errors="replace")
        last = said.rstrip().rpartition("\n")[2]
        return life.exit_code == REFUSED and "Traceback" not in said and all(words in last for words in REFUSAL)

    async def _hold_to_share(self, group: int) -> None:
        """Hold its processes to the share that `throttle` says, as long as there is one."""
        while True:
            share, changed = self._share, self._share_changed
            async with trio.open_nursery() as nursery:
                if share is not None:
                    nursery.start_soon(hold_to, group, share, lambda: self.stopped)
                await changed.wait()
                nursery.cancel_scope.cancel()

    def throttle(self, share: float | None) -> None:
        """Let the node and its trainer have only so much of one core from now on; None lets them have all again.

        Raises NetworkError if it has no process, or was killed.
        """
        if share is not None and (not self.alive or self.struck == "killed"):
            raise NetworkError(f"node {self.index} is not running")
        self._share = share
        self._share_changed.set()
        self._share_changed = trio.Event()

    def limit_files(self, limit: int) -> None:
        """Let no file of the node and its trainer grow beyond so many bytes; `resource.RLIM_INFINITY` ends that.

        Blocks for some milliseconds. Raises NetworkError if it has no process.
        """
        if not self.alive:
            raise NetworkError(f"node {self.index} is not running")
        for process in processes_of(self.lives[-1].pid):
            with contextlib.suppress(ProcessLookupError):  # one that ended this moment
                _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, most))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the node and its trainer. Raises NetworkError if it has no process, or was killed."""
        if not self.alive or self.struck == "killed":
            raise NetworkError(f"node {self.index} is not running")
        _signal_group(self.lives[-1].pid, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.stopped = number == signal.SIGSTOP

    async def ask(self, op: str, *arguments: str) -> dict[str, JsonValue]:
        """Ask the node for one thing through its control socket, and return its reply.

        Raises NetworkError if it is not running, does not answer in time, or refuses.
        Cancellation abandons the request.
        """
        ask = partial(self._runtime.ask, self.folder, op, *arguments, deadline_s=CONTROL_DEADLINE_S)
        try:
            return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except (ConfigError, ControlRefused, NetworkError) as error:
            raise NetworkError(f"node {self.index} did not {op}: {error}") from error


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself this moment
        os.killpg(pid, number)


async def _ended(process: Started) -> None:
    """Wait until it has ended, and reap it. Cancellation leaves it running."""
    if sys.platform != "linux":
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return
    if process.returncode is not None:
        return
    watched = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(watched)
    finally:
        trio.lowlevel.notify_closing(watched)
        os.close(watched)
    process.wait()


async def _reap(process: Started) -> None:
    """End the process with its group if it still runs, and wait until it is gone.

    A process that was waited for already is left alone: its number may belong to somebody else by now.
    """
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGKILL)
    with trio.fail_after(REAP_DEADLINE_S):
        await _ended(process)
