"""The sandbox, tried by texts that really are executed: nothing leaves it, nothing stays, and the others are scored."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from shoal.node.sapo import sandbox_process
from shoal.node.sapo.dialogue import transcript
from shoal.node.sapo.sandbox import NotBegun, Sandbox
from shoal.node.sapo.sandbox_process import SCORE, Begin, Job, Worker
from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Task, TaskChoice, TaskSource
from shoal.protocol.errors import ConfigError, LocalError
from tests.node.lab import eventually
from tests.node.sapo.hostile_family import AnswersLate, Executes, ImportsLate, Unmakeable, WarmsUp

ROOT = Path(__file__).resolve().parents[3]
SECRET = "correct horse battery staple"
HONEST = "reward = 0.75"
TEXT_LIMIT_S = 2.0

pytestmark = pytest.mark.skipif(missing_sandbox() is not None, reason=f"no sandbox: {missing_sandbox()}")


class OwnScorer(Scorer):
    """Takes texts for this node's own: those of peers are not executed, and here the lock is tried by ones that are."""

    def score_each(self, pairs: Sequence[tuple[Task, str]], *, own: bool = True) -> list[float | None]:
        return super().score_each(pairs, own=True)


@pytest.fixture(scope="module")
def source() -> TaskSource:
    return TaskSource([TaskChoice(family=family, config={}) for family in (Executes(), ImportsLate(), Unmakeable())])


def test_machine_without_room_for_a_process_is_told_of_in_one_line(
    source: TaskSource, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with OwnScorer(source) as scorer, pytest.raises(ConfigError, match=r"does not start: .*Too many open files; free"):
        scorer.score_each([(tasks[0], HONEST)])


@pytest.fixture(scope="module")
def tasks(source: TaskSource) -> list[Task]:
    return [source.families["executes"].make({}, seed, 0) for seed in range(3)]


@pytest.fixture(scope="module")
def scorer(source: TaskSource) -> Iterator[Scorer]:
    with pytest.MonkeyPatch.context() as patch, OwnScorer(source, text_limit_s=TEXT_LIMIT_S) as scorer:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("SHOAL_TEST_SECRET", SECRET)
        yield scorer


def attempt(statements: str) -> str:
    """A program that claims the whole reward if `statements` get through."""
    return f"import os, sys, socket, ctypes, signal\n{statements}\nreward = 1.0"


def syscall(number: int, *arguments: object) -> str:
    call = ", ".join(str(argument) for argument in (number, *arguments))
    return attempt(f"assert ctypes.CDLL(None, use_errno=True).syscall({call}) >= 0")


def test_sandbox_refuses_files_sockets_processes_and_signals(
    scorer: Scorer, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text(SECRET)
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        server.settimeout(0)
        port = server.getsockname()[1]
        local.bind(str(tmp_path / "local"))
        local.listen()
        local.setblocking(False)
        attacks = [
            attempt(f"open({str(made)!r}, 'w').write('here')"),
            attempt(f"os.close(os.open({str(made)!r}, os.O_CREAT | os.O_WRONLY))"),
            attempt(f"os.system('touch {made}') and exit()"),
            attempt(f"import subprocess; subprocess.run(['touch', {str(made)!r}])"),
            attempt(f"os.mkdir({str(made)!r})"),
            attempt(f"os.unlink({str(secret)!r})"),
            attempt(f"os.rename({str(secret)!r}, {str(made)!r})"),
            attempt(f"assert open({str(secret)!r}).read() == {SECRET!r}"),
            attempt(f"assert os.pread({descriptor}, 99, 0)"),
            attempt(f"assert os.read({descriptor}, 99)"),
            attempt(
                "def is_open(fd):\n    try:\n        return os.write(fd, b'') == 0\n    except OSError:\n"
                "        return False\nassert any(is_open(fd) for fd in range(4, 256))"
            ),
            attempt("assert 'SHOAL_TEST_SECRET' in os.environ"),
            attempt("open('/proc/self/environ').read()"),
            attempt("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"),
            attempt("os.listdir('/')"),
            attempt("os.stat('/')"),
            attempt(f"socket.create_connection(('127.0.0.1', {port}))"),
            attempt(f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'local')!r})"),
            attempt("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"),
            attempt("socket.getaddrinfo('localhost', 80)"),
            attempt("os.fork()"),
            attempt("import threading; threading.Thread(target=print).start()"),
            attempt("os.execv(sys.executable, [sys.executable, '-c', ''])"),
            attempt("os.kill(os.getppid(), signal.SIGKILL)"),
            attempt("os.killpg(0, signal.SIGKILL)"),
            attempt("signal.pthread_kill(1, 9)"),
            attempt("import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"),
            attempt("mapped = ctypes.CDLL(None).mmap(0, 4096, 7, 34, -1, 0)\nassert mapped != -1"),
            attempt("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))"),
            attempt("os.pipe()"),
            attempt("os.nice(-20)"),
            attempt("import time; time.sleep(0.01)"),
        ]
        rewards = scorer.score_each([(tasks[0], text) for text in attacks])
        assert [text for text, reward in zip(attacks, rewards, strict=True) if reward != 0.0] == []
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            local.accept()
    os.close(descriptor)
    assert not made.exists()
    assert secret.read_text() == SECRET
    assert scorer.score_each([(tasks[0], HONEST)]) == [0.75]


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_sandbox_refuses_system_calls_that_python_does_not_wrap(scorer: Scorer, tasks: list[Task]) -> None:
    me = "os.getppid()"
    calls = {
        "ptrace": syscall(101, 16, me, 0, 0),
        "process_vm_readv": syscall(310, me, 0, 0, 0, 0, 0),
        "memfd_create": syscall(319, "b'x'", 0),
        "io_uring_setup": syscall(425, 1, 0),
        "bpf": syscall(321, 0, 0, 0),
        "unshare": syscall(272, 0),
        "openat2": syscall(437, -100, "b'/'", 0, 24),
        "pidfd_open": syscall(434, me, 0),
        "seccomp": syscall(317, 0, 0, 0),
        "prctl": syscall(157, 3, 0, 0, 0, 0),
        "clone3": syscall(435, 0, 0),
        "dup": syscall(32, 3),
    }
    rewards = scorer.score_each([(tasks[0], text) for text in calls.values()])
    assert [name for name, reward in zip(calls, rewards, strict=True) if reward != 0.0] == []
    by_number = attempt("ctypes.CDLL(None).syscall(0x40000000 + 39)")  # getpid in the x32 numbering: killed
    spoiled = scorer.spoiled
    assert scorer.score_each([(tasks[0], by_number), (tasks[0], HONEST)]) == [0.0, 0.75]
    assert scorer.spoiled == spoiled + 1


