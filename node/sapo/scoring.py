"""Rewards of completions, one's own and those of peers: which family's scorer runs where, and what bounds it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Final

from shoal.node.control_groups import usable_cores
from shoal.node.sapo.sandbox import TASK_LIMIT_S, TEXT_LIMIT_S, NotBegun, Sandbox
from shoal.node.sapo.sandbox_process import Overdue, limited
from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.node.sapo.scorer_faults import Faults, line_in, of_shoal, scorer_file, scorer_name, scorer_place
from shoal.node.sapo.tasks import Task, TaskFamily, TaskKind, TaskSource, makeable
from shoal.node.single_number import single_number
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.rollouts import COMPLETION_LIMIT_BYTES, TaskRef

CORES_EACH: Final = 4
SANDBOXES_LIMIT: Final = 4
"""A sandbox for each so many cores, so many at most: each has imported all families."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Texts of one task, and where they stand among all."""

    task: Task
    texts: Sequence[str]
    places: Sequence[int]


class Scorer:
    """Scores texts against tasks of one source, several tasks at a time in as many sandboxes where there are cores.

    A context manager; not for several threads at once.

    A text that is no valid Unicode, is too long, or kills or exhausts its scoring is worth 0.0. Each text has a bound
    in time (`text_limit_s`), and those of one task share another (`task_limit_s`), so the time of a batch is at most
    that of its tasks. In this process a task's texts after one that takes longer are not tried; what Python computes or
    waits for is interrupted, a library that never comes back to Python is not.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        text_limit_s: float = TEXT_LIMIT_S,
        task_limit_s: float = TASK_LIMIT_S,
        side_by_side: int | None = None,
    ) -> None:
        """side_by_side: sandboxes at most; None for one for each four cores, four at most."""
        self._source = source
        self._text_limit_s = text_limit_s
        self._task_limit_s = task_limit_s
        self._faults = Faults()
        self._side_by_side = side_by_side or min(SANDBOXES_LIMIT, max(1, usable_cores() // CORES_EACH))
        self._sandboxes: list[Sandbox] = []
        self._threads: ThreadPoolExecutor | None = None
        """They stay until all is closed: the process of a sandbox ends with the thread that started it."""

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Score a right answer of each family of a user's own that knows one.

        Raises ConfigError, one line, where `score` raises for it, returns what is no reward, or takes too long for it.
        """
        for kind in self._source.table.kinds:
            family = self._source.families[kind.family]
            if of_shoal(family):
                continue
            task = self._first_task(kind)
            solution = family.answer(task)
            if solution is None:
                continue
            own = [(task, solution)]
            if self.score_each(own, own=True) == [None] and self.score_each(own, own=True) != [None]:
                continue  # the machine was busy for a moment
            if (what := self._faults.newest.get(family.name)) is not None:
                raise ConfigError(f"{what} for its own solution(); correct it, to return 0 to 1")

    def _first_task(self, kind: TaskKind) -> Task:
        return next(makeable(lambda at: self._source.task(self._source.table.of_kind(kind, seed=0, index=at))))

    def close(self) -> None:
        """End the scoring processes that run."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        while self._sandboxes:
            self._sandboxes.pop().close()

    @property
    def source(self) -> TaskSource:
        """The tasks that are scored here."""
        return self._source

    @property
    def spoiled(self) -> int:
        """The number of texts that have hung, exhausted or killed their scoring."""
        return sum(sandbox.spoiled for sandbox in self._sandboxes)

    def score_each(self, pairs: Sequence[tuple[Task, str]], *, own: bool = False) -> list[float | None]:
        """One reward in [0, 1] per (task, text), in their order; None for one not scored in time. Synchronous.

        own: the texts are this node's own policy's, and may be scored where there is no sandbox.

        Raises LocalError for a peer's text of a family that is not `peer_safe` (ask before), NotBegun for one of a
        family that was not warmed up in time, ConfigError where no scoring process starts.
        """
        rewards: list[float | None] = [0.0] * len(pairs)
        by_task: dict[TaskRef, list[int]] = {}
        for place, (task, text) in enumerate(pairs):
            if _is_readable(text):
                by_task.setdefault(task.ref, []).append(place)
        sandboxed: SimpleQueue[_Job] = SimpleQueue()
        for places in by_task.values():
            task, texts = pairs[places[0]][0], [pairs[place][1] for place in places]
            family = self._source.family(task)
            if not own and not family.peer_safe:
                why = "executes it" if family.executes_text else f"cannot be scored safely: {missing_sandbox()}"
                raise LocalError(f"text from peers for {family.name!r}, which {why}")
            if family.scoring == "direct":
                for place, reward in zip(places, self._score_directly(family, task, texts), strict=True):
                    rewards[place] = reward
            else:
                sandboxed.put(_Job(task, texts, places))
        for job, scored in self._score_side_by_side(sandboxed, own=own):
            for place, reward in zip(job.places, scored, strict=True):
                rewards[place] = reward
        return rewards

    def _score_side_by_side(
        self, jobs: SimpleQueue[_Job], *, own: bool
    ) -> Iterable[tuple[_Job, Sequence[float | None]]]:
        while len(self._sandboxes) < min(self._side_by_side, jobs.qsize()):
            self._sandboxes.append(self._new_sandbox())
        sandboxes = self._sandboxes[: jobs.qsize()]

        def score(sandbox: Sandbox) -> list[tuple[_Job, Sequence[float | None]]]:
            scored: list[tuple[_Job, Sequence[float | None]]] = []
            with suppress(Empty):
                while True:
                    job = jobs.get_nowait()
                    try:
                        scored.append((job, sandbox.score(job.task, job.texts)))
                    except NotBegun:
                        if not own:
                            raise
                        scored.append((job, [None] * len(job.texts)))
            return scored

        if len(sandboxes) < 2:
            return chain.from_iterable(map(score, sandboxes))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._side_by_side, thread_name_prefix="scoring")
        scoring = [self._threads.submit(score, sandbox) for sandbox in sandboxes]
        try:
            wait(scoring)  # before what one of them raises: no sandbox is left in use
        finally:
            with suppress(Empty):  # unless this wait was interrupted they have come to the end
                while True:
                    jobs.get_nowait()
        return chain.from_iterable(one.result() for one in scoring)

    def _score_directly(self, family: TaskFamily, task: Task, texts: Sequence[str]) -> Sequence[float | None]:
        """Score in this process, up to a text that takes too long."""
        rewards: list[float | None] = []
        file, place = scorer_file(family), scorer_place(family)
        deadline = time.monotonic() + self._task_limit_s
        try:
            while len(rewards) < len(texts) and (left_s := deadline - time.monotonic()) > 0:
                with limited(min(self._text_limit_s, left_s)):
                    rewards.append(score_directly(self._faults, family, task, texts[len(rewards)]))
        except Overdue as error:
            if file:
                place = f", at {file}, line {line_in(file, error.__traceback__)}"
        if left := len(texts) - len(rewards):
            limits = f"{self._text_limit_s:g} s, or {self._task_limit_s:g} s for a task's texts"
            who = f"{scorer_name(family)} of family {family.name!r}{place}"
            self._faults.left_out(family, f"{who}, took more than {limits}", left)
        return rewards + [None] * left

    def _new_sandbox(self) -> Sandbox:
        return Sandbox(
            [family for family in self._source.families.values() if family.scoring == "sandbox"],
            locked=missing_sandbox() is None,
            text_limit_s=self._text_limit_s,
            task_limit_s=self._task_limit_s,
            faults=self._faults,
        )


def _is_readable(text: str) -> bool:
    try:
        return len(text) <= COMPLETION_LIMIT_BYTES and len(text.encode()) <= COMPLETION_LIMIT_BYTES
    except UnicodeEncodeError:  # lone surrogates
        return False


def score_directly(faults: Faults, family: TaskFamily, task: Task, text: str) -> float:
    """Score one text in this process; 0.0 where the scorer raises, or returns what is no reward."""
    try:
        number = single_number(family.score(task, text))
        return faults.reward(family, math.nan if number is None else number)
    except Exception as error:  # a user's family may raise anything; what it says may have the text in it
        line = line_in(scorer_file(family), error.__traceback__)
        return faults.reward(family, 0.0, line, raised=type(error).__name__)
