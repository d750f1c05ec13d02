"""Breadth first through the states that steps of members lead to, until something is wrong, and how it came to that.

Where there are too many states, walks at random go through some of them instead.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypedDict, TypeVar

from shoal.protocol.errors import LocalError

State = tuple[int, ...]
"""The number of a member's state for each position, then what is common to all."""

WALK_PROGRESS_PERIOD_STEPS = 256

OnProgress = Callable[[int, int], None]
"""Called with the number of states and of transitions so far."""


def ignore_progress(states: int, transitions: int) -> None:
    """Do nothing, where nobody wants to see progress."""


class Told(Protocol):
    """Step of one member that can happen, and its name."""

    @property
    def text(self) -> str: ...


OutcomeT = TypeVar("OutcomeT", bound=Told)
ScopeT = TypeVar("ScopeT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Violation of what must always hold, and the steps that lead to it."""

    kind: str
    schedule: tuple[str, ...]


class Figures(TypedDict):
    """The size of a search or of walks, the time they took, and what they found."""

    states: int
    transitions: int
    seconds: float
    complete: bool
    violations: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration(Generic[ScopeT]):
    """The findings in a scope. `complete`: every schedule of it was walked. `certified` are the sets of values, by
    name, that some schedule certified: the empty one, and one of each value."""

    scope: ScopeT
    states: int
    transitions: int
    member_states: int
    seconds: float
    complete: bool
    certified: frozenset[frozenset[str]]
    violations: tuple[Finding, ...] = ()


class Search(Generic[OutcomeT]):
    """A search from `start`.

    steps: the steps that are possible in a state, each the position of a member and what happens to it.
    after: the state after a step, or what must never happen and happened in it.
    """

    def __init__(
        self,
        start: State,
        steps: Callable[[State], Sequence[tuple[int, OutcomeT]]],
        after: Callable[[State, int, OutcomeT], State | str],
        *,
        progress_period_states: int,
    ) -> None:
        self.order: list[State] = [start]
        """The states that were met, as they were met."""
        self.finding: Finding | None = None
        self._transitions = 0
        self._complete = False
        self._seconds = 0.0
        self._steps, self._after = steps, after
        self._progress_period_states = progress_period_states
        self._parents = array("Q", [0])

    def run(self, limit: int | None, on_progress: OnProgress) -> None:
        """Walk until all was walked, something is wrong, or `limit` states were met."""
        began = time.perf_counter()
        order, parents, steps, after = self.order, self._parents, self._steps, self._after
        seen = set(order)
        transitions = at = 0
        while at < len(order) and self.finding is None and (limit is None or len(order) < limit):
            state = order[at]
            for position, outcome in steps(state):
                transitions += 1
                reached = after(state, position, outcome)
                if isinstance(reached, str):
                    self.finding = Finding(kind=reached, schedule=(*self._path(at), _told(position, outcome)))
                    break
                if reached not in seen:
                    seen.add(reached)
                    order.append(reached)
                    parents.append(at)
            at += 1
            if at % self._progress_period_states == 0:
                on_progress(len(order), transitions)
        self._transitions = transitions
        self._complete = at == len(order) and self.finding is None
        self._seconds = time.perf_counter() - began

    def figures(self) -> Figures:
        """Return what `run` came to."""
        return Figures(
            states=len(self.order),
            transitions=self._transitions,
            seconds=self._seconds,
            complete=self._complete,
            violations=() if self.finding is None else (self.finding,),
        )

    def _path(self, at: int) -> list[str]:
        """The steps that led to a state. Raises LocalError for one that no step leads to."""
        path = [at]
        while path[-1]:
            path.append(self._parents[path[-1]])
        states = [self.order[number] for number in reversed(path)]
        return [self._step_between(before, reached) for before, reached in pairwise(states)]

    def _step_between(self, before: State, reached: State) -> str:
        for position, outcome in self._steps(before):
            if self._after(before, position, outcome) == reached:
                return _told(position, outcome)
        raise LocalError("a state was reached by no step")


def _told(position: int, outcome: Told) -> str:
    return f"member {position} {outcome.text}"


class Walk(ABC):
    """One random schedule, from its start: the steps in its `path`. It ends when it is `over`, or at its limit."""

    def __init__(self, limit_steps: int) -> None:
        self.limit_steps = limit_steps
        self.path: list[str] = []
        self.over = False

    @abstractmethod
    def step(self) -> str | None:
        """Take a step, or none; returns what must never happen and happened."""

    def end(self) -> str | None:
        """Return what is wrong once the last step is taken, if anything is."""
        return None


WalkT = TypeVar("WalkT", bound=Walk)


def walk_at_random(
    begin: Callable[[], WalkT], ended: Callable[[WalkT], object], steps: int, on_progress: OnProgress
) -> Figures:
    """Begin and end one walk after the other, until `steps` steps are taken or something is wrong."""
    began = time.perf_counter()
    taken = 0
    violations: tuple[Finding, ...] = ()
    while taken < steps and not violations:
        walk, wrong = begin(), None
        limit = min(steps, taken + walk.limit_steps)
        while wrong is None and not walk.over and taken < limit:
            wrong = walk.step()
            taken += 1
            if taken % WALK_PROGRESS_PERIOD_STEPS == 0:
                on_progress(taken, taken)
        wrong = walk.end() if wrong is None else wrong
        if wrong is not None:
            violations = (Finding(kind=wrong, schedule=tuple(walk.path)),)
        ended(walk)
    seconds = time.perf_counter() - began
    return Figures(states=taken, transitions=taken, seconds=seconds, complete=False, violations=violations)


def taken_from(bag: list[ItemT], rng: random.Random, *, repeat: float) -> ItemT:
    """Draw something from a bag; with the probability `repeat` it stays there for another time."""
    at = rng.randrange(len(bag))
    item = bag[at]
    if rng.random() > repeat:
        bag[at] = bag[-1]
        bag.pop()
    return item
