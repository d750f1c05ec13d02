"""Processes that a fork server forks are like those that are started: of a session, a log and an end of their own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import trio

from shoal.lab.fork_client import ONE_THREAD, fork_client, forking
from shoal.lab.fork_server import READY, STAND_IN
from shoal.node.pipe import EXIT_CONFUSED, Framing, Stop, frame_of
from shoal.node.training.trainer_messages import Command, Ping, Pong, Report, unpack_report
from shoal.protocol.errors import LocalError
from shoal.testnet.parent_death import ended_with_parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are forked on Linux alone")

DEADLINE_S = 60.0
COPY = """
import os, sys, time
print(sys.argv[1:], os.getpid(), os.getsid(0), sys.stdin.read(), flush=True)
if sys.argv[1] == "lasting":
    time.sleep(600)
sys.exit(7)
"""
WHERE = """
import os, sys
if __name__ == "__main__":
    print(os.getcwd(), sys.path[0], os.environ.get("TOLD"), sys.argv[1:], flush=True)
"""
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the fork server and its copies find."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "copy_of_it.py").write_text(COPY)
    (folder / "where.py").write_text(WHERE)
    (folder / "threads.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return folder


def has_ended(pidfd: int, *, within_s: float = DEADLINE_S) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "copy_of_it", *arguments]


async def test_a_copy_has_its_own_session_log_and_exit_code(modules: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    async with forking(["json"]) as runtime:
        one = runtime.start(command("a", "b c"), log)
        pidfd = os.pidfd_open(one.pid)
        await trio.lowlevel.wait_readable(pidfd)
        os.close(pidfd)
        assert (one.returncode, one.wait(), one.returncode, one.wait()) == (None, 7, 7, 7)
    assert log.read_text() == f"before\n['a', 'b c'] {one.pid} {one.pid} \n"
    assert one.pid != os.getpid()


def test_a_copy_runs_in_the_folder_and_the_environment_that_it_is_given(modules: Path, tmp_path: Path) -> None:
    log, folder = tmp_path / "log.txt", tmp_path / "a folder"
    folder.mkdir()
    with fork_client(["json"]) as client:
        module, script = [sys.executable, "-m", "where"], [sys.executable, str(modules / "where.py")]
        for command, environment in ((module, None), (module, {"TOLD": "this"}), (script, {"TOLD": "that"})):
            one = client.start([*command, "a"], log, folder, environment)
            pidfd = os.pidfd_open(one.pid)
            assert has_ended(pidfd)
            os.close(pidfd)
            assert one.wait() == 0
    assert log.read_text().splitlines() == [
        f"{folder} {folder} None ['a']",
        f"{folder} {folder} this ['a']",
        f"{folder} {modules} that ['a']",
    ]


def test_a_copy_s_errors_may_go_to_a_file_of_their_own(modules: Path, tmp_path: Path) -> None:
    (modules / "errs.py").write_text("import sys\nprint('said')\nsys.exit('wrong')\n")
    log, errors = tmp_path / "log.txt", tmp_path / "errors.txt"
    with fork_client(["json"]) as client:
        one = client.start([sys.executable, "-m", "errs"], log, errors=errors)
        pidfd = os.pidfd_open(one.pid)
        assert has_ended(pidfd)
        os.close(pidfd)
        assert one.wait() == 1
    assert (log.read_text(), errors.read_text()) == ("said\n", "wrong\n")


async def test_a_copy_that_is_killed_says_so_and_none_outlives_the_server(modules: Path, tmp_path: Path) -> None:
    async with forking(["json"]) as runtime:
        logs = tmp_path / "1", tmp_path / "2"
        one, two = (runtime.start(command("lasting"), log) for log in logs)
        os.killpg(one.pid, signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
        pidfd = os.pidfd_open(two.pid)
        assert not has_ended(pidfd, within_s=0.1)
    assert has_ended(pidfd)
    os.close(pidfd)
    assert two.wait() == -signal.SIGKILL
    with pytest.raises(LocalError, match="the fork server"):
        runtime.start(command("late"), tmp_path / "3")


def test_a_server_and_its_copies_end_when_their_testnet_is_killed(modules: Path, tmp_path: Path) -> None:
    testnet = """
