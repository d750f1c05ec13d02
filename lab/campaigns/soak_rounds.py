"""The rounds of a swarm that lives for hours: each recomputed when all nodes are past it, and then forgotten.

A round's audit files (`shoal.testnet.check`) are removed once it is judged, and the journal keeps only what later
rounds need; else a soak would fill disk and memory by itself. What is found wrong stays where it is, files included.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.lab.campaigns.campaign_check import Member
from shoal.node.reporting.events import CaughtUp, Certified, Listening, RoundStarted
from shoal.testnet.check import Witness, check_round
from shoal.testnet.journal import Journal
from shoal.testnet.run_record import RunRecord, settled_rounds
from shoal.testnet.scenario import ROUND_LIMIT, Scenario

MARGIN: Final = 2
"""So many rounds before the last that all have certified are not judged yet: their files may still be written."""
PROBLEMS_LIMIT: Final = 100

Key = tuple[str, int]


@dataclass(slots=True)
class RoundJudge:
    """Judges the rounds of one swarm as they become final: wrong values, forks, and what cannot be verified is counted.

    last: the last round that was judged. gaps_s: from the first certificate of a round to the first of the next.
    """

    members: Sequence[Member]
    journal: Journal
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
        return min(reached[member.index] for member in self.members) - MARGIN

    def judge(self, until: int) -> None:
        """Judge all rounds up to `until`, and forget them. Blocks, for some milliseconds a round."""
        rounds: dict[Key, list[Certified]] = defaultdict(list)
        entries = tuple(self.journal.entries)
        for entry in entries:
            if isinstance(entry.event, Certified) and self.last < entry.event.round <= until:
                rounds[entry.event.term, entry.event.round].append(entry.event)
        run_record = RunRecord(
            scenario=Scenario(rounds=ROUND_LIMIT), began_at=0.0, ended_at=0.0, entries=entries, nodes=(), faults=()
        )
        witnesses = [
            Witness(index=m.index, peer_id=m.peer_id, folder=m.folder, settled=settled_rounds(run_record, m.index))
            for m in self.members
        ]
        missing = set(range(self.last + 1, until + 1)) - {number for _, number in rounds}
        self._note(f"round {number}: nobody certified it" for number in sorted(missing))
        for (term, number), events in sorted(rounds.items(), key=lambda found: found[0][1]):
            self._judge_round(witnesses, term, number, events)
        self.last = max(self.last, until)
        self._forget()

    def _judge_round(self, witnesses: Sequence[Witness], term: str, number: int, events: Sequence[Certified]) -> None:
        found = check_round(witnesses, term, number)
        self.checked += 1
        self.wrong_values += found.wrong_values
        trouble = list(found.errors)
        if found.wrong_values:
            trouble.append(f"round {number}: {found.wrong_values} wrong values")
        if len({(event.digest, event.value) for event in events}) > 1:
            self.forks += 1
            trouble.append(f"round {number}: certified with more than one digest or value")
        self.unverified += len(found.errors)
        self.problems += trouble[: max(0, PROBLEMS_LIMIT - len(self.problems))]
        at = min(event.at for event in events)
        if self._last_at is not None:
            self.gaps_s.append(at - self._last_at)
        self._last_at = at
        if not trouble:
            for witness in witnesses:
                shutil.rmtree(witness.folder / "rounds" / f"{term}-{number}", ignore_errors=True)

    def _note(self, problems: Iterable[str]) -> None:
        found = list(problems)
        self.unverified += len(found)
        self.problems += found[: max(0, PROBLEMS_LIMIT - len(self.problems))]

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
