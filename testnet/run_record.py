"""Record of a run: all that happened, the raw material of the check and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard

from shoal.node.reporting.events import Event, RolledBack, Rollouts, RoundEnded, RoundStarted, Started
from shoal.testnet.faults import FaultRecord
from shoal.testnet.journal import Entry, round_begun
from shoal.testnet.scenario import Scenario

Outcome = Literal["running", "left", "killed", "crashed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that the testnet has about a node beside its events. lives: wall-clock (start, end) of its processes."""

    index: int
    peer_id: str
    outcome: Outcome
    lives: tuple[tuple[float, float], ...]


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
        """True if the event ends a round of the swarm; an agent's round is one only where there are no others."""
        return isinstance(event, RoundEnded) and (self._shares or not isinstance(event, Rollouts))

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
        """The same, with the rounds that decided to go back."""
        back = [
            (entry.node, entry.event)
            for entry in self.entries
            if isinstance(entry.event, RolledBack) and 1 <= entry.event.round <= self.scenario.rounds
        ]
        return [*self.certified(), *back]

    def certified_rounds(self) -> frozenset[tuple[str, int]]:
        """The (term, round)s that at least one node certified."""
        return frozenset((event.term, event.round) for _, event in self.certified())

    def missed(self) -> dict[int, tuple[int, ...]]:
        """Rounds that others certified without it, for each founder that runs at the end and that no fault struck."""
        struck = {index for record in self.faults if record.at is not None for index in record.fault.struck}
        own: dict[int, set[tuple[str, int]]] = {
            node.index: set()
            for node in self.nodes
            if node.index < self.scenario.nodes and node.outcome == "running" and node.index not in struck
        }
        for index, event in self.certified():
            own.get(index, set()).add((event.term, event.round))
        everyones = self.certified_rounds()
        return {index: tuple(sorted(number for _, number in everyones - ended)) for index, ended in own.items()}

    def unaffected_absent(self) -> tuple[int, ...]:
        """Those of them that missed every round."""
        rounds = len(self.certified_rounds())
        return tuple(index for index, missed in self.missed().items() if len(missed) == rounds > 0)


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
