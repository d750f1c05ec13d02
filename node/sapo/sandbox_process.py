"""The process that scores text with other people's code, and the locked children in which it does so.

Two steps, each with what the other must not have. This process makes tasks: it imports the families and may read their
data files, but no text from a peer is ever looked at in it. For each task it forks a child, which closes everything,
locks itself (sandbox_filter.py) and only then reads the texts and scores them, one double per text. A text that hangs,
eats memory or kills its child ends it, and a fresh child goes on with the text after it. The child ends with its
task: nothing that one peer's text does to it can touch the score of another's. Nor its own: a child that is about to
execute a text ends instead (`_refuse_execution`), so nothing but the scorer ever writes to the pipe.

Run by `shoal.node.sapo.sandbox` with orders on stdin and replies on stdout; both are frames of a four-byte length and
msgpack. Ends when stdin does, and, whatever its families do, with the process that started it.
"""

from __future__ import annotations

import ast
import gc
import importlib
import math
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import msgspec

CLOSED_BELOW = 1 << 16
RESULT_DESCRIPTOR = 3
FRAME_LIMIT_BYTES = 4 << 20
LOCKING_LIMIT_S = 10.0
"""From fork to locked, on a busy machine."""
AGAIN_S = 1.0
"""A score that catches that it takes too long is interrupted so often."""
AT_ONCE_S = 1e-6
"""For a timer whose time is over; 0 would stop it."""
_MAKES_CODE = frozenset(("exec", "compile", "code.__new__", "marshal.loads", "pickle.find_class"))
"""Events of making or running code, or calling what a text names. Calls of libraries through ctypes need one first."""
SCORE = struct.Struct("<dI")
"""The number that `score` returned; or, of a text for which it raised, a line of its file."""
LENGTH = struct.Struct(">I")


class FamilyPlace(msgspec.Struct, frozen=True):
    """The origin of a family: the class, and the name that its `from_name` gets."""

    module: str
    qualname: str
    name: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first order. `locked`: refuse to start where a child cannot be locked."""

    path: list[str]
    families: list[FamilyPlace]
    locked: bool
    warm_up_limit_s: float
    text_limit_s: float
    task_limit_s: float


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Make a task of the family with this name and score the texts, each UTF-8."""

    family: str
    config: bytes
    seed: int
    index: int
    texts: list[bytes]


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Per text what `SCORE` has, None for one that was not scored in time; `spoiled` of them ended their child."""

    scores: list[tuple[float, int] | None]
    spoiled: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to `Begin`."""


class NotWarm(msgspec.Struct, frozen=True, tag="not-warm"):
    """A family was interrupted as it warmed up; what it half imported is in this process, which is of no more use."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An order could not be followed."""

    reason: str


Order = Begin | Score
Reply = Ready | Scored | NotWarm | Failed

encode = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True)
class Job:
    """One task's texts."""

    family: Any
    task: Any
    texts: Sequence[bytes]