def test_sandbox_can_map_memory_that_it_does_not_execute(scorer: Scorer, tasks: list[Task]) -> None:
    assert scorer.score_each([(tasks[0], attempt("assert ctypes.CDLL(None).mmap(0, 4096, 3, 34, -1, 0) != -1"))]) == [
        1.0
    ]


def may_leave_the_network() -> bool:
    """Whether the system lets a process of ours."""
    leave = "from shoal.node.sapo.sandbox_filter import own_namespaces; raise SystemExit(not own_namespaces())"
    return subprocess.run([sys.executable, "-c", leave], check=False).returncode == 0


def test_sandbox_process_has_no_descriptor_and_no_network_of_ours(tasks: list[Task], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    with pytest.MonkeyPatch.context() as patch, Sandbox([Executes()]) as sandbox:
        patch.syspath_prepend(str(ROOT))
        sandbox.start()
        assert sandbox._process is not None
        network = os.readlink(f"/proc/{sandbox._process.pid}/ns/net")
        assert (network != os.readlink("/proc/self/ns/net")) == may_leave_the_network()
        held = [os.readlink(one) for one in Path(f"/proc/{sandbox._process.pid}/fd").iterdir()]
    os.close(descriptor)
    assert str(secret) not in held
    assert {name.partition(":")[0] for name in held} <= {"pipe", "/dev/null"}


def test_sandbox_survives_what_hangs_hogs_and_crashes_and_scores_the_rest(scorer: Scorer, tasks: list[Task]) -> None:
    first, second, third = tasks
    spoiled = scorer.spoiled
    began = time.monotonic()
    pairs: dict[tuple[Task, str], float | None] = {
        (first, "while True: pass"): None,
        (first, HONEST): 0.75,
        (first, "import os; os._exit(0)"): 0.0,
        (second, attempt("ctypes.string_at(0)")): 0.0,
        (second, "raise SystemExit"): 0.0,
        (second, "import sys; sys.exit(1)"): 0.0,
        (second, "raise KeyboardInterrupt"): 0.0,
        (second, attempt("hoard = [bytes(1 << 20) for _ in range(4096)]")): 0.0,
        (second, attempt("b'x' * (1 << 34)")): 0.0,
        (second, "def deeper(): deeper()\ndeeper()"): 0.0,
        (second, HONEST): 0.75,
        (third, "reward = float('nan')"): 0.0,
        (third, "reward = float('inf')"): 0.0,
        (third, "reward = 1e9"): 0.0,
        (third, "reward = -3"): 0.0,
        (third, "reward = 'much'"): 0.0,
        (third, "reward = None"): 0.0,
        (third, "\0"): 0.0,
        (third, "\ud800"): 0.0,
        (third, "#" + "x" * (1 << 15)): 0.0,
        (third, HONEST): 0.75,
    }
    rewards = scorer.score_each(list(pairs))
    assert dict(zip(pairs, rewards, strict=True)) == pairs
    assert scorer.spoiled == spoiled + 3
    assert time.monotonic() - began < TEXT_LIMIT_S + 20


def test_sandbox_text_touches_only_the_scores_of_its_own_task(scorer: Scorer, tasks: list[Task]) -> None:
    first, second, _ = tasks
    forge = "import os, struct\nos.write(3, struct.pack('<dI', 1.0, 0) * 64)\nwhile True: pass"
    change = (
        "import builtins, sys\nfor module in list(sys.modules.values()):\n    for name in list(vars(module)):\n"
        "        setattr(module, name, None)"
    )
    pairs = [(first, forge), (first, HONEST), (second, change), (second, HONEST), (second, HONEST)]
    scorer.score_each(pairs)
    assert scorer.score_each([(second, HONEST), (first, HONEST)]) == [0.75, 0.75]


def test_sandbox_texts_of_one_task_share_a_bound_in_time(source: TaskSource, tasks: list[Task]) -> None:
    with pytest.MonkeyPatch.context() as patch, OwnScorer(source, text_limit_s=1.0, task_limit_s=2.0) as scorer:
        patch.syspath_prepend(str(ROOT))
        assert scorer.score_each([(tasks[0], HONEST)]) == [0.75]
        began = time.monotonic()
        rewards = scorer.score_each([*[(tasks[0], "while True: pass")] * 64, (tasks[1], HONEST)])
        assert rewards == [None] * 64 + [0.75]
        assert 1 <= scorer.spoiled <= 3
        assert time.monotonic() - began < 20


def test_tasks_are_scored_side_by_side_each_as_it_would_be_alone(source: TaskSource) -> None:
    tasks = [source.families["executes"].make({}, seed, 0) for seed in range(4)]
    endless = [(task, text) for task in tasks for text in ("while True: pass", HONEST)]
    took_s = {}
    for count in (1, 4):
        with (
            pytest.MonkeyPatch.context() as patch,
            OwnScorer(source, text_limit_s=1.5, task_limit_s=20.0, side_by_side=count) as scorer,
        ):
            patch.syspath_prepend(str(ROOT))
            assert scorer.score_each([(task, HONEST) for task in tasks]) == [0.75] * 4, "all have begun"
            began = time.monotonic()
            assert scorer.score_each(endless) == [None, 0.75] * 4
            took_s[count] = time.monotonic() - began
            assert scorer.spoiled == 4
            pids = {sandbox._process.pid for sandbox in scorer._sandboxes if sandbox._process is not None}
            assert len(pids) == count
    assert took_s[1] >= 6.0
    assert took_s[4] < 0.7 * took_s[1]


def test_family_that_does_not_begin_is_told_of_from_beside_others() -> None:
    family = ImportsLate()
    scorer = Scorer(TaskSource([TaskChoice(family=family, config={})]), side_by_side=3)
    tasks = [family.make({}, seed, 0) for seed in range(4)]

    class Cold:
        spoiled = 0

        def score(self, task: Task, texts: Sequence[str]) -> list[float | None]:
            raise NotBegun(str(task.ref.seed))

        def close(self) -> None:
            pass

    class Slow(Cold):
        busy = False

        def score(self, task: Task, texts: Sequence[str]) -> list[float | None]:
            self.busy = True
            time.sleep(0.3)
            self.busy = False
            return [0.5] * len(texts)

    slow = Slow()
    scorer._sandboxes = [Cold(), slow, Cold()]  # type: ignore[list-item]
    with pytest.raises(NotBegun):
        scorer.score_each([(task, HONEST) for task in tasks])
    assert not slow.busy, "a sandbox that is in use would be given other texts"
    scorer._sandboxes = [Cold(), Cold(), Cold()]  # type: ignore[list-item]
    assert scorer.score_each([(task, HONEST) for task in tasks], own=True) == [None] * 4


def test_sandbox_that_dies_is_started_again(scorer: Scorer, tasks: list[Task]) -> None:
    assert scorer.score_each([(tasks[0], HONEST)]) == [0.75]
    (sandbox,) = scorer._sandboxes
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    assert scorer.score_each([(tasks[0], HONEST)]) == [None]
    assert scorer.score_each([(tasks[0], HONEST)]) == [0.75]


ABANDONS = """
import sys
sys.path.insert(0, sys.argv[1])
from shoal.node.sapo.sandbox import Sandbox
from tests.node.lab import eventually
from tests.node.sapo.hostile_family import Hangs

family = Hangs()
with Sandbox([family]) as sandbox:
    sandbox.start()
    print(sandbox._process.pid, flush=True)
    sandbox.score(family.make({"begun": sys.argv[2]}, 1, 0), ["1"])
"""


def test_sandbox_ends_with_the_process_that_started_it_while_a_family_never_answers(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = [sys.executable, "-c", ABANDONS, str(ROOT), str(begun)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        sandbox = psutil.Process(int(process.stdout.readline()))
        eventually(begun.exists, "the family is asked")
        process.kill()
    try:
        sandbox.wait(10)
    finally:
        with suppress(psutil.NoSuchProcess):
            sandbox.kill()


def test_sandbox_takes_the_product_from_where_its_parent_has_it_and_not_from_what_is_installed() -> None:
    program = Path(sandbox_process.__file__).read_text()
    assert not [line for line in program.splitlines() if line.startswith(("import shoal", "from shoal"))]


def test_sandbox_family_has_imported_what_it_needs_before_it_is_locked(source: TaskSource, scorer: Scorer) -> None:
    task = source.families["imports-late"].make({}, 1, 0)
    assert scorer.score_each([(task, "")]) == [0.5]


def test_environment_that_imports_when_it_answers_has_done_so_before_it_is_locked() -> None:
    family = AnswersLate()
    source = TaskSource([TaskChoice(family=family, config={})])
    with pytest.MonkeyPatch.context() as patch, Scorer(source) as scorer:
        patch.syspath_prepend(str(ROOT))
        task = source.task(source.table.of_kind(source.table.kinds[0], seed=1, index=0))
        answered = transcript(["a", "b"], [family.reply(task, ["a"]) or ""])
        assert scorer.score_each([(task, answered), (task, "a")]) == [1.0, 0.5]


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_scorer_that_was_closed_begins_anew(source: TaskSource, tasks: list[Task], side_by_side: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        scorer = OwnScorer(source, side_by_side=side_by_side)
        for _ in range(2):
            assert scorer.score_each([(task, HONEST) for task in tasks]) == [0.75] * 3
            processes = [psutil.Process(one._process.pid) for one in scorer._sandboxes if one._process is not None]
            assert len(processes) == side_by_side
            scorer.close()
            assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize("catches", [False, True])
def test_sandbox_family_whose_warm_up_is_interrupted_scores_nothing_and_is_warmed_up_in_another_process(
    tmp_path: Path, catches: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.node.sapo.sandbox.WARM_UP_LIMIT_S", 1.0)
    monkeypatch.syspath_prepend(str(ROOT))
    ready = tmp_path / "ready"
    task = WarmsUp().make({"ready": str(ready), "catches": catches}, 1, 0)
    with Sandbox([WarmsUp()]) as sandbox:
        with pytest.raises(NotBegun, match="took more than 1 s to begin"):
            sandbox.score(task, ["0.75", "no"])
        assert ", or its warm_up(), took more than 1 s to begin: 2 texts so far are left out" in caplog.text
        assert sandbox._process is None
        ready.touch()
        assert sandbox.score(task, ["0.75", "no"]) == [0.75, 0.0]


def test_sandbox_that_does_not_begin_leaves_own_texts_out_and_says_so_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.sapo.sandbox.WARM_UP_LIMIT_S", 0.1)
    monkeypatch.syspath_prepend(str(ROOT))
    task = WarmsUp().make({"ready": str(tmp_path / "never"), "catches": False}, 1, 0)
    with Scorer(TaskSource([TaskChoice(family=WarmsUp(), config=task.config)])) as scorer:
        assert scorer.score_each([(task, "0.75")], own=True) == [None]
        with pytest.raises(NotBegun):
            scorer.score_each([(task, "0.75")])


def test_sandbox_child_that_cannot_be_forked_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    begin = Begin(path=[], families=[], locked=True, warm_up_limit_s=1.0, text_limit_s=60.0, task_limit_s=60.0)
    monkeypatch.setattr(os, "fork", no_more)
    first = os.dup(0)
    os.close(first)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            Worker(begin)._in_child(Job(None, None, [b""]), 0, time.monotonic() + 60.0)
    following = os.dup(0)
    os.close(following)
    assert following == first, "the lowest number that is free"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (b"", ([], False)),
        (SCORE.pack(0.0, 0)[:5], ([], False)),
        (SCORE.pack(0.0, 0), ([], True)),
        (SCORE.pack(0.0, 0) + SCORE.pack(0.5, 0), ([(0.5, 0)], True)),
    ],
)
def test_sandbox_child_that_died_before_it_was_locked_was_killed_by_no_text(
    written: bytes, found: tuple[list[tuple[float, int]], bool]
) -> None:
    begin = Begin(path=[], families=[], locked=True, warm_up_limit_s=1.0, text_limit_s=60.0, task_limit_s=60.0)
    reader, writer = os.pipe()
    os.write(writer, written)
    os.close(writer)
    assert Worker(begin)._collect(reader, 2, time.monotonic() + 60.0) == found
    os.close(reader)


def test_sandbox_family_that_cannot_make_its_task_scores_nothing(source: TaskSource, scorer: Scorer) -> None:
    task = source.families["unmakeable"].make({}, 1, 0)
    assert scorer.score_each([(task, HONEST)]) == [None]


def test_sandbox_tests_do_fail_without_a_lock(tasks: list[Task], tmp_path: Path) -> None:
    """The attacks are real: in a process that is not locked they succeed."""
    made = tmp_path / "made"
    with pytest.MonkeyPatch.context() as patch, Sandbox([Executes()], locked=False) as sandbox:
        patch.syspath_prepend(str(ROOT))
        texts = [attempt(f"os.mkdir({str(made)!r})"), attempt("os.stat('/')"), attempt("assert socket.socket()")]
        assert sandbox.score(tasks[0], texts) == [1.0, 1.0, 1.0]
    assert made.is_dir()


def test_sandbox_is_refused_where_there_is_none(
    source: TaskSource, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.sapo.tasks.missing_sandbox", lambda: "no seccomp")
    monkeypatch.setattr("shoal.node.sapo.scoring.missing_sandbox", lambda: "no seccomp")
    assert "imports-late" not in source.scorable
    assert "unknown" not in source.scorable
    with Scorer(source) as scorer:
        with pytest.raises(LocalError, match="'imports-late', which cannot be scored safely: no seccomp"):
            scorer.score_each([(source.families["imports-late"].make({}, 0, 0), HONEST)])
        monkeypatch.syspath_prepend(str(ROOT))
        assert scorer.score_each([(tasks[0], HONEST)], own=True) == [0.75]


def test_sandbox_that_cannot_import_a_family_says_so(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [part for part in sys.path if Path(part or ".").resolve() != ROOT])
    with Sandbox([Executes()]) as sandbox, pytest.raises(ConfigError, match="No module named 'tests"):
        sandbox.score(tasks[0], [HONEST])
