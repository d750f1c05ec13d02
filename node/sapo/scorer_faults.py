"""Faults of task families' scorers: what `score` returned or raised becomes a reward, and its author is told.

Told is one line a family and minute, with how many texts there were, and none of a text, which is a model's. Of
families that Shoal brings nothing is told: their libraries may raise for a wrong answer. Nor of what a text raises that
a family executes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from types import TracebackType

from shoal.node.sapo.tasks import TaskFamily

PERIOD_S = 60.0
ROUNDING = 1e-6
"""So far outside of 0 to 1 a sum of shares may come to lie."""
VERDICT_TEXTS = 64
"""Where each of the first so many texts failed, it is not the texts."""

logger = logging.getLogger(__name__)


class Faults:
    """Counts of one agent's scorers, also of several at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told_at: dict[str, float] = {}
        self._texts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self.newest: dict[str, str] = {}
        """By family, what its scorer did when it failed last."""

    def reward(self, family: TaskFamily, value: float, line: int = 0, *, raised: str = "") -> float:
        """Reward of a text for which `score` returned `value`, or raised at that line of its file: 0 for no reward."""
        with self._lock:
            return self._reward(family, value, line, raised)

    def _reward(self, family: TaskFamily, value: float, line: int, raised: str) -> float:
        self._texts[family.name] += 1
        if not line and -ROUNDING <= value <= 1 + ROUNDING:
            return min(1.0, max(0.0, value))
        if not (line and family.executes_text):
            name = f" {raised}" if raised else ""
            returned = "no number" if math.isnan(value) else f"{value:g}"
            what = f"raised{name} at {scorer_file(family)}, line {line}" if line else f"returned {returned}"
            self._note(family, f"{scorer_name(family)} of family {family.name!r} {what}", 1)
        return 0.0

    def left_out(self, family: TaskFamily, what: str, texts: int) -> None:
        """Note texts that have no reward, not even 0, and why."""
        with self._lock:
            self._texts[family.name] += texts
            self._note(family, what, texts, worth="left out")

    def _note(self, family: TaskFamily, what: str, texts: int, *, worth: str = "worth 0") -> None:
        self.newest[family.name] = what
        self._failed[family.name] += texts
        if of_shoal(family):
            return
        count, now = self._failed[family.name], time.monotonic()
        if count - texts < VERDICT_TEXTS <= count == self._texts[family.name]:
            logger.error("%s, and so did each of its first %d texts: nothing can be learnt; correct it", what, count)
        elif now - self._told_at.get(family.name, -math.inf) >= PERIOD_S:
            self._told_at[family.name] = now
            told = "a text is" if count == 1 else f"{count} texts so far are"
            logger.warning("%s: %s %s; correct it, to return 0 to 1", what, told, worth)


def of_shoal(family: TaskFamily) -> bool:
    """Return whether a family is one that Shoal brings."""
    return type(family).__module__.startswith("shoal.")


def scorer_name(family: TaskFamily) -> str:
    """Return the name of what a family's author wrote to score."""
    return f"{family.scored_by}()"


def _scorer(family: TaskFamily) -> object:
    return getattr(type(family), family.scored_by)


def scorer_file(family: TaskFamily) -> str:
    """Return the path of the file that a family's scorer is in; empty where Python does not know it."""
    code = getattr(_scorer(family), "__code__", None)
    return "" if code is None else str(code.co_filename)


def scorer_place(family: TaskFamily) -> str:
    """Say where a family's scorer begins: `, at FILE, line 7`; nothing where Python does not know it."""
    code = getattr(_scorer(family), "__code__", None)
    return "" if code is None else f", at {code.co_filename}, line {code.co_firstlineno}"


def line_in(file: str, trace: TracebackType | None) -> int:
    """Return the last line of `file` that an error came through, or 1 where it came through none of it."""
    line = 1
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
