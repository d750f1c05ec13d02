"""Rounds of a swarm that lives on: each recomputed when all nodes are past it, and judged by what they logged and kept.

A swarm that lives for hours forgets them as they are judged (`RoundJudge`): a round's audit files
(`shoal.testnet.check`) are removed, and the journal keeps only what later rounds need; else a soak would fill disk and
memory by itself. What is found wrong stays where it is, files included.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.node.reporting.events import CaughtUp, Certified, Listening, RoundEnded, RoundStarted
from shoal.testnet.check import RoundCheck, Witness, check_round
from shoal.testnet.journal import Entry, Journal
from shoal.testnet.run_record import RunRecord, settle
from shoal.testnet.scenario import ROUND_LIMIT, Scenario

MARGIN: Final = 2
"""So many rounds before the last that all have certified are not judged yet: their files may still be written."""
PROBLEMS_LIMIT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVerdict:
    """Verdict on one round: its values, and who certified what; nobody did where `certified` is empty."""

    check: RoundCheck
    certified: tuple[RoundEnded, ...] = ()

    @property
    def forked(self) -> bool:
        """True if it was certified with two digests or values."""
        return len({(event.digest, event.value) for event in self.certified}) > 1

    @property
    def problems(self) -> tuple[str, ...]:
        """Lines that say what is wrong or could not be verified."""
        number, wrong_values = self.check.round, self.check.wrong_values
        return (
            *([f"round {number}: {wrong_values} wrong values"] if wrong_values else []),
            *([f"round {number}: certified with more than one digest or value"] if self.forked else []),
            *self.check.errors,
        )


def judge_rounds(nodes: Sequence[Witness], entries: Sequence[Entry], rounds: range) -> list[RoundVerdict]:
    """The verdicts on these rounds, in their order, by the nodes' events and what they kept. Blocks.

    Of a liar only what it kept is of use: its contributions were summed.
    """
    record = RunRecord(
        scenario=Scenario(rounds=ROUND_LIMIT), began_at=0.0, ended_at=0.0, entries=tuple(entries), nodes=(), faults=()
    )
    certified: dict[tuple[str, int], list[RoundEnded]] = defaultdict(list)
    for _, event in record.certified():
        if event.round in rounds:
            certified[event.term, event.round].append(event)
    witnesses = settle(record, nodes)
    found = [
        RoundVerdict(check=check_round(witnesses, *position), certified=tuple(events))
        for position, events in certified.items()
    ]
    missing = set(rounds) - {number for _, number in certified}
    nobody = (RoundCheck(term="", round=at, errors=(f"nobody certified round {at}",)) for at in missing)
    found += [RoundVerdict(check=check) for check in nobody]
    return sorted(found, key=lambda one: (one.check.round, one.check.term))


@dataclass(slots=True)
class RoundJudge:
    """Judges the rounds of one swarm as they become final: wrong values, forks, and what cannot be verified is counted.

    last: the last round that was judged. gaps_s: from the first certificate of a round to the first of the next. liar:
    the index of a node whose events count for nothing, and who is not waited for.
    """

    nodes: Sequence[Witness]
    journal: Journal
    liar: int | None = None
    checked: int = 0
    wrong_values: int = 0
    forks: int = 0
    unverified: int = 0
    problems: list[str] = field(default_factory=list)
    last: int = 0
    gaps_s: list[float] = field(default_factory=list)
    _last_at: float | None = None

    def ripe(self) -> int:
        """The last round that can be judged: all nodes are well past it."""
        reached: dict[int, int] = defaultdict(int)
        for entry in self.journal.entries:
            if isinstance(entry.event, Certified | CaughtUp):
                reached[entry.node] = max(reached[entry.node], entry.event.round)
        return min(reached[node.index] for node in self.nodes if node.index != self.liar) - MARGIN

    def judge(self, until: int) -> None:
        """Judge all rounds up to `until`, and forget them. Blocks, for some milliseconds a round."""
        believed = [entry for entry in self.journal.entries if entry.node != self.liar]
        for verdict in judge_rounds(self.nodes, believed, range(self.last + 1, until + 1)):
            self._note(verdict)
        self.last = max(self.last, until)
        self._forget()

    def _note(self, verdict: RoundVerdict) -> None:
        check = verdict.check
        self.checked += bool(verdict.certified)
        self.wrong_values += check.wrong_values
        self.forks += verdict.forked
        self.unverified += len(check.errors)
        self.problems += verdict.problems[: max(0, PROBLEMS_LIMIT - len(self.problems))]
        if verdict.certified:
            at = min(event.at for event in verdict.certified)
            self.gaps_s += [] if self._last_at is None else [at - self._last_at]
            self._last_at = at
        if not verdict.problems:
            for node in self.nodes:
                shutil.rmtree(node.folder / "rounds" / f"{check.term}-{check.round}", ignore_errors=True)

    def _forget(self) -> None:
        """Keep the journal from the beginning of the first round on that is not judged, and where nodes listen."""
        entries = self.journal.entries
        begun = (
            at
            for at, entry in enumerate(entries)
            if isinstance(entry.event, RoundStarted | Certified | CaughtUp) and entry.event.round > self.last
        )
        first = next(begun, len(entries))
        listening = {entry.node: entry for entry in entries[:first] if isinstance(entry.event, Listening)}
        entries[:first] = listening.values()
