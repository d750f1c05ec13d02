"""Failures of nodes in the course of time, and what data parallel training that stops and restarts makes of them.

The model of stop and restart. All nodes make each step together. When one fails, all stop; as soon as all are up again
they go on from the newest checkpoint, and loading it takes no time. Each checkpoint comes after as much work as the one
before, and writing it takes its time, in which nobody trains; what was made since is lost with a failure. The interval
is the best one for this very trace, which nobody knows beforehand: so it does at least as well as with Young's interval
√(2 · checkpoint · time between failures), of Young, Communications of the ACM 17(9), 1974.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of nodes within `seconds`: for each node the moments, in seconds from the beginning. All start up.

    A node that fails is down for `down_s`. The times in which it is up are drawn from an exponential distribution.
    """

    seconds: float
    down_s: float
    of_nodes: tuple[tuple[float, ...], ...]

    @property
    def count(self) -> int:
        """Number of failures of all nodes."""
        return sum(map(len, self.of_nodes))

    @property
    def up_s(self) -> float:
        """Seconds that nodes are up, all together."""
        down = (min(self.down_s, self.seconds - at) for moments in self.of_nodes for at in moments)
        return self.seconds * len(self.of_nodes) - sum(down)


def draw_failures(seed: int, *, nodes: int, seconds: float, mtbf_s: float, down_s: float) -> Failures:
    """Draw failures, one per node each `mtbf_s` of the time that it is up, as `seed` has them."""

    def of_one(node: int) -> tuple[float, ...]:
        draw = random.Random(f"{seed}:goodput:{node}")
        moments: list[float] = []
        at = draw.expovariate(1 / mtbf_s)
        while at < seconds:
            moments.append(at)
            at += down_s + draw.expovariate(1 / mtbf_s)
        return tuple(moments)

    return Failures(seconds=seconds, down_s=down_s, of_nodes=tuple(map(of_one, range(nodes))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAndRestart:
    """The best that data parallel training with stop and restart makes of a trace.

    interval_s: work between two checkpoints; inf for none. useful_s: of the time of all nodes together, what is not
    lost. of_up, of_all: as shares of the time that nodes were up, and of all their time.
    """

    interval_s: float
    useful_s: float
    of_up: float
    of_all: float


def stop_and_restart(failures: Failures, checkpoint_s: float) -> StopAndRestart:
    """The best interval for this trace, where writing a checkpoint takes `checkpoint_s`, more than 0."""
    spans = _all_up(failures)
    best = max(_intervals(spans, checkpoint_s), key=lambda interval_s: _kept_s(spans, interval_s, checkpoint_s))
    useful_s = _kept_s(spans, best, checkpoint_s)
    nodes = len(failures.of_nodes)
    return StopAndRestart(
        interval_s=best,
        useful_s=useful_s,
        of_up=useful_s * nodes / failures.up_s,
        of_all=useful_s / failures.seconds,
    )


def _all_up(failures: Failures) -> list[float]:
    """Lengths of the spans in which all nodes are up; with the last ends the trace, with each other a failure."""
    moments = sorted(at for moments in failures.of_nodes for at in moments)
    spans, up_since = [], 0.0
    for at in moments:
        if at > up_since:
            spans.append(at - up_since)
        up_since = max(up_since, at + failures.down_s)
    return [*spans, max(0.0, failures.seconds - up_since)]


def _intervals(spans: Sequence[float], checkpoint_s: float) -> list[float]:
    """Every interval that may be the best: with a longer one some span would end before a checkpoint that it holds."""
    return [inf, *(span / n - checkpoint_s for span in spans for n in range(1, int(span / checkpoint_s)))]


def _kept_s(spans: Sequence[float], interval_s: float, checkpoint_s: float) -> float:
    """Seconds of work that are not lost, where the work of the last span counts up to its end."""

    def checkpoints(span: float) -> int:
        return int(span / (interval_s + checkpoint_s) + _ROUNDING)

    *ended, last = spans
    kept = sum(checkpoints(span) for span in ended) * interval_s if any(map(checkpoints, ended)) else 0.0
    whole = checkpoints(last)
    written = whole * interval_s if whole else 0.0
    return kept + written + min(last - whole * (interval_s + checkpoint_s) if whole else last, interval_s)


_ROUNDING = 1e-9
"""A span that an interval was made of holds as many checkpoints as it was divided by."""
