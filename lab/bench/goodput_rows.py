"""Accounts of the time of nodes whose steps all take as long: what was certified, what was lost, and why.

    time of a node    down | starting ─► joining ─► making steps ─► standing still ─► making steps ─► … ─► killed
    steps made        in a certified round | killed with their node, neither contributed nor on its disk | else lost

A step that was made is worth the time that a step takes. What is beyond that between two steps is time standing still
if another step had fitted into it, else steps that took longer.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from shoal.node.reporting.events import Contributed, Event, Resumed, RoundEnded, TrainerStarted
from shoal.testnet.run_record import RunRecord

Span = tuple[float, float]
"""From when to when, in wall-clock seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """Times at which a node did something, in wall-clock seconds.

    lives: of its processes. steps: when it ended each. contributed, trainers: when it announced a contribution, and
    when it had a trainer. resumed: when it took up work that it had not contributed before it was killed, and how many
    steps of it.
    """

    lives: Sequence[Span]
    steps: Sequence[float]
    contributed: Sequence[float] = ()
    trainers: Sequence[float] = ()
    resumed: Sequence[tuple[float, int]] = ()

    def steps_in(self, begin: float, end: float) -> Sequence[float]:
        """The steps that ended after `begin`, and not after `end`."""
        return self.steps[bisect_right(self.steps, begin) : bisect_right(self.steps, end)]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Time of all nodes within a window, in seconds, in parts that sum up to `all_s`.

    certified_s: steps in rounds that were certified. unfinished_s: steps that were to be contributed when the node was
    killed, and that it did not find on its disk. lost_s: other steps that no certified round has; less than 0 where
    some have steps from before the window. starting_s: from a restart until the trainer is ready; joining_s: from there
    until the first step begins. still_s: steps that could have been made between two that were, or after the last.
    slow_s: what steps took longer than the median one. down_s: without a process.
    """

    all_s: float
    certified_s: float
    unfinished_s: float
    lost_s: float
    starting_s: float
    joining_s: float
    still_s: float
    slow_s: float
    down_s: float

    @property
    def up_s(self) -> float:
        """Seconds in which nodes had a process."""
        return self.all_s - self.down_s

    @property
    def of_up(self) -> float:
        """Goodput: share of what the time that nodes were up could make."""
        return self.certified_s / self.up_s

    @property
    def of_all(self) -> float:
        """Share of what all the time could make."""
        return self.certified_s / self.all_s


class Restart(NamedTuple):
    """Seconds from a start until the trainer was ready, and until its first step began."""

    trainer_s: float
    step_s: float


def times_of(events: Iterable[Event], steps: Sequence[float], lives: Sequence[Span]) -> NodeTimes:
    """A node's times, from its log, what its trainer noted, and who started it."""
    found = list(events)
    return NodeTimes(
        lives=lives,
        steps=sorted(steps),
        contributed=[event.at for event in found if isinstance(event, Contributed)],
        trainers=[event.at for event in found if isinstance(event, TrainerStarted)],
        resumed=[(event.at, event.tokens) for event in found if isinstance(event, Resumed)],
    )


def window_of(record: RunRecord, seconds: float, ended_at: float) -> tuple[Span, dict[int, int]]:
    """From the first certificate of round 1 to the first after so many seconds, or else to `ended_at`.

    Returns it with the tokens of each round that was certified in it, by whoever was first.
    """
    first: dict[int, RoundEnded] = {}
    for _, event in record.certified():
        if event.round not in first or event.at < first[event.round].at:
            first[event.round] = event
    begin = first[1].at
    end = min((event.at for event in first.values() if event.at >= begin + seconds), default=ended_at)
    return (begin, end), {number: e.tokens for number, e in sorted(first.items()) if begin < e.at <= end}


def restarts_of(node: NodeTimes, window: Span, step_s: float) -> list[Restart]:
    """The restarts within the window after which a step was made."""
    found = []
    for begin, end in node.lives:
        steps, trainers = node.steps_in(begin, end), [at for at in node.trainers if begin < at <= end]
        if window[0] < begin <= window[1] and steps and trainers:
            found.append(Restart(trainer_s=trainers[0] - begin, step_s=steps[0] - step_s - begin))
    return found


def step_seconds(nodes: Iterable[NodeTimes], window: Span) -> float:
    """The median time from one step's end to the next; 0 if there are no two."""
    gaps = [gap for node in nodes for life in _within(node, window) for gap in _gaps(node.steps_in(*life))]
    return statistics.median(gaps) if gaps else 0.0


def account(nodes: Sequence[NodeTimes], window: Span, *, certified: int, step_s: float) -> Account:
    """Account of the time, of which so many steps were certified."""
    begin, end = window
    made = unfinished = 0
    up = starting = joining = still = 0.0
    for node in nodes:
        unfinished += _unfinished(node, window)
        for life in _within(node, window):
            steps = node.steps_in(*life)
            up += life[1] - life[0]
            made += len(steps)
            first = steps[0] - step_s if steps else life[1]
            if life[0] > begin:
                ready = min((at for at in node.trainers if life[0] < at < first), default=first)
                starting += ready - life[0]
                joining += first - ready
            else:
                still += first - life[0]
            still += sum(gap - step_s for gap in _gaps(steps) if gap >= 2 * step_s)
            rest = life[1] - steps[-1] if steps else 0.0
            still += rest if rest >= step_s else 0.0
    all_s = (end - begin) * len(nodes)
    return Account(
        all_s=all_s,
        certified_s=certified * step_s,
        unfinished_s=unfinished * step_s,
        lost_s=(made - certified - unfinished) * step_s,
        starting_s=starting,
        joining_s=joining,
        still_s=still,
        slow_s=up - starting - joining - still - made * step_s,
        down_s=all_s - up,
    )


def _within(node: NodeTimes, window: Span) -> list[Span]:
    """The node's lives as far as they are in the window."""
    spans = ((max(begin, window[0]), min(end, window[1])) for begin, end in node.lives)
    return [(begin, end) for begin, end in spans if begin < end]


def _gaps(steps: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(steps)]


def _unfinished(node: NodeTimes, window: Span) -> int:
    """Number of the steps that died with their node: made since its last contribution, and not taken up again.

    Those of a node that is down when the window ends are not taken up in it.
    """
    held, lost, lives = 0, 0, _within(node, window)
    for begin, end in lives:
        taken_up = sum(tokens for at, tokens in node.resumed if begin < at <= end)
        lost, held = lost + held - taken_up, taken_up
        since = max((at for at in node.contributed if begin < at <= end), default=None)
        held = (held if since is None else 0) + len(node.steps_in(begin if since is None else since, end))
    return lost + (held if lives and lives[-1][1] < window[1] else 0)
