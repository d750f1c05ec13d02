"""What the next state will be, for each plan of the round whose finals are here: the basis of a report and a vote.

However many plans a round has, there is memory for one state in the making. It stands as the finals that came last have
it; should another plan's value be decided, the chunks in which the two differ are made again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from shoal.collectives.finals import FinalChunk, Finals
from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, OuterSettings
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.state_files import FinalsWriter
from shoal.node.states import StateShelf
from shoal.protocol.messages import Plan, Report, Value

APPLY_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """S(e) as the finals of one plan make it; `seconds` is how long the finals took to come."""

    header: StateHeader
    digest: bytes
    finals: Finals
    seconds: float

    def report(self, previous: Value) -> Report:
        """What this node tells the lead of it."""
        return Report(
            term=previous.term,
            round=self.finals.plan.round,
            base=previous.hash,
            plan=self.finals.plan.hash,
            digest=self.digest,
            bitmaps=self.finals.bitmaps_root,
            tokens=self.finals.tokens,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Takes the finals of one plan while the others are still on their way, so that little is left to do in the end."""

    plan: Plan
    next_state: NextState
    writer: FinalsWriter | None

    def final(self, chunk: int, final: FinalChunk) -> None:
        """A final is here: apply it, and have it written. For any thread; once its plan is given up, does nothing."""
        if self.writer is not None:
            self.writer.add(chunk, final.payload)
        self.next_state.apply(self.plan, chunk, final)


class Candidates:
    """The candidates of the round under way."""

    def __init__(self, *, shelf: StateShelf, outer: OuterSettings, durable: bool) -> None:
        self._shelf = shelf
        self._outer = outer
        self._durable = durable
        self._by_plan: dict[bytes, Candidate] = {}
        self._next: NextState | None = None
        self._ahead: Ahead | None = None

    def clear(self) -> None:
        """A new round begins."""
        self._by_plan.clear()
        self._next = None
        self._give_up()

    def get(self, plan_hash: bytes) -> Candidate | None:
        """The candidate of a plan, if its finals are here."""
        return self._by_plan.get(plan_hash)

    def of(self, value: Value) -> Candidate | None:
        """The candidate that a certified value names, if it is here and led to the same digest."""
        candidate = self._by_plan.get(value.plan)
        return candidate if candidate is not None and candidate.digest == value.digest else None

    def begin(self, state: CertifiedState, plan: Plan) -> Ahead:
        """The reduction of `plan` begins, over `state`; finals of any other plan are no longer taken ahead.

        Raises LocalError if the plan does not follow the state.
        """
        self._give_up()
        if self._next is None or self._next.base is not state:
            self._next = NextState(state, self._outer, Grid.of(plan), self._shelf.vectors)
        self._next.follow(plan)
        self._ahead = Ahead(plan, self._next, self._shelf.finals_writer(plan) if self._durable else None)
        return self._ahead

    def _give_up(self) -> None:
        if self._ahead is not None and self._ahead.writer is not None:
            self._ahead.writer.abandon()
        self._ahead = None

    async def work_out(self, state: CertifiedState, finals: Finals, seconds: float) -> Candidate:
        """Apply `finals` over `state`, and keep them where they must be kept before this node reports.

        Raises StorageError. Cancellation: finals may be on disk, nothing else happened.
        """
        ahead = self._ahead
        if ahead is None or ahead.plan.hash != finals.plan.hash:
            ahead = self.begin(state, finals.plan)
        if ahead.writer is not None:
            for chunk, final in enumerate(finals.chunks):
                ahead.writer.add(chunk, final.payload)
        header = await trio.to_thread.run_sync(ahead.next_state.complete, finals, APPLY_THREADS)
        if ahead.writer is not None:
            self._ahead = None
            await trio.to_thread.run_sync(ahead.writer.finish)
        self._shelf.put_finals(finals)
        candidate = Candidate(header=header, digest=header.digest, finals=finals, seconds=seconds)
        self._by_plan[finals.plan.hash] = candidate
        return candidate

    async def take(self, candidate: Candidate) -> CertifiedState:
        """The state of the candidate that was certified, made again where another came after it. The round is over.

        Cancellation: it can be taken again.
        """
        assert self._next is not None
        header = await trio.to_thread.run_sync(self._next.complete, candidate.finals, APPLY_THREADS)
        state = self._next.take(header)
        self._next = None
        return state
