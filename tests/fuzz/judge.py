"""Feeds one example and judges what came of it: taken, refused by an error that is foreseen, or a finding."""

from __future__ import annotations

import inspect
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.targets import Target

SLOW_S = 5.0
"""Of CPU time, for one message: far beyond what any may take, and short of what a hang takes."""


@dataclass(frozen=True)
class Finding:
    """What should not have happened."""

    target: str
    what: str
    where: str
    data: bytes


@dataclass
class Tally:
    """What became of the examples of one target."""

    examples: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def note(self, found: Finding | None, outcome: str, cpu_s: float) -> None:
        self.examples += 1
        self.worst_s = max(self.worst_s, cpu_s)
        if found is not None:
            self.findings.append(found)
        elif outcome:
            self.refused[outcome] += 1
        else:
            self.taken += 1


async def judge(target: Target, data: bytes, tally: Tally) -> Finding | None:
    """Feed `data`; None unless it is a finding."""
    began = time.thread_time()
    outcome, found = "", None
    try:
        result = target.take(data)
        if inspect.isawaitable(result):
            await result
    except target.allowed as error:
        outcome = type(error).__name__
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found = Finding(target.name, f"{type(error).__name__}: {error}"[:300], f"{frame.filename}:{frame.lineno}", data)
    cpu_s = time.thread_time() - began
    if found is None and cpu_s > SLOW_S:
        found = Finding(target.name, f"{cpu_s:.1f} s of CPU time", "", data)
    tally.note(found, outcome, cpu_s)
    return found
