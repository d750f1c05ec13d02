"""Finals that do not come from their owner, had from those who reported that they hold all finals of the plan.

Without that a participant reports too late to keep its place: its stall deadline for finals is as long as the least
grace of a lead that has a quorum of reports.

Who has a delegate (protocol/sites.py) has all finals from that one, once it reported; from others where it does not
within DELEGATE_S of the first of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from shoal.collectives.reduce import Reduction
from shoal.node.rounds.pace import QUIET_S
from shoal.node.state.catchup import CatchUp
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.timeouts import Since

COPY_RETRY_S = 0.5  # between tries to have finals from others than their owner
DELEGATE_S = 1.5
DELEGATE_SHARE = 0.25
"""Time for a delegate to have all finals once others have: so long, or as much of what the reduction took. A lead with
a quorum of reports waits for twice as long."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Copy:
    """One transfer under way. cancel: ends it, if it is not over."""

    reduction: Reduction
    chunks: Sequence[int]
    donors: Sequence[PeerId]
    began: float
    cancel: Callable[[], None] = lambda: None


class Copying:
    """At most one transfer of such finals. `begin` begins one, says how to cancel it, and has `over` called at its end.

    Sans-IO.
    """

    def __init__(self, begin: Callable[[Copy], None]) -> None:
        self._begin = begin
        self._copy: Copy | None = None
        self._not_before = float("-inf")
        self._complete_since, self._looked_since, self._delegate_failed = Since(), Since(), False
        self.complete_at: Sequence[PeerId] = ()
        """Other participants that hold all finals of the plan that the reduction under way goes by."""

    @property
    def under_way(self) -> bool:
        """True if finals are on their way."""
        return self._copy is not None

    def look(
        self, reduction: Reduction, quiet: Collection[PeerId], now: float, *, closed_to: Collection[PeerId]
    ) -> None:
        """Have what `quiet` owners owe from others, if there are some who hold it, and not what came meanwhile.

        closed_to: of whom the reduction takes nothing more. A transfer that takes long begins again once there are
        more to have it from; what it brought stays.
        """
        copy, lacking = self._copy, reduction.wanted
        if reduction.delegate is None:
            donors = [peer for peer in self.complete_at if peer not in {*quiet, *closed_to}]
            chunks = sorted(chunk for peer in quiet for chunk in reduction.lacking(peer)[1])
        else:
            donors, chunks = self._donors(reduction.delegate, now, closed_to), sorted(lacking)
        if copy is not None:
            more = now - copy.began >= QUIET_S and not set(donors) <= set(copy.donors)
            if not lacking.isdisjoint(copy.chunks) and not (more and chunks):
                return
            self._end()
        if chunks and donors and now >= self._not_before:
            self._copy = Copy(reduction, chunks, donors, now)
            self._begin(self._copy)

    def _donors(self, delegate: PeerId, now: float, closed_to: Collection[PeerId]) -> list[PeerId]:
        """Peers to copy all finals from, for a node with this delegate."""
        complete = [peer for peer in self.complete_at if peer not in closed_to]
        took_s, waited_s = self._looked_since.note(True, now), self._complete_since.note(bool(complete), now)
        if delegate in complete and not self._delegate_failed:
            return [delegate]
        return complete if self._delegate_failed or waited_s >= max(DELEGATE_S, DELEGATE_SHARE * took_s) else []

    def over(self, copy: Copy, *, failed_at: float | None = None) -> None:
        """A transfer ended, or failed, and is tried again after a while."""
        if failed_at is not None:
            self._not_before, self._delegate_failed = failed_at + COPY_RETRY_S, True
        if self._copy is copy:
            self._copy = None

    def stop(self) -> None:
        """The reduction under way is over, is revised, or takes nothing more from some: nobody is known to have it."""
        self.complete_at = ()
        self._complete_since, self._looked_since, self._delegate_failed = Since(), Since(), False
        self._end()

    def _end(self) -> None:
        if self._copy is not None:
            self._copy.cancel()
        self._copy = None


def copying_beside(
    catchup: CatchUp,
    spawn: Callable[[Callable[[], Awaitable[None]]], None],
    *,
    clock: Callable[[], float] = lambda: time.monotonic(),
) -> Copying:
    """Return a `Copying` whose transfers `spawn` runs beside whoever looks; `clock` is theirs, in seconds."""

    async def run(copy: Copy, scope: trio.CancelScope) -> None:
        final_format, failed_at = copy.reduction.final_format, None
        logger.debug("round %d: %d finals do not come from their owners", final_format.plan.round, len(copy.chunks))
        with scope:
            try:
                await catchup.copy_finals(final_format, copy.chunks, copy.donors, copy.reduction.take_copy)
            except NetworkError as error:
                logger.info("round %d: %s", final_format.plan.round, error)
                failed_at = clock()
        copying.over(copy, failed_at=failed_at)

    def begin(copy: Copy) -> None:
        scope = trio.CancelScope()
        copy.cancel = scope.cancel
        spawn(partial(run, copy, scope))

    copying = Copying(begin)
    return copying
