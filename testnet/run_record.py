"""Record of a run: all that happened, the raw material of the check and the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeGuard

from shoal.node.reporting.events import (
    AgentDied,
    Certified,
    Event,
    Evidence,
    Forked,
    Planned,
    RolledBack,
    RoundEnded,
    RoundStarted,
    Started,
    TrainerRestarted,
)
from shoal.protocol.identity import PeerId
from shoal.testnet.check import Witness
from shoal.testnet.faults import FaultRecord
from shoal.testnet.journal import Entry, round_begun
from shoal.testnet.scenario import Scenario

Outcome = Literal["running", "left", "killed", "crashed"]
HARMLESS: Final = ("join", "clock")
"""Kinds of faults that are to keep nobody from any round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that the testnet has about a node beside its events. lives: wall-clock (start, end) of its processes.

    crashes: how many of these ended by themselves, which no fault explains. absent_at_end: it took no part in the last
    round or one after it, and was to. hung: it did not end in good order when it was asked to leave.
    """

    index: int
    peer_id: str
    outcome: Outcome
    lives: tuple[tuple[float, float], ...]
    crashes: int = 0
    absent_at_end: bool = False
    hung: bool = False


def tokens_by_round(ended: Iterable[RoundEnded]) -> dict[int, int]:
    """Tokens of each round: all that its certificate counts; without one each node tells of its own."""
    found: dict[int, list[RoundEnded]] = defaultdict(list)
    for event in ended:
        found[event.round].append(event)
    return {number: _tokens(events) for number, events in found.items()}


def _tokens(events: list[RoundEnded]) -> int:
    last = max(events, key=lambda event: event.term)
    return last.tokens if isinstance(last, Certified) else sum(event.tokens for event in events)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Record of all that happened in a run. began_at, ended_at: wall-clock seconds."""

    scenario: Scenario
    began_at: float
    ended_at: float
    entries: tuple[Entry, ...]
    nodes: tuple[NodeFacts, ...]
    faults: tuple[FaultRecord, ...]
    trouble: str | None = None

    def counts(self, event: Event) -> TypeGuard[RoundEnded]:
        """True if the event ends a round of the swarm."""
        return self.scenario.counts(event)

    def begun(self, event: Event) -> int | None:
        """The round of the swarm that a node begins with it: that of an agent is one only where there are no others."""
        return round_begun(event) if isinstance(event, RoundStarted) != self._shares else None

    @property
    def _shares(self) -> bool:
        return self.scenario.synchronisation.shares_rollouts

    def certified(self) -> list[tuple[int, RoundEnded]]:
        """Yield (node, event) of the scenario's rounds, without those that nodes certify after the last."""
        return [
            (entry.node, entry.event)
            for entry in self.entries
            if self.counts(entry.event) and 1 <= entry.event.round <= self.scenario.rounds
        ]

    def decided(self) -> list[tuple[int, RoundEnded | RolledBack]]:
        """Yield (node, event) of all rounds, those after the scenario's last and those that decided to go back too."""
        return [
            (entry.node, entry.event)
            for entry in self.entries
            if isinstance(entry.event, RolledBack) or self.counts(entry.event)
        ]

    @property
    def last_round(self) -> int:
        """The round with which the run was over; more may be certified."""
        return self.scenario.last_round(tokens_by_round(event for _, event in self.certified()))

    def certified_rounds(self) -> frozenset[tuple[str, int]]:
        """The (term, round)s that at least one node certified."""
        return frozenset((event.term, event.round) for _, event in self.certified())

    def unharmed(self) -> tuple[NodeFacts, ...]:
        """The nodes that no fault struck. To be started later is no harm, nor is a clock that is wrong."""
        struck = {
            index
            for record in self.faults
            if record.at is not None and record.fault.kind not in HARMLESS
            for index in record.fault.struck
        }
        return tuple(node for node in self.nodes if node.index not in struck)

    def missed(self) -> dict[int, tuple[int, ...]]:
        """Rounds that others certified without it, for each node that no fault struck.

        Who was started later could take part from the first round on that it certified. Where nothing is certified each
        has rounds of its own: it missed all or none.
        """
        own: dict[int, set[tuple[str, int]]] = {node.index: set() for node in self.unharmed()}
        for index, event in self.certified():
            own.get(index, set()).add((event.term, event.round))
        return {
            index: tuple(sorted(number for _, number in self._possible(index, ended) - ended))
            for index, ended in own.items()
        }

    def _possible(self, index: int, ended: set[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """The rounds in which an unharmed node could take part, which ended these."""
        if ended and not self.scenario.synchronisation.certifies:
            return frozenset(ended)
        founded = index < self.scenario.nodes
        first = 0 if founded else min((number for _, number in ended), default=math.inf)
        last = self.last_round
        return frozenset((term, number) for term, number in self.certified_rounds() if first <= number <= last)

    def unaffected_absent(self) -> tuple[int, ...]:
        """The nodes that no fault struck and that took part in fewer rounds than they could."""
        return tuple(index for index, missed in self.missed().items() if missed)

    def evictions(self) -> list[tuple[int, NodeFacts, float]]:
        """Yield (round, node, when) for everybody with whom a plan was begun that went on without it, once a round."""
        by_peer = {node.peer_id: node for node in self.nodes}
        found: dict[tuple[int, str], float] = {}
        for entry in self.entries:
            if isinstance(entry.event, Planned):
                for peer in entry.event.evicted:
                    found.setdefault((entry.event.round, peer), entry.event.at)
        return [(number, by_peer[peer], at) for (number, peer), at in found.items() if peer in by_peer]

    def evicted_alive(self) -> int:
        """Count the evictions of nodes that no fault struck, and whose process ran."""
        unharmed = {node.index for node in self.unharmed()}
        return sum(
            node.index in unharmed and any(start <= at <= end for start, end in node.lives)
            for _, node, at in self.evictions()
        )


def alarms(entries: Iterable[Entry], unharmed: Collection[int], *, liar: PeerId | None = None) -> list[str]:
    """Tell what nodes logged that never happens among nodes that are sound. unharmed: those that no fault struck.

    liar: one that is none, and is to be found out.
    """
    found = []
    for entry in entries:
        match entry.event:
            case Forked() as event:
                found.append(f"node {entry.node} saw two certificates of round {event.round}, and signs no more")
            case Evidence() as event if event.peer != liar:
                found.append(f"node {entry.node} has proof that {event.peer} lied in round {event.round}: {event.kind}")
            case TrainerRestarted() | AgentDied() as event if entry.node in unharmed:
                found.append(f"no fault struck node {entry.node}, and its trainer died: {event.cause}")
    return found


def settle(run_record: RunRecord, witnesses: Iterable[Witness]) -> list[Witness]:
    """These nodes, each with its rounds whose files must all be there, and those in which they were struck."""
    return [
        replace(one, settled=settled_rounds(run_record, one.index), flipped=flipped_rounds(run_record, one.index))
        for one in witnesses
    ]


def flipped_rounds(run_record: RunRecord, index: int) -> frozenset[tuple[str, int]]:
    """The (term, round)s that a node certified next after bits in its files were flipped."""
    ended = [event for node, event in run_record.certified() if node == index]
    corrupted = (one for one in run_record.faults if one.fault.kind == "corrupt" and one.error is None)
    struck = (one for one in corrupted if index in one.fault.struck)
    following = ([event for event in ended if one.at is not None and event.at >= one.at] for one in struck)
    first = (min(events, key=lambda event: event.at) for events in following if events)
    return frozenset((event.term, event.round) for event in first)


def settled_rounds(run_record: RunRecord, index: int) -> frozenset[tuple[str, int]]:
    """The (term, round)s that a node certified and lived on after: all its files of these must be there."""
    settled: set[tuple[str, int]] = set()
    pending: set[tuple[str, int]] = set()
    for entry in run_record.entries:
        if entry.node != index:
            continue
        if isinstance(entry.event, Started):  # a new process: what was pending, the old one may not have written
            pending.clear()
        settled |= pending
        pending.clear()
        if run_record.counts(entry.event):
            pending.add((entry.event.term, entry.event.round))
    return frozenset(settled)
