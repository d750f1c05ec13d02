"""The fork server: imports modules, and then forks a copy of itself for each node and trainer that is to be started.

    python -m shoal.lab.fork_server CONTROL TRAINERS MODULE…

CONTROL is an inherited socket of packets, over which the testnet asks (see fork_client.py); at its end the fork server
ends, and the kernel ends its copies. TRAINERS is where it listens for forked_trainer.py. A copy is made only of a
process with one thread, so this one starts none, and refuses modules that do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from shoal.node.training import trainer
from shoal.testnet.parent_death import tie_to

READY: Final = b"ready"
REQUEST_LIMIT_BYTES: Final = 1 << 16
HELLO_DEADLINE_S: Final = 5.0
TRAINER: Final = "shoal.node.training.trainer_start"
STAND_IN: Final = Path(__file__).with_name("forked_trainer.py")
_DESCRIPTORS: Final = 4


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a program, in a session of its own, with its output at the end of the file `log`. The answer is its pid.

    program: a module, or the absolute path of a script. errors: the file of its standard error, if another. folder:
    where it runs, and its trainer; the fork server's own if empty. environment: of the program alone, its trainer has
    the fork server's; if None it has that too.
    """

    program: str
    arguments: tuple[str, ...]
    log: str
    errors: str = ""
    folder: str = ""
    environment: dict[str, str] | None = None


class Reap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bury a copy that has ended. The answer is its exit code, or less than zero if a signal ended it."""

    pid: int


Request: TypeAlias = Start | Reap
Role: TypeAlias = Callable[[], None]
"""Program that a copy goes on as."""


class Answer(msgspec.Struct, frozen=True):
    """Answer to every request."""

    number: int


class Server:
    """The loop of the fork server. It returns in every copy too."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self._control = control
        self._listener = listener
        self._trainers: dict[int, tuple[int, socket.socket]] = {}  # by pid: its pidfd, its stand-in
        self._over = False
        self._ready: selectors.BaseSelector = selectors.DefaultSelector()
        self._ready.register(control, selectors.EVENT_READ, self._follow)
        self._ready.register(listener, selectors.EVENT_READ, self._admit)

    def serve(self) -> Role | None:
        """Do what is asked for until CONTROL ends, which returns None; in a copy, return its role."""
        while not self._over:
            for key, _ in self._ready.select()[:1]:  # the first may do away with the second
                role: Role | None = key.data()
                if role is not None:
                    return role
        return None

    def _follow(self) -> Role | None:
        data = self._control.recv(REQUEST_LIMIT_BYTES)
        if not data:
            self._over = True
            return None
        request = msgspec.json.decode(data, type=Request)
        if isinstance(request, Start):
            number = self._fork()
            if number == 0:
                return partial(_be_node, request)
        else:
            number = _status(request.pid)
        self._control.send(msgspec.json.encode(Answer(number)))
        return None

    def _admit(self) -> Role | None:
        """Fork the trainer that a stand-in asks for, whose descriptors it is to have."""
        stand_in, _ = self._listener.accept()
        stand_in.settimeout(HELLO_DEADLINE_S)
        try:
            said, descriptors, *_ = socket.recv_fds(stand_in, REQUEST_LIMIT_BYTES, _DESCRIPTORS)
        except OSError:
            stand_in.close()
            return None
        if len(descriptors) < _DESCRIPTORS:  # it was killed before it had said anything
            stand_in.close()
            return None
        pid = self._fork()
        if pid == 0:
            stand_in.close()
            processes, folder = said.decode().split(" ", 1)
            return partial(_be_trainer, processes, folder, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._trainers[pid] = pidfd, stand_in
        self._ready.register(pidfd, selectors.EVENT_READ, partial(self._trainer_ended, pid))
        self._ready.register(stand_in, selectors.EVENT_READ, partial(self._stand_in_ended, pid))
        return None

    def _trainer_ended(self, pid: int) -> None:
        pidfd, stand_in = self._trainers.pop(pid)
        self._ready.unregister(pidfd)
        os.close(pidfd)
        status = _status(pid)
        if stand_in in self._ready.get_map():
            self._ready.unregister(stand_in)
            with contextlib.suppress(OSError):  # killed at this moment
                stand_in.send(str(status).encode())
        stand_in.close()

    def _stand_in_ended(self, pid: int) -> None:
        """Kill the trainer whose stand-in was killed."""
        _, stand_in = self._trainers[pid]
        self._ready.unregister(stand_in)
        os.kill(pid, signal.SIGKILL)

    def _fork(self) -> int:
        """Fork; returns the copy's pid, and 0 in the copy, which keeps nothing of what is the fork server's alone."""
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        begun, begins = os.pipe()
        if pid := os.fork():
            os.close(begins)
            os.read(begun, 1)  # nobody may signal its session before there is one
            os.close(begun)
            return pid
        if not tie_to(server):
            os._exit(1)
        os.setsid()
        os.close(begun)
        os.close(begins)
        self._ready.close()
        self._control.close()
        self._listener.close()
        for pidfd, stand_in in self._trainers.values():
            os.close(pidfd)
            stand_in.close()
        return 0


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_node(start: Start) -> None:
    output, errors = (
        os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) for path in (start.log, start.errors or start.log)
    )
    _take_streams(output, errors)
    os.close(output)
    os.close(errors)
    if start.folder:
        os.chdir(start.folder)
        sys.path[0] = start.folder  # as where `python -m` is called
    if start.environment is not None:
        os.environ.clear()
        os.environ.update(start.environment)
    _run(start.program, start.arguments)


def _be_trainer(processes: str, folder: str, descriptors: Sequence[int]) -> None:
    control, memory, output, errors = descriptors
    _take_streams(output, errors)
    os.close(output)
    os.close(errors)
    os.chdir(folder)
    faulthandler.enable()
    _run(TRAINER, (str(control), str(memory), processes))


def _take_streams(output: int, errors: int) -> None:
    """Make these descriptors the standard streams; there is no input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, stream)
    os.close(nothing)


def _run(program: str, arguments: Sequence[str]) -> None:
    """Run a module or a script as ``python`` does with those arguments. Raises SystemExit when that ends with it."""
    sys.argv[:] = [program, *arguments]
    if os.path.isabs(program):
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def stand_in(trainers: str) -> tuple[str, ...]:
    """The program that a daemon starts in place of a trainer, where a fork server listens at `trainers`."""
    return ("-I", "-S", str(STAND_IN), trainers)


def _preload(modules: Sequence[str], trainers: str) -> None:
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a copy that looks at all this would have to copy its memory
    trainer.PROGRAM = stand_in(trainers)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{', '.join(modules)} started {threads - 1} threads: no copy of them can be made")


def main(arguments: list[str]) -> None:
    """Be the fork server, or one of its copies."""
    descriptor, trainers, *modules = arguments
    control = socket.socket(fileno=int(descriptor))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(trainers)
    listener.listen()
    _preload(modules, trainers)
    control.send(READY)
    role = Server(control, listener).serve()
    if role is not None:
        role()


if __name__ == "__main__":
    main(sys.argv[1:])
