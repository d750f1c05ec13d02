"""Duty of a row's head in one round: who is ready, when the row closes, who sums, and who was lost since.

    closes      when everyone on the list is ready that is not given up; or `grace_s` after half of those who train are;
                or at the deadline for training, with whoever is ready then
    sums        whoever was ready. Newcomers on their first list and who has no contribution weigh nothing
    lost        who is given up, was restarted, or moves nothing while the row is summed: the plan goes on without it

What comes later counts in the next round. A row in which nobody counts has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.lab.rows.row_messages import RowBegin, RowLoss, RowPlan, RowReady, RowTerm, roots_hash
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId

ROW_GRACE_S = 3.0
"""After half of a row is ready the rest has so long."""
TRAIN_DEADLINE_S = 600.0
"""From the beginning of a round until the row closes in any case."""
SUM_DEADLINE_S = 300.0
"""From a plan, or its last attempt, until the row has no weight in the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Time limits of a row's round, in seconds."""

    grace_s: float = ROW_GRACE_S
    train_deadline_s: float = TRAIN_DEADLINE_S
    sum_deadline_s: float = SUM_DEADLINE_S


@dataclass(slots=True)
class HeadDuty:
    """One round of one head. `row` is its list; who came onto it in this round weighs nothing."""

    settings: RowSettings
    begin: RowBegin
    row: Sequence[PeerId]
    begun_at: float
    readies: dict[PeerId, RowReady] = field(default_factory=dict)
    gone: set[PeerId] = field(default_factory=set)
    half_at: float | None = None
    plan: RowPlan | None = None
    planned: dict[PeerId, RowReady] = field(default_factory=dict)
    planned_at: float = math.inf
    attempt: int = 0
    lost: set[int] = field(default_factory=set)
    over: bool = False

    def take(self, peer: PeerId, ready: RowReady) -> bool:
        """Take note of a RowReady. Returns whether a plan that has it can do without it from now on, and must.

        Raises RemoteError where one process has two contributions.
        """
        known = self.readies.get(peer)
        if known is not None and known.life == ready.life:
            if known != ready:
                raise RemoteError("two contributions to one round of a row", peer=peer)
            return False
        if self.plan is None:
            self.readies[peer] = ready
        return peer in self.planned and self.planned[peer].life != ready.life

    def note_half(self, now: float) -> None:
        """Remember when half of those who train were ready."""
        if self.half_at is None and 2 * len(self.readies) >= len(self.row) - len(self.gone) - len(self.begin.came):
            trainers = [peer for peer in self.row if peer not in self.gone and peer not in self.begin.came]
            ready = sum(peer in self.readies for peer in trainers)
            if ready and 2 * ready >= len(trainers):
                self.half_at = now

    @property
    def closes_at(self) -> float:
        """Time at which the row closes at the latest, as far as is known."""
        deadline = self.begun_at + self.settings.train_deadline_s
        return deadline if self.half_at is None else min(deadline, self.half_at + self.settings.grace_s)

    @property
    def due_at(self) -> float:
        """Time at which this duty has something to do next."""
        if self.over:
            return math.inf
        return self.closes_at if self.plan is None else self.planned_at + self.settings.sum_deadline_s

    def may_close(self, now: float) -> bool:
        """True if nobody is waited for any more."""
        self.note_half(now)
        return now >= self.closes_at or all(peer in self.readies or peer in self.gone for peer in self.row)

    def close(self, now: float) -> RowPlan | None:
        """The plan of the row; None if nobody counts."""
        living = {place: peer for place, peer in enumerate(self.row) if peer not in self.gone and peer in self.readies}
        terms = tuple(
            RowTerm(place, 0 if peer in self.begin.came else ready.tokens, ready.upload, ready.download)
            for place, peer in living.items()
            for ready in (self.readies[peer],)
        )
        if not any(term.tokens for term in terms):
            return None
        self.planned = {peer: self.readies[peer] for peer in living.values()}
        self.planned_at = now
        self.plan = RowPlan(
            term=self.begin.term,
            round=self.begin.round,
            base=self.begin.base,
            turn=self.begin.turn,
            list=self.begin.list,
            terms=terms,
            roots=roots_hash([self.readies[self.row[term.place]].root for term in terms if term.tokens]),
        )
        return self.plan

    def lose(self, peers: Collection[PeerId], now: float) -> RowLoss | None:
        """Go on without those of `peers` that sum: the next attempt; None if none of them does."""
        places = {term.place for term in self.plan.terms if self.row[term.place] in peers} if self.plan else set()
        if self.over or places <= self.lost:
            return None
        self.lost |= places
        self.attempt += 1
        self.planned_at = now
        return RowLoss(
            term=self.begin.term,
            round=self.begin.round,
            base=self.begin.base,
            turn=self.begin.turn,
            attempt=self.attempt,
            gone=tuple(sorted(self.lost)),
        )

    def counted(self) -> list[RowTerm]:
        """The terms that count, in the row's order."""
        return [term for term in self.plan.terms if term.tokens and term.place not in self.lost] if self.plan else []
