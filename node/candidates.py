"""What the next state will be, for each plan of the round whose finals are here: the basis of a report and a vote."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.outer import OuterSettings, apply_finals
from shoal.collectives.state import CertifiedState
from shoal.node.states import StateShelf
from shoal.protocol.messages import Report, Value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """S(e) as the finals of one plan make it; `seconds` is how long the finals took to come."""

    state: CertifiedState
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
        )


class Candidates:
    """The candidates of the round under way."""

    def __init__(self, *, shelf: StateShelf, outer: OuterSettings, durable: bool) -> None:
        self._shelf = shelf
        self._outer = outer
        self._durable = durable
        self._by_plan: dict[bytes, Candidate] = {}

    def clear(self) -> None:
        """A new round begins."""
        self._by_plan.clear()

    def get(self, plan_hash: bytes) -> Candidate | None:
        """The candidate of a plan, if its finals are here."""
        return self._by_plan.get(plan_hash)

    def of(self, value: Value) -> Candidate | None:
        """The candidate that a certified value names, if it is here and led to the same digest."""
        candidate = self._by_plan.get(value.plan)
        return candidate if candidate is not None and candidate.digest == value.digest else None

    async def work_out(self, state: CertifiedState, finals: Finals, seconds: float) -> Candidate:
        """Apply `finals` to a copy of `state`, and keep them where they must be kept before this node reports.

        Raises StorageError. Cancellation: finals may be on disk, nothing else happened.
        """
        after, _ = await trio.to_thread.run_sync(apply_finals, state, finals, self._outer)
        header = await trio.to_thread.run_sync(self._shelf.header, after)
        if self._durable:
            await trio.to_thread.run_sync(self._shelf.save_finals, finals)
        self._shelf.put_finals(finals)
        candidate = Candidate(state=after, digest=header.digest, finals=finals, seconds=seconds)
        self._by_plan[finals.plan.hash] = candidate
        return candidate
