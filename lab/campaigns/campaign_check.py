"""Judgement of a swarm's rounds in one run, from what its nodes left on disk: event logs and audit files.

* every certified round is recomputed, and a fork is one that was certified with two digests or values (`rounds`);
* nobody voted or proposed twice in a view, or below a view that it had moved to, over all its lives;
* no round took a node longer than the protocol's own deadlines allow (`round_bound_s`);
* whom no fault struck was not evicted, certified every round that anybody did, and kept its trainer; who only lost
  lanes was not left out of any sum;
* nobody saw two certificates of a round, or proof that another lied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.lab.campaigns.rounds import judge_rounds
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_kind, read_log
from shoal.node.reporting.events import Certified, RoundStarted, Signed, ViewChanged
from shoal.node.rounds.reducing import LANE_DEADLINE_S, MEND_RETRY_S
from shoal.protocol.identity import PeerId
from shoal.protocol.leading import RELAY_SETTLE_S, REPLAN_SETTLE_S, REPORT_GRACE_S
from shoal.protocol.membership import detection_bound_s
from shoal.protocol.timeouts import HELD_TIMEOUT_S, PROPOSE_TIMEOUT_S, doubled
from shoal.testnet.check import Witness
from shoal.testnet.check_inputs import InputRules, errors_of_inputs
from shoal.testnet.journal import Entry
from shoal.testnet.run_record import alarms
from shoal.testnet.wall_clock import Change, TrueTimes

MACHINE_S: Final = 3.0
"""Seconds that a machine with fewer cores than nodes may add: the protocol's bounds hold for timers that are on time.
"""


_RIGHT: Final[Mapping[int, Sequence[Change]]] = MappingProxyType({})


def round_bound_s(*, peers: int, faults: int, cut: bool, calm_s: float, lies: bool = False) -> float:
    """Seconds after `faults` that strike together within which the survivors must certify a round.

    A kill or stop is noticed when its node is believed dead at the latest; a cut when lanes cannot be had again, the
    stall deadline is over, and the lead believes a lone accuser. Then the lead, or the next one, waits for what was on
    its way, and for everybody to say what they hold. What was lost is done again, no longer than a whole undisturbed
    round, `calm_s`. Faults that strike together may be noticed one after the other. In the end a participant that lives
    and does not report is waited for, half as long as all that took. No patience with a lead that lives and does
    nothing is in it: these faults make none; but if one `lies`, it may lead next, and its view is wasted.
    """
    noticed_s = detection_bound_s(peers, awaited=True)
    if cut:
        noticed_s = LANE_DEADLINE_S + MEND_RETRY_S + STALL_S + LATE_S + RELAY_SETTLE_S
    repaired_s = faults * (noticed_s + REPLAN_SETTLE_S + HELD_TIMEOUT_S + calm_s)
    wasted_s = doubled(PROPOSE_TIMEOUT_S, faults) if lies else 0.0
    return calm_s + repaired_s + max(REPORT_GRACE_S, repaired_s / 2) + wasted_s + MACHINE_S


def machine_s(load: float) -> float:
    """Seconds to add to a bound for a load of so many runnable processes a core: MACHINE_S for each one too many."""
    return MACHINE_S * max(0.0, load - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rounds of one run to judge, the faulted one first.

    released_at: when the faulted round, for which all nodes had stood still, was let go (wall clock). struck: the
    nodes that faults struck in it; how long it took those says nothing about the protocol. cut: nothing of the others
    may be left out, though some had their lanes cut, or their clocks set. codec: of all rounds. liar: the node that
    lies, whose word counts for nothing, and who may be left out and convicted. rules: of what comes again of what no
    round counted; None where contributions are not to be made again.
    """

    first: int
    last: int
    released_at: float
    struck: frozenset[int]
    cut: bool
    bound_s: float
    codec: str
    liar: PeerId | None = None
    rules: InputRules | None = None


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Findings in the rounds of one run. All but rounds_checked are to be zero or empty; problems has each in words.

    late_rounds: rounds that took somebody longer than their bound. evicted: nodes that no fault struck and that the
    faulted round went on without; absent: those that did not certify a round of others. coverage: the share of what all
    nodes contributed that this round included, where lanes were cut, nobody lies, and it was certified.
    """

    rounds_checked: int = 0
    wrong_values: int = 0
    forks: int = 0
    broken_votes: int = 0
    late_rounds: int = 0
    unverified: int = 0
    evicted: int = 0
    absent: int = 0
    coverage: float | None = None
    problems: tuple[str, ...] = ()


def examine(nodes: Sequence[Witness], window: Window, clocks: Mapping[int, Sequence[Change]] = _RIGHT) -> Findings:
    """Judge the rounds of `window`. Blocks, for a second or so. clocks: when those of some nodes were set."""
    honest = [node for node in nodes if node.peer_id != window.liar]
    times = {node.index: TrueTimes(clocks.get(node.index, ((-math.inf, 0.0),))) for node in honest}
    entries = [
        Entry(node.index, times[node.index].of(event)) for node in honest for event in read_log(node.folder / LOG_NAME)
    ]
    entries.sort(key=lambda entry: entry.event.at)
    verdicts = judge_rounds(nodes, entries, range(window.first, window.last + 1))
    certified = [one for one in verdicts if one.certified]
    broken = [line for node in honest for line in broken_votes(node, window.first, window.last)]
    late = list(_late(entries, window))
    rules, inputs = window.rules, tuple[str, ...]()
    if rules is not None:
        inputs = errors_of_inputs(honest, window.last, rules, first=window.first)
    recoded = [
        f"round {one.check.round}: in codec {one.check.codec}, not {window.codec}"
        for one in certified
        if one.check.codec != window.codec
    ]
    faulted = next((event for one in certified for event in one.certified if event.round == window.first), None)
    others = [] if faulted is None else [node for node in honest if node.index not in window.struck]
    evicted = [one.index for one in others if faulted is not None and one.peer_id not in faulted.members]
    missed = {index: rounds for index, rounds in _missed(entries, window, honest).items() if rounds}
    coverage = None
    if faulted is not None and window.cut and window.liar is None:  # of all contributions, those planned with
        coverage = faulted.coverage * min(1.0, faulted.contributors / len(nodes))
    lost = [
        f"round {window.first}: node {index}, which no fault struck or that lost only lanes, was evicted"
        for index in evicted
    ]
    lost += [
        f"rounds {', '.join(map(str, rounds))}: no fault struck node {index}, and it did not certify them"
        for index, rounds in missed.items()
    ]
    if coverage is not None and coverage < 1.0:
        lost.append(f"round {window.first}: covers {coverage:.1%}, and nobody was gone")
    return Findings(
        rounds_checked=len(certified),
        wrong_values=sum(one.check.wrong_values for one in verdicts),
        forks=sum(one.forked for one in verdicts),
        broken_votes=len(broken),
        late_rounds=len({number for number, _ in late}),
        unverified=len(recoded) + len(inputs) + sum(len(one.check.errors) for one in verdicts),
        evicted=len(evicted),
        absent=len(missed),
        coverage=coverage,
        problems=(
            *(problem for one in verdicts for problem in one.problems),
            *broken,
            *(text for _, text in late),
            *lost,
            *recoded,
            *inputs,
            *alarms(
                (entry for entry in entries if entry.event.at >= window.released_at),
                {node.index for node in honest} - window.struck,
                liar=window.liar,
            ),
        ),
    )


def _missed(entries: Sequence[Entry], window: Window, nodes: Sequence[Witness]) -> dict[int, list[int]]:
    """Rounds of the window that others certified without it, for each node that no fault struck."""
    rounds: dict[int, set[int]] = {node.index: set() for node in nodes}
    for entry in entries:
        if isinstance(entry.event, Certified) and window.first <= entry.event.round <= window.last:
            rounds[entry.node].add(entry.event.round)
    everyones = set().union(*rounds.values())
    return {index: sorted(everyones - own) for index, own in rounds.items() if index not in window.struck}


def broken_votes(node: Witness, first: int, last: int) -> list[str]:
    """List the rounds in which a node went against what it had signed, over all its lives."""
    said: set[tuple[str, str, int, int]] = set()
    promised: dict[tuple[str, int], int] = {}
    broken = []
    for signed in read_kind(node.folder / LOG_NAME, Signed):
        if not first <= signed.round <= last:
            continue
        key = (signed.name, signed.term, signed.round, signed.view)
        decision = (signed.term, signed.round)
        if isinstance(signed, ViewChanged):
            promised[decision] = max(promised.get(decision, 0), signed.view)
            continue
        if key in said:
            broken.append(f"round {signed.round}: node {node.index} {signed.name} twice in view {signed.view}")
        if signed.view < promised.get(decision, 0):
            broken.append(f"round {signed.round}: node {node.index} {signed.name} in view {signed.view}, past it")
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
