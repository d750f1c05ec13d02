"""Scores of other people's text by other people's code, from a process that can do nothing but compute.

`Sandbox` is this side of the pipe to sandbox_process.py: it starts that process when the first text comes, with an
empty environment and no descriptors of ours, gives it (task, texts), waits a bounded time, and starts another where
the process is lost. Its answers are checked like a stranger's. Nothing here raises because of what a text says.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from shoal.node.pipe import unpacker
from shoal.node.sapo import sandbox_process
from shoal.node.sapo.sandbox_process import Begin, Failed, FamilyPlace, NotWarm, Ready, Reply, Score, Scored
from shoal.node.sapo.sandbox_support import environment
from shoal.node.sapo.scorer_faults import Faults, scorer_name, scorer_place
from shoal.node.sapo.tasks import Task, TaskFamily
from shoal.protocol.errors import ConfigError, LocalError, ShoalError

unpack_reply: Callable[[bytes], Reply] = unpacker(Reply, "an answer of the sandbox")

TEXT_LIMIT_S = 2.0
"""Time for one text."""
TASK_LIMIT_S = 10.0
"""Time for all texts of one task together; those that it does not reach are not scored."""
MAKE_LIMIT_S = 20.0
"""Time for making a task."""
WARM_UP_LIMIT_S = 15.0
"""A part of that, for what a family imports when it scores first. Where it is over nothing is scored."""
START_LIMIT_S = 120.0
PROCESS_LIMIT_TASKS = 20_000
"""After so many a process is replaced: what libraries keep for themselves does not add up."""


class NotBegun(ShoalError):
    """A family was not warmed up in time, so that no text was looked at: that is nobody's fault but this node's."""


class Sandbox:
    """The process and its pipes. Not for several threads at once.

    locked: False scores without the filter, for own text where `missing_sandbox` names a reason.
    """

    def __init__(
        self,
        families: Sequence[TaskFamily],
        *,
        locked: bool = True,
        text_limit_s: float = TEXT_LIMIT_S,
        task_limit_s: float = TASK_LIMIT_S,
        faults: Faults | None = None,
    ) -> None:
        self._families = {one.name: one for one in families}
        self._faults = faults or Faults()
        places = [FamilyPlace(type(one).__module__, type(one).__qualname__, one.name) for one in families]
        self._begin = Begin(
            path=[os.path.abspath(part) if part == "" or os.path.exists(part) else part for part in sys.path],
            families=places,
            locked=locked,
            warm_up_limit_s=WARM_UP_LIMIT_S,
            text_limit_s=text_limit_s,
            task_limit_s=task_limit_s,
        )
        self._timeout_s = MAKE_LIMIT_S + task_limit_s + text_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scored_tasks = 0
        self.spoiled = 0
        """Texts that hung, ate all memory or killed the process that scored them."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
            self._scored_tasks = 0

    def start(self) -> None:
        """Have the process ready; done by `score` too. Raises ConfigError, one line, where it cannot run."""
        if self._process is not None:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", sandbox_process.__file__],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            reply = self._ask(self._begin, START_LIMIT_S)
        except (LocalError, OSError) as error:
            self.close()
            raise ConfigError(
                f"the process that scores tasks does not start: {error}; free memory, processes or open files"
            ) from error
        if isinstance(reply, Ready):
            return
        self.close()
        reason = reply.reason if isinstance(reply, Failed) else reply
        raise ConfigError(f"tasks cannot be scored in a sandbox: {reason}; choose a machine where they can")

    def score(self, task: Task, texts: Sequence[str]) -> list[float | None]:
        """One reward in [0, 1] per text: 0 for one that kills or exhausts its scoring, None for one that is not scored.

        Raises ConfigError as `start` does, NotBegun.
        """
        if self._scored_tasks >= PROCESS_LIMIT_TASKS:
            self.close()
        self.start()
        self._scored_tasks += 1
        data = [text.encode() for text in texts]
        family = self._families[task.ref.family]
        order = Score(task.ref.family, task.ref.config, task.ref.seed, task.ref.index, data)
        try:
            reply = self._ask(order, self._timeout_s)
        except LocalError as error:
            self._faults.left_out(family, f"what scores tasks of {family.name!r} is started again: {error}", len(texts))
            self.close()
            return [None] * len(texts)
        if isinstance(reply, Scored) and len(reply.scores) == len(texts):
            self.spoiled += reply.spoiled
            late = reply.scores.count(None)
            if late:
                limits = f"{self._begin.text_limit_s:g} s, or {self._begin.task_limit_s:g} s for a task's texts"
                self._faults.left_out(
                    family,
                    f"{scorer_name(family)} of family {family.name!r}{scorer_place(family)}, took more than {limits}",
                    late,
                )
            return [None if one is None else self._faults.reward(family, *one) for one in reply.scores]
        if isinstance(reply, NotWarm):
            who = f"{scorer_name(family)} of family {family.name!r}{scorer_place(family)}, or its warm_up(),"
            limit = f"{self._begin.warm_up_limit_s:g} s"
            why = f"{who} took more than {limit} to begin"
            self._faults.left_out(family, why, len(texts))
            self.close()
            raise NotBegun(why)
        reason = reply.reason if isinstance(reply, Failed) else reply
        self._faults.left_out(family, f"a task of family {family.name!r} cannot be made: {reason}", len(texts))
        return [None] * len(texts)

    def _ask(self, order: Begin | Score, limit_s: float) -> Reply:
        """Write an order, read its reply. Raises LocalError where the process is gone, late or makes no sense."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        body = sandbox_process.encode(order)
        deadline = time.monotonic() + limit_s
        try:
            _write(process.stdin, sandbox_process.LENGTH.pack(len(body)) + body, deadline)
            (length,) = sandbox_process.LENGTH.unpack(_read(process.stdout, sandbox_process.LENGTH.size, deadline))
            if length > sandbox_process.FRAME_LIMIT_BYTES:
                raise LocalError(f"a reply of {length} bytes")
            return unpack_reply(_read(process.stdout, length, deadline))
        except OSError as error:
            raise LocalError(f"its pipe broke: {error}") from error


def _write(pipe: IO[bytes], data: bytes, deadline: float) -> None:
    view = memoryview(data)
    os.set_blocking(pipe.fileno(), False)
    while view:
        _wait(pipe, selectors.EVENT_WRITE, deadline)
        view = view[os.write(pipe.fileno(), view) :]


def _read(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        _wait(pipe, selectors.EVENT_READ, deadline)
        part = os.read(pipe.fileno(), size - len(data))
        if not part:
            raise LocalError("it ended")
        data += part
    return data


def _wait(pipe: IO[bytes], event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise LocalError("it does not answer")
