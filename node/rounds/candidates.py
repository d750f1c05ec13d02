"""What the next state will be, for each plan of the round whose finals are here: the basis of a report and a vote.

However many plans a round has, there is memory for one state in the making. It stands as the finals that came last have
it; should another plan's value be decided, the chunks in which the two differ are made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio

from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, OuterSettings
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.state.finals_file import FinalsWriter
from shoal.node.state.states import StateCache
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
            term=previous.next_term,
            round=self.finals.plan.round,
            base=previous.hash,
            plan=self.finals.plan.hash,
            digest=self.digest,
            bitmaps=self.finals.bitmaps_root,
            tokens=self.finals.tokens,
        )


class Candidates:
    """The candidates of the round under way."""

    def __init__(self, *, cache: StateCache, outer: OuterSettings) -> None:
        self._cache = cache
        self._outer = outer
        self._by_plan: dict[bytes, Candidate] = {}
        self._next: NextState | None = None
        self._begun: FinalsWriter | None = None
        """Of finals that nothing was worked out of yet."""

    def begin_round(self, outer: OuterSettings) -> None:
        """A new round begins, with this outer step."""
        self._outer = outer
        self._by_plan.clear()
        self._next = None
        self._drop_begun()

    def get(self, plan_hash: bytes) -> Candidate | None:
        """The candidate of a plan, if its finals are here."""
        return self._by_plan.get(plan_hash)

    def of(self, value: Value) -> Candidate | None:
        """The candidate that a certified value names, if it is here and led to the same digest."""
        candidate = self._by_plan.get(value.plan)
        return candidate if candidate is not None and candidate.digest == value.digest else None

    def begin(self, state: CertifiedState, finals: Finals) -> UseFinal | None:
        """Begin what `work_out` does, of `finals` that are still to be checked. What it does not follow is undone.

        Returns what is to be called with each that was checked, if anything is left to be done. Raises LocalError if
        they do not follow the state.
        """
        if finals.plan.hash in self._by_plan:
            return None
        apply = self._over(state, finals.plan).ahead(finals.plan)
        self._drop_begun()
        self._begun = self._cache.finals_writer(finals)
        return apply

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None

    def _over(self, state: CertifiedState, plan: Plan) -> NextState:
        if self._next is None or self._next.base is not state:
            grid, known = Grid(state.numel, plan.chunk_values), partial(self._cache.header, state)
            self._next = NextState(state, self._outer, grid, self._cache.vectors, header=known)
        return self._next

    async def work_out(self, state: CertifiedState, finals: Finals, seconds: float) -> Candidate:
        """Apply `finals` over `state`, and keep them on disk before this node reports.

        Raises StorageError, and LocalError if they do not follow the state.

        Cancellation: finals may be on disk, nothing else happened.
        """
        after = self._over(state, finals.plan)
        with self._writer(finals) as finish:
            header = await trio.to_thread.run_sync(after.complete, finals, APPLY_THREADS)
            await trio.to_thread.run_sync(finish)
        self._cache.put_finals(finals)
        candidate = Candidate(header=header, digest=header.digest, finals=finals, seconds=seconds)
        self._by_plan[finals.plan.hash] = candidate
        return candidate

    @contextmanager
    def _writer(self, finals: Finals) -> Iterator[Callable[[], None]]:
        """Have `finals` written; what is given returns when they are there, and may raise StorageError.

        Nothing stays of them when the block is left before that.
        """
        writer, self._begun = self._begun, None
        if writer is None or not writer.writes(finals):
            if writer is not None:
                writer.abandon()
            writer = self._cache.finals_writer(finals)
        try:
            yield writer.finish
        finally:
            writer.abandon()

    async def take(self, candidate: Candidate) -> CertifiedState:
        """The state of the candidate that was certified, made again where another came after it. The round is over.

        Cancellation: it can be taken again.
        """
        assert self._next is not None
        self._next.close()
        header = await trio.to_thread.run_sync(self._next.complete, candidate.finals, APPLY_THREADS)
        state = self._next.take(header)
        self._next = None
        return state
