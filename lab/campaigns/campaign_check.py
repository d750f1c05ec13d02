"""Judgement of a swarm's rounds in one run, from what its nodes left on disk: event logs and audit files.

* every certified round is recomputed (`check.py`), and every element of every applied update compared;
* a fork is a (term, round) that was certified with two different digests or values;
* nobody voted or proposed twice in a view, or below a view that it had moved to, over all its lives;
* no round took a node longer than the protocol's own deadlines allow (`round_bound_s`);
* who only lost lanes was neither evicted nor left out of any sum.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_kind, read_log
from shoal.node.reporting.events import Certified, RoundEnded, RoundStarted, Signed, ViewChanged
from shoal.node.rounds.reducing import LANE_DEADLINE_S, MEND_RETRY_S
from shoal.protocol.identity import PeerId
from shoal.protocol.leading import HELD_TIMEOUT_S, RELAY_SETTLE_S, REPLAN_SETTLE_S, REPORT_GRACE_S
from shoal.protocol.membership import detection_bound_s
from shoal.testnet.check import Check, Witness, check_swarm
from shoal.testnet.journal import Entry
from shoal.testnet.run_record import RunRecord, settled_rounds
from shoal.testnet.scenario import ROUND_LIMIT, Scenario

MACHINE_S: Final = 3.0
"""Seconds that a machine with fewer cores than nodes may add: the protocol's bounds hold for timers that are on time.
"""


def round_bound_s(*, peers: int, faults: int, cut: bool, calm_s: float) -> float:
    """Seconds after `faults` that strike together within which the survivors must certify a round.

    A kill or stop is noticed when its node is believed dead at the latest; a cut when lanes cannot be had again, the
    stall deadline is over, and the lead believes a lone accuser. Then the lead, or the next one, waits for what was on
    its way, and for everybody to say what they hold. What was lost is done again, no longer than a whole undisturbed
    round, `calm_s`. Faults that strike together may be noticed one after the other. In the end a participant that lives
    and does not report is waited for, half as long as all that took. No patience with a lead that lives and does
    nothing is in it: these faults make none.
    """
    noticed_s = detection_bound_s(peers)
    if cut:
        noticed_s = LANE_DEADLINE_S + MEND_RETRY_S + STALL_S + LATE_S + RELAY_SETTLE_S
    repaired_s = faults * (noticed_s + REPLAN_SETTLE_S + HELD_TIMEOUT_S + calm_s)
    return calm_s + repaired_s + max(REPORT_GRACE_S, repaired_s / 2) + MACHINE_S


def machine_s(load: float) -> float:
    """Seconds to add to a bound for a load of so many runnable processes a core: MACHINE_S for each one too many."""
    return MACHINE_S * max(0.0, load - 1.0)


def load_per_core() -> float:
    """Number of runnable processes a core on this machine, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node and its folder."""

    index: int
    peer_id: PeerId
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rounds of one run to judge, the faulted one first.

    released_at: when the faulted round, for which all nodes had stood still, was let go (wall clock). struck: the
    nodes that faults struck in it; how long it took those says nothing about the protocol. cut: of the others some had
    their lanes cut. codec: of all rounds.
    """

    first: int
    last: int
    released_at: float
    struck: frozenset[int]
    cut: bool
    bound_s: float
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings in the rounds of one run. All but rounds_checked are to be zero or empty; problems has each in words.

    evicted: nodes that no fault struck and that the faulted round went on without. coverage: the share of what all
    nodes contributed that this round included, where lanes were cut and it was certified.
    """

    rounds_checked: int
    wrong_values: int
    forks: int
    broken_votes: int
    late_rounds: int
    unverified: int
    evicted: int
    coverage: float | None
    problems: tuple[str, ...]


def examine(members: Sequence[Member], window: Window) -> Findings:
    """Judge the rounds of `window`. Blocks, for a second or so."""
    entries = sorted(_entries(members), key=lambda entry: entry.event.at)
    run_record = _run_record(entries, len(members), window)
    certified = [(node, event) for node, event in run_record.certified() if window.first <= event.round <= window.last]
    rounds = {(event.term, event.round) for _, event in certified}
    missing = set(range(window.first, window.last + 1)) - {number for _, number in rounds}
    checked = _recompute(members, run_record, rounds)
    forks = sorted(_forks(event for _, event in certified))
    broken = [line for member in members for line in broken_votes(member, window.first, window.last)]
    late = list(_late(entries, window))
    unverified = [
        *checked.errors,
        *(
            f"round {r.round}: in codec {r.codec}, not {window.codec}"
            for r in checked.rounds
            if r.codec != window.codec
        ),
        *(f"nobody certified round {number}" for number in sorted(missing)),
    ]
    faulted = next((event for _, event in certified if event.round == window.first), None)
    others = [] if faulted is None else [member for member in members if member.index not in window.struck]
    evicted = [m.index for m in others if faulted is not None and m.peer_id not in faulted.members]
    coverage = None
    if faulted is not None and window.cut:  # of the contributions of all, those that were planned with
        coverage = faulted.coverage * min(1.0, faulted.contributors / len(members))
    lost = [f"round {window.first}: node {index} lost only lanes and was evicted" for index in evicted if window.cut]
    if coverage is not None and coverage < 1.0:
        lost.append(f"round {window.first}: covers {coverage:.1%} for want of lanes")
    return Findings(
        rounds_checked=len(rounds),
        wrong_values=checked.wrong_values,
        forks=len(forks),
        broken_votes=len(broken),
        late_rounds=len({number for number, _ in late}),
        unverified=len(unverified),
        evicted=len(evicted),
        coverage=coverage,
        problems=(
            *(f"round {r.round}: {r.wrong_values} wrong values" for r in checked.rounds if r.wrong_values),
            *(f"round {number}: certified with more than one digest or value" for _, number in forks),
            *broken,
            *(text for _, text in late),
            *lost,
            *unverified,
        ),
    )


def _entries(members: Sequence[Member]) -> Iterator[Entry]:
    for member in members:
        for event in read_log(member.folder / LOG_NAME):
            yield Entry(member.index, event)


def _run_record(entries: Sequence[Entry], nodes: int, window: Window) -> RunRecord:
    scenario = Scenario(nodes=nodes, rounds=ROUND_LIMIT)
    return RunRecord(
        scenario=scenario, began_at=window.released_at, ended_at=0.0, entries=tuple(entries), nodes=(), faults=()
    )


def _recompute(members: Sequence[Member], run_record: RunRecord, rounds: Collection[tuple[str, int]]) -> Check:
    witnesses = [
        Witness(
            index=member.index,
            peer_id=member.peer_id,
            folder=member.folder,
            settled=settled_rounds(run_record, member.index),
        )
        for member in members
    ]
    return check_swarm(witnesses, rounds)


def _forks(certified: Iterator[RoundEnded]) -> set[tuple[str, int]]:
    states: Mapping[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    for event in certified:
        states[event.term, event.round].add((event.digest, event.value))
    return {key for key, different in states.items() if len(different) > 1}


def broken_votes(member: Member, first: int, last: int) -> list[str]:
    """List the rounds in which a node went against what it had signed, over all its lives."""
    said: set[tuple[str, str, int, int]] = set()
    promised: dict[tuple[str, int], int] = {}
    broken = []
    for signed in read_kind(member.folder / LOG_NAME, Signed):
        if not first <= signed.round <= last:
            continue
        key = (signed.name, signed.term, signed.round, signed.view)
        decision = (signed.term, signed.round)
        if isinstance(signed, ViewChanged):
            promised[decision] = max(promised.get(decision, 0), signed.view)
            continue
        if key in said:
            broken.append(f"round {signed.round}: node {member.index} {signed.name} twice in view {signed.view}")
        if signed.view < promised.get(decision, 0):
            broken.append(f"round {signed.round}: node {member.index} {signed.name} in view {signed.view}, past it")
        said.add(key)
    return broken


def _late(entries: Sequence[Entry], window: Window) -> Iterator[tuple[int, str]]:
    """(round, what) for every node and round above the bound."""
    began: dict[tuple[int, int], float] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, RoundStarted):
            began[entry.node, event.round] = event.at
        elif isinstance(event, Certified) and window.first <= event.round <= window.last:
            if event.round == window.first and entry.node in window.struck:
                continue
            start = max(began.get((entry.node, event.round), 0.0), window.released_at)
            if event.at - start > window.bound_s:
                took = f"{event.at - start:.1f} s, more than {window.bound_s:.1f} s"
                yield event.round, f"round {event.round}: took node {entry.node} {took}"