class Worker:
    """Follows orders until there are no more."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._families: dict[str, Any] = {}
        self._warm: set[str] = set()
        for place in begin.families:
            found: Any = importlib.import_module(place.module)
            for part in place.qualname.split("."):
                found = getattr(found, part)
            self._families[place.name] = found.from_name(place.name)

    def score(self, order: Score) -> Scored | NotWarm:
        """Score all texts. Raises what making the task raises."""
        family = self._families[order.family]
        task = family.make(msgspec.msgpack.decode(order.config), order.seed, order.index)
        if order.family not in self._warm:  # imports on first use cannot happen in a child
            limit_s, began = self._begin.warm_up_limit_s, time.monotonic()
            with suppress(Overdue), limited(limit_s):
                family.warm_up(task)
            if time.monotonic() - began >= limit_s:  # whether or not the family caught that; each text would be worth 0
                return NotWarm()
            self._warm.add(order.family)
            gc.collect()
            gc.freeze()  # so that a child's collector does not copy what all children share
        job = Job(family, task, order.texts)
        scores: list[tuple[float, int] | None] = []
        spoiled = 0
        deadline = time.monotonic() + self._begin.task_limit_s
        while len(scores) < len(order.texts) and time.monotonic() < deadline:
            scored, died = self._in_child(job, len(scores), deadline)
            scores += scored
            if len(scores) < len(order.texts):
                scores.append((0.0, 0) if died else None)
                spoiled += 1
        return Scored(scores + [None] * (len(order.texts) - len(scores)), spoiled)

    def _in_child(self, job: Job, first: int, deadline: float) -> tuple[list[tuple[float, int]], bool]:
        """Scores of the texts from `first` on, as far as one child gets, and whether the text after them killed it."""
        reader, writer = os.pipe()
        try:
            child = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if child == 0:
            _be_child(job, first, writer, self._begin)
        os.close(writer)
        try:
            return self._collect(reader, len(job.texts) - first, deadline)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)

    def _collect(self, reader: int, wanted: int, deadline: float) -> tuple[list[tuple[float, int]], bool]:
        """Read what the child writes in time, a score when locked, then one per text; and whether a text killed it."""
        scores: list[tuple[float, int]] = []
        locked = False
        try:
            locked = _read_score(reader, time.monotonic() + LOCKING_LIMIT_S) is not None
            while locked and len(scores) < wanted:
                score = _read_score(reader, min(deadline, time.monotonic() + self._begin.text_limit_s))
                if score is None:
                    break
                scores.append(score)
        except EOFError:
            return scores, locked  # before that it had read no text that could have killed it
        return scores, False


class Overdue(BaseException):
    """A score takes too long; no family catches this, or not for long."""


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise Overdue in the context after so long, whatever is computed in it, and again while it goes on.

    In the main thread, where alone Python interrupts anything; in others nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, within = time.monotonic(), True

    def interrupt(number: int, frame: object) -> None:
        if within:
            raise Overdue

    handler = signal.signal(signal.SIGALRM, interrupt)
    left_s, again_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)  # so short a limit may be over before the next line
        yield
    finally:
        within = False  # before anything is called, where an alarm would come through
        if left_s:
            left_s = max(AT_ONCE_S, left_s - (time.monotonic() - began))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left_s, again_s)


def _read_score(reader: int, deadline: float) -> tuple[float, int] | None:
    """The next score from a child; None where it does not come in time. Raises EOFError where the child is dead."""
    data = b""
    while len(data) < SCORE.size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            return None
        part = os.read(reader, SCORE.size - len(data))
        if not part:
            raise EOFError("the child is dead")
        data += part
    value, line = SCORE.unpack(data)
    return float(value), int(line)


def _be_child(job: Job, first: int, writer: int, begin: Begin) -> NoReturn:
    """Score until done or dead; never returns into the code of the parent."""
    try:
        from shoal.node.sapo.sandbox_filter import (  # imported by `_start`: a child can import nothing
            die_with_parent,
            limit_resources,
            lock,
        )
        from shoal.node.sapo.scorer_faults import line_in, scorer_file

        file = scorer_file(job.family)

        die_with_parent()

        os.dup2(writer, RESULT_DESCRIPTOR)  # those before it lead to /dev/null since `main`
        os.closerange(RESULT_DESCRIPTOR + 1, CLOSED_BELOW)
        cpu_s = math.ceil(begin.task_limit_s) + 1
        lock(cpu_s) if begin.locked else limit_resources(cpu_s)
        if not job.family.executes_text:
            _refuse_execution()
        os.write(RESULT_DESCRIPTOR, SCORE.pack(0.0, 0))
        for text in job.texts[first:]:
            os.write(RESULT_DESCRIPTOR, SCORE.pack(*_score_one(job, text, partial(line_in, file))))
    finally:
        os._exit(0)


def _refuse_execution() -> None:
    """End this process without a word, from now on, where anything compiles or executes a program.

    A scorer that executes a stranger's text shares its memory with it, so no channel could be kept from such text: it
    would reach whatever writes its reward. Python tells its audit hooks of every program that it is about to compile or
    execute, and no code can take a hook away again. So the child that reports rewards executes no text, whatever the
    family does. `ast.parse` and `ast.literal_eval`, which execute nothing, go on working.

    Source: https://docs.python.org/3/library/audit_events.html, PEP 578
    """
    parse = ast.parse.__code__

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _MAKES_CODE and not (event == "compile" and sys._getframe(1).f_code is parse):
            os._exit(0)

    sys.addaudithook(hook)


def _score_one(job: Job, text: bytes, line_in: Callable[[TracebackType | None], int]) -> tuple[float, int]:
    from shoal.node.single_number import single_number  # imported by `_start`, by the path of who started this

    try:
        number = single_number(job.family.score(job.task, text.decode()))
        return math.nan if number is None else number, 0
    except BaseException as error:  # a stranger's text may make the family raise anything, SystemExit too
        return 0.0, line_in(error.__traceback__)


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length) if length <= FRAME_LIMIT_BYTES else b""
    return body if len(body) == length else None


def _follow(worker: Worker, order: Score) -> Reply:
    try:
        return worker.score(order)
    except Exception as error:  # a family's own code made the task
        return Failed(f"{type(error).__name__}: {error}"[:500])


def _start(begin: Begin) -> tuple[Worker | None, Reply]:
    sys.path[:] = begin.path
    try:
        for needed in ("shoal.node.sapo.scorer_faults", "shoal.node.single_number"):
            importlib.import_module(needed)  # for the children
        from shoal.node.sapo.sandbox_filter import die_with_parent, own_namespaces, self_test

        die_with_parent()  # a family that never returns notices no closed pipe
        worker = Worker(begin)
        if begin.locked:
            own_namespaces()  # where the system lets us, beside the filter of the children
        die_with_parent()
        problem = self_test() if begin.locked else None
    except Exception as error:  # importing a family runs its author's code
        return None, Failed(f"{type(error).__name__}: {error}"[:500])
    return (worker, Ready()) if problem is None else (None, Failed(problem))


def main() -> int:
    """Serve one parent; return the exit status."""
    orders = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what a family prints must not end up among the replies
        os.dup2(null, descriptor)
    decoder = msgspec.msgpack.Decoder(Order)
    worker: Worker | None = None
    while (frame := _read_frame(orders)) is not None:
        order = decoder.decode(frame)
        reply: Reply
        if isinstance(order, Begin):
            worker, reply = _start(order)
        else:
            reply = _follow(worker, order) if worker is not None else Failed("no families yet")
        body = encode(reply)
        replies.write(LENGTH.pack(len(body)) + body)
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
