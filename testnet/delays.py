"""Durations of rounds, and the delay that a fault cost beside the undisturbed ones."""

from __future__ import annotations

import statistics
from collections import defaultdict

from shoal.node.reporting.events import RoundStarted
from shoal.testnet.run_record import RunRecord


def round_durations(run_record: RunRecord) -> dict[int, float]:
    """Seconds that each certified round took: from the certificate before it to its own, the median over survivors.

    Round 1 counts from the moment when the first node began it. A survivor is a node still running at the end.
    """
    survivors = {node.index for node in run_record.nodes if node.outcome == "running"}
    ended: dict[int, dict[int, float]] = defaultdict(dict)
    for index, event in run_record.certified():
        if index in survivors:
            ended[index][event.round] = event.at
    begun = [e.event.at for e in run_record.entries if isinstance(e.event, RoundStarted) and e.event.round == 1]
    taken: dict[int, list[float]] = defaultdict(list)
    for at in ended.values():
        for number, end in at.items():
            start = at.get(number - 1) if number > 1 else min(begun, default=None)
            if start is not None:
                taken[number].append(end - start)
    return {number: statistics.median(values) for number, values in sorted(taken.items())}


def undisturbed_median(run_record: RunRecord, durations: dict[int, float]) -> float | None:
    """The median of the rounds that no fault touched; round 1, which waits for start-up, only if there is no other."""
    disturbed = {record.fault.round for record in run_record.faults}
    for record in run_record.faults:
        if record.at is not None and record.fault.duration_s is not None:
            disturbed |= _rounds_between(run_record, record.at, record.at + record.fault.duration_s)
    calm = {number: took for number, took in durations.items() if number not in disturbed}
    later = [took for number, took in calm.items() if number > 1]
    if later:
        return statistics.median(later)
    return calm.get(1)


def _rounds_between(run_record: RunRecord, start: float, end: float) -> set[int]:
    """Rounds under way at some time between two moments, by when the first node certified them."""
    ends: dict[int, float] = {}
    for _, event in run_record.certified():
        ends[event.round] = min(event.at, ends.get(event.round, event.at))
    return {number for number, at in ends.items() if at >= start and ends.get(number - 1, run_record.began_at) <= end}
