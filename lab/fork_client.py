"""Nodes without the seconds that their imports take: a process that has imported everything, and forks.

    testnet ── start, reap ──► fork server (fork_server.py) ── fork ──► node: `python -m MODULE ARGUMENT…` from there on
       │                          ▲   └────────────────── fork ──► trainer ◄── messages, memory ── node
       └── signals ──► node ── spawn ──► forked_trainer.py, which stands for the trainer and ends as it does

A node is a process of its own with a session, a log and a trainer of its own, as one started by `nodes.start_process`;
only what Python does before its first line is done already. On Linux. The fork server and all its copies end with
whoever started it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import trio

from shoal.lab.fork_server import READY, REQUEST_LIMIT_BYTES, Answer, Reap, Request, Start, stand_in
from shoal.protocol.errors import LocalError
from shoal.testnet.nodes import Runtime, environment
from shoal.testnet.parent_death import ended_with_parent

PRELOAD: Final = (
    "shoal.cli.commands",
    "shoal.cli.run",
    "shoal.node.node",
    "shoal.node.sapo.policies",
    "shoal.node.training.trainer_process",
    "numpy.random",
    "typer.main",
)
"""Imports of a node and its trainer; who runs another workload imports that later."""
PRELOAD_DEADLINE_S: Final = 120.0
ASK_DEADLINE_S: Final = 30.0
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""A process with several threads cannot be copied; nodes of a testnet train with one each."""
_PYTHON: Final = (sys.executable, "-m")


class Forked:
    """A process that the fork server forked, to whoever asked for it what `subprocess.Popen` would be."""

    def __init__(self, client: ForkClient, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._client = client

    def wait(self) -> int:
        """Return how it ended; to be asked when it has. Where the fork server was killed, so was it."""
        if self.returncode is None:
            try:
                self.returncode = self._client.ask(Reap(pid=self.pid))
            except LocalError:
                self.returncode = -signal.SIGKILL
        return self.returncode


class ForkClient:
    """The testnet's end of the connection to its fork server."""

    def __init__(self, connection: socket.socket, trainers: str) -> None:
        self.trainer = stand_in(trainers)
        """As what a process that is no copy may start its trainer, which then is one (`trainer.PROGRAM`)."""
        self._connection = connection
        connection.settimeout(ASK_DEADLINE_S)

    def start(
        self,
        command: Sequence[str],
        log: Path,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        errors: Path | None = None,
    ) -> Forked:
        """Start what `command` says, which is to run a Python module or script; its output goes to `log`.

        folder and environment: where it runs, and in what; the fork server's own if None. errors: the file of its
        standard error, if another. Raises LocalError.
        """
        if not can_copy(command):
            raise LocalError(f"a fork server starts a module of Python or a script, not {' '.join(command)}")
        program, *arguments = command[2:] if command[1] == "-m" else command[1:]
        start = Start(
            program=program,
            arguments=tuple(arguments),
            log=str(log.absolute()),
            errors="" if errors is None else str(errors.absolute()),
            folder="" if folder is None else str(folder.absolute()),
            environment=environment,
        )
        return Forked(self, self.ask(start))

    def ask(self, request: Request) -> int:
        """The answer to a request. Blocks, for milliseconds. Raises LocalError if the fork server is gone."""
        try:
            self._connection.send(msgspec.json.encode(request))
            answer = self._connection.recv(REQUEST_LIMIT_BYTES)
        except OSError as error:
            raise LocalError(f"the fork server does not answer: {error}") from error
        if not answer:
            raise LocalError("the fork server ended")
        return msgspec.json.decode(answer, type=Answer).number


def can_copy(command: Sequence[str]) -> bool:
    """True for a command that has this Python run a module, or a script by its full path."""
    return len(command) > 1 and command[0] == sys.executable and (command[1] == "-m" or command[1].startswith("/"))


@asynccontextmanager
async def forking(preload: Sequence[str] = PRELOAD) -> AsyncIterator[Runtime]:
    """Start nodes as copies of a process that has imported `preload`. To be entered in the main thread.

    Raises LocalError if it does not come up. However the block ends, neither the fork server nor a copy of it is left.
    """
    with _serving(preload) as (connection, trainers):
        with trio.move_on_after(PRELOAD_DEADLINE_S):
            await trio.lowlevel.wait_readable(connection)
        connection.setblocking(False)
        yield Runtime(start=_client(connection, trainers).start)


@contextmanager
def fork_client(preload: Sequence[str] = PRELOAD) -> Iterator[ForkClient]:
    """As `forking`, for whoever has no event loop. Blocks until the modules are imported."""
    with _serving(preload) as (connection, trainers):
        connection.settimeout(PRELOAD_DEADLINE_S)
        yield _client(connection, trainers)


def _client(connection: socket.socket, trainers: str) -> ForkClient:
    if _received(connection) != READY:
        raise LocalError("the fork server did not come up: see what it said above")
    return ForkClient(connection, trainers)


@contextmanager
def _serving(preload: Sequence[str]) -> Iterator[tuple[socket.socket, str]]:
    """A fork server that imports these, which is over at the end; yields the connection to it, and its TRAINERS."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="shoal-forks-"))
        ours, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        trainers = str(Path(folder) / "trainers.sock")
        process = _start_server([str(theirs.fileno()), trainers, *preload], theirs.fileno())
        stack.callback(process.wait)
        stack.callback(process.kill)
        theirs.close()
        yield ours, trainers


def _start_server(arguments: Sequence[str], control: int) -> subprocess.Popen[bytes]:
    """Start it by this thread, as `nodes.start_process` starts a node."""
    return subprocess.Popen(
        ended_with_parent([*_PYTHON, "shoal.lab.fork_server", *arguments]),
        stdin=subprocess.DEVNULL,
        pass_fds=(control,),
        env=environment() | ONE_THREAD,
        start_new_session=True,
    )


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(REQUEST_LIMIT_BYTES)
    except OSError:
        return b""
