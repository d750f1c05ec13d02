"""Nodes of tests without the seconds that their imports take: copies of one process a test session, which has imported.

A copy is a process of its own with a session, a log and a trainer of its own, as `python -m shoal.cli.main` would be.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from shoal.lab.fork_client import ONE_THREAD, ForkClient, Forked, can_copy, fork_client
from shoal.testnet.nodes import Runtime, Started, environment, start_process

OF_EACH_TEST = "PYTEST_CURRENT_TEST"
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "HF_")
"""Variables, by how they begin, that are read before a copy is made, or by its trainer, which has the server's own."""


class Copy:
    """A process that the session's fork server forked: as much of `subprocess.Popen` as tests ask of a node's."""

    def __init__(self, forked: Forked, command: Sequence[str]) -> None:
        self.pid = forked.pid
        self._forked = forked
        self._command = command
        self._ending = os.pidfd_open(forked.pid)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self._forked.returncode is None and select.select([self._ending], [], [], 0)[0]:
            self._bury()
        return self._forked.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self._forked.returncode is None:
            if not select.select([self._ending], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self._command), timeout or 0.0)
            self._bury()
        return self._forked.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """To the process alone; to none that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _bury(self) -> None:
        self._forked.wait()
        os.close(self._ending)


def start_copy(
    command: Sequence[str], log: Path, folder: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> Copy | None:
    """Start `command` in `folder`; settings are added to the environment.

    None where a copy would not be the same: with other settings of what Python, its libraries or its trainer read.
    """
    forked = _forked(command, log, folder, settings)
    return forked and Copy(forked, command)


def run_copy(
    command: Sequence[str], folder: Path, settings: Mapping[str, str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` to its end, as a copy where that would be the same.

    settings are added to the environment. Raises subprocess.TimeoutExpired, and has killed it.
    """
    with TemporaryDirectory() as place:
        said, errors = Path(place) / "said", Path(place) / "errors"
        forked = _forked(command, said, folder, settings, errors)
        if forked is None:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=deadline_s,
                env={**environment(), **settings},
                cwd=folder,
                check=False,
            )
        copy = Copy(forked, command)
        try:
            code = copy.wait(deadline_s)
        finally:
            copy.send_signal(signal.SIGKILL)
        return subprocess.CompletedProcess(command, code, said.read_text(), errors.read_text())


def prepare_copies() -> None:
    """Have everything imported: what is started as a copy after this begins at once."""
    _server()


def start_forked(command: Sequence[str], log: Path) -> Started:
    """Start a node of a testnet, as a copy where that would be the same.

    A signal to its session does not reach its trainer, except its end.
    """
    return _forked(command, log, Path.cwd()) or start_process(command, log)


def copied_trainer() -> tuple[str, ...]:
    """`trainer.PROGRAM` with which trainers that this process starts are copies too, with one thread each."""
    return _server()[0].trainer


FORKED = Runtime(start=start_forked)
"""Real nodes of a testnet, which need not import anything."""


def _forked(
    command: Sequence[str],
    log: Path,
    folder: Path,
    settings: Mapping[str, str] = MappingProxyType({}),
    errors: Path | None = None,
) -> Forked | None:
    if not can_copy(command):
        return None
    server, inherited = _server()
    own = {**_environment(), **settings, **ONE_THREAD}
    changed = {key for key, _ in own.items() ^ inherited.items()}
    if any(key.startswith(READ_AT_START) for key in changed):
        return None
    return server.start(command, log, folder, own if changed else None, errors)


def _environment() -> dict[str, str]:
    return {key: value for key, value in environment().items() if key != OF_EACH_TEST}


@cache
def _server() -> tuple[ForkClient, dict[str, str]]:
    """The session's fork server and what environment it has, to the end of the session."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(fork_client()), _environment() | ONE_THREAD
