"""Rows of `shoal bench scale`, computed from the events that the nodes logged, and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from shoal.lab.fleet import control_rate_kb_s
from shoal.lab.targets import Spread
from shoal.node.reporting.events import CaughtUp, Certified, Died, Event, Linked, Revived
from shoal.testnet.delays import round_durations
from shoal.testnet.run_record import RunRecord


def count_of(record: RunRecord, *kinds: type[Event]) -> int:
    """Number of events of these kinds, over all nodes."""
    return sum(isinstance(entry.event, kinds) for entry in record.entries)


def deaths_announced(record: RunRecord) -> int:
    """Number of times that a node held another for dead, which had not taken its leave."""
    return sum(isinstance(entry.event, Died) and not entry.event.left for entry in record.entries)


def evictions(record: RunRecord, struck: Collection[int]) -> int:
    """Count the evictions of nodes other than those that were struck, after the first round."""
    return sum(number > 1 and node.index not in struck for number, node, _ in record.evictions())


def seconds_of_rounds(record: RunRecord) -> Spread | None:
    """Seconds that a round takes, without the first, which waits for the start."""
    return Spread.of_any(took for number, took in round_durations(record).items() if number > 1)


def _first_ends(record: RunRecord) -> dict[int, float]:
    """The moment at which each round was certified by whoever was first."""
    first: dict[int, float] = {}
    for _, event in record.certified():
        first[event.round] = min(event.at, first.get(event.round, inf))
    return first


def ends_between(record: RunRecord, begin: float, end: float) -> list[float]:
    """The moments at which the rounds were certified that were in this time, each by whoever was first."""
    return sorted(at for at in _first_ends(record).values() if begin <= at <= end)


def rounds_of(record: RunRecord, nodes: Collection[int], after: int, begin: float, end: float) -> set[int]:
    """Rounds after `after` that one of these nodes certified in this time."""
    certified = ((index, event) for index, event in record.certified() if event.round > after)
    return {event.round for index, event in certified if index in nodes and begin <= event.at <= end}


def all_past_s(record: RunRecord, number: int, since: float) -> float | None:
    """Seconds from `since` until every node is past a round, by its own certificate or another's; None if never."""
    past: dict[int, float] = {}
    for entry in record.entries:
        if isinstance(entry.event, Certified | CaughtUp) and entry.event.round >= number:
            past[entry.node] = min(entry.event.at, past.get(entry.node, inf))
    return max(0.0, max(past.values()) - since) if len(past) == len(record.nodes) else None


def pace_s(ends: Sequence[float]) -> float | None:
    """The median time from one end to the next; None of fewer than two."""
    took = [later - earlier for earlier, later in pairwise(ends)]
    return statistics.median(took) if took else None


def fewest_contributors(record: RunRecord, since: float) -> int:
    """The fewest contributions in any certified round that began after that; 0 without any."""
    under_way = 1 + max((number for number, at in _first_ends(record).items() if at < since), default=0)
    found = (event for _, event in record.certified() if event.round > under_way)
    return min((event.contributors for event in found), default=0)


def control_kb_s(record: RunRecord) -> float | None:
    """Control that a node sends a second, in kB: the median over the nodes, between its first and last round."""
    certified = record.certified()
    found = (control_rate_kb_s([event for index, event in certified if index == node.index]) for node in record.nodes)
    rates = [rate for rate in found if rate is not None]
    return statistics.median(rates) if rates else None


def times_dead(record: RunRecord, peers: Collection[str], begin: float, end: float) -> tuple[float, ...]:
    """Lengths of the times that a node held one of `peers` for dead, which began within begin..end.

    One that is still so when the run ends lasts until then. What these peers say of each other does not count.
    """
    themselves = {node.index for node in record.nodes if node.peer_id in peers}
    since: dict[tuple[int, str], float] = {}
    lasted = []
    for node, event in ((entry.node, entry.event) for entry in record.entries):
        if node in themselves or not isinstance(event, Died | Revived | Linked) or event.peer not in peers:
            continue
        pair = node, event.peer
        if isinstance(event, Died):
            if not event.left and begin <= event.at <= end:
                since.setdefault(pair, event.at)
        elif pair in since:
            lasted.append(event.at - since.pop(pair))
    return (*lasted, *(record.ended_at - at for at in since.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A time in which all trainers trained and none contributed. used_s: processor time of each daemon in it."""

    seconds: float
    used_s: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Processor time that each daemon had used by then (wall clock), in seconds."""

    at: float
    used_s: dict[int, float]


def rest_of(looks: Sequence[Look], end: float) -> Rest | None:
    """The time of rest from the first of these looks to the last before `end`; None of fewer than two."""
    within = [look for look in looks if look.at <= end]
    if len(within) < 2:
        return None
    first, last = within[0], within[-1]
    return Rest(seconds=last.at - first.at, used_s={i: last.used_s[i] - used for i, used in first.used_s.items()})


def rest_percent(rests: Sequence[Rest]) -> float | None:
    """Share of a core that a daemon uses at rest, in percent: the median over the daemons, over all these times."""
    if not rests:
        return None
    seconds = sum(rest.seconds for rest in rests)
    daemons = {index for rest in rests for index in rest.used_s}
    used = [sum(rest.used_s.get(index, 0.0) for rest in rests) for index in sorted(daemons)]
    return 100 * statistics.median(used) / seconds if used and seconds else None