import sys, trio
from pathlib import Path
from shoal.lab.fork_client import forking

async def main():
    async with forking(["json"]) as runtime:
        print(runtime.start([sys.executable, "-m", "copy_of_it", "lasting"], Path(sys.argv[1])).pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""
    command = [sys.executable, "-c", testnet, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        pidfd = os.pidfd_open(int(running.stdout.readline()))
        try:
            assert not has_ended(pidfd, within_s=0.1)
            running.kill()
            assert has_ended(pidfd), "the copy lives on"
        finally:
            os.close(pidfd)


async def test_only_python_programs_can_be_started(modules: Path, tmp_path: Path) -> None:
    async with forking(["json"]) as runtime:
        with pytest.raises(LocalError, match="a module of Python or a script, not ip netns"):
            runtime.start(["ip", "netns", "exec", "x", *command()], tmp_path / "log")


@pytest.mark.parametrize(("name", "said"), [("threads", "threads started 1 threads"), ("nothing", "No module named")])
async def test_a_server_that_cannot_be_copied_does_not_come_up(
    modules: Path, name: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LocalError, match="did not come up"):
        async with forking([name]):
            pass
    assert said in capfd.readouterr().err


# -- trainers ------------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """A stand-in for a trainer, the daemon's end of the trainer's messages, and who forks it."""

    stand_in: subprocess.Popen[bytes]
    stream: socket.socket
    server: psutil.Process

    def say(self, order: Command) -> None:
        self.stream.sendall(frame_of(order))

    def report(self) -> Report:
        (frame,) = Framing().feed(self.stream.recv(1 << 16))
        return unpack_report(frame)

    def gone(self) -> bool:
        """Whether the trainer itself has ended, for only then do its messages."""
        return self.stream.recv(1) == b""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    at = str(tmp_path / "trainers.sock")
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, messages = socket.socketpair()
    server = [sys.executable, "-m", "shoal.lab.fork_server", str(theirs.fileno()), at]
    stand_in = [sys.executable, "-I", "-S", str(STAND_IN), at, str(messages.fileno()), "0", "1"]
    with (
        control,
        theirs,
        ours,
        messages,
        subprocess.Popen(
            ended_with_parent(server), pass_fds=(theirs.fileno(),), env=os.environ | ONE_THREAD
        ) as forking_process,
    ):
        for stream in (control, ours):
            stream.settimeout(DEADLINE_S)
        assert control.recv(16) == READY
        with subprocess.Popen(stand_in, pass_fds=(messages.fileno(),), cwd=tmp_path) as running:
            messages.close()
            yield Trainer(running, ours, psutil.Process(forking_process.pid))
            running.kill()
        forking_process.kill()


def test_a_stand_in_ends_as_its_trainer_does(trainer: Trainer) -> None:
    trainer.say(Ping())
    assert trainer.report() == Pong()
    trainer.say(Stop())
    assert trainer.stand_in.wait(DEADLINE_S) == 0
    assert trainer.gone()


def test_a_trainer_runs_where_its_stand_in_does(trainer: Trainer, tmp_path: Path) -> None:
    trainer.say(Ping())
    assert trainer.report() == Pong()
    (forked,) = trainer.server.children()
    assert forked.cwd() == str(tmp_path)


def test_a_trainer_whose_stand_in_is_killed_ends(trainer: Trainer) -> None:
    trainer.say(Ping())
    assert trainer.report() == Pong()
    trainer.stand_in.kill()
    assert trainer.gone()


def test_a_trainer_that_fails_has_its_stand_in_say_so(trainer: Trainer) -> None:
    trainer.stream.sendall(b"\xff" * 64)
    assert trainer.stand_in.wait(DEADLINE_S) == EXIT_CONFUSED
