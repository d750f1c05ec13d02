"""Pace of a reduction with each peer: who stalls, and what this node can be expected to move.

Progress is what the kernels of both ends have moved, so that a slow link shows it long before a frame is complete; for
peers behind a relay, what the reduction has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.collectives.frame_relay import Way
from shoal.collectives.reduce import Reduction
from shoal.collectives.stalls import LATE_S, STALL_S, BusyRate, StallWatch, stall_deadline_s
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import Since, in_crowd
from shoal.swarm.lanes.socket import Moved

QUIET_S = 1.0
"""Finals that others have already are had from them once their owner has moved nothing for so long."""
RATE_LEAST_S = 0.5


class Counters(Protocol):
    """Counts of the bytes that lanes have moved and have waiting."""

    def moved(self, peer: PeerId) -> Moved:
        """Bytes that have come from `peer`, and bytes that its kernel has taken, ever."""
        ...

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes posted to `peer` and not yet given to the kernel."""
        ...


@dataclass(frozen=True, slots=True)
class Stall:
    """peers: owe contributions or take nothing. late: owners, or holders, whose finals are late.

    This node itself is among the late while contributions that it waits for take long, and for another stall deadline,
    in which its finals get under way: from the shortest deadline on, since others may run less late; and also while it
    accuses whom it waits for, who may go on at any moment.
    """

    peers: frozenset[PeerId]
    late: frozenset[PeerId]


NOBODY = Stall(frozenset(), frozenset())


class Told:
    """Record of what was told of a reduction's stalls last."""

    def __init__(self) -> None:
        self._stall, self._at = NOBODY, float("-inf")

    def begin(self) -> None:
        """Another plan is followed: nothing is told of it yet."""
        self._stall = NOBODY

    def is_due(self, stall: Stall, now: float, *, nodes: int) -> bool:
        """True if this is to be told now, which it then was: it changed, or lasts for another STALL_S.

        A crowd of `nodes` hears of changes no sooner than of others that last longer.
        """
        again_s, is_news = in_crowd(STALL_S, nodes), stall != self._stall
        if (stall == NOBODY and not is_news) or now - self._at < (again_s - STALL_S if is_news else again_s):
            return False
        self._stall, self._at = stall, now
        return True


class Pace:
    """The pace of one revision of a reduction, from `now` on. `me` takes part in it.

    stall_s: the stall deadline. late_s: by how much longer this node waits, as of `StallWatch`.
    """

    def __init__(
        self,
        reduction: Reduction,
        counters: Counters,
        me: PeerId,
        now: float,
        *,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        plan = reduction.plan
        self.stall_s = stall_s = stall_deadline_s(plan)
        incoming, outgoing = _planned(plan, me)
        self._me = me
        self._waited_at = float("-inf")
        self._reduction = reduction
        self._counters = counters
        self._peers = [peer for peer in plan.remaining if peer != me]
        weighty = {participant.peer for participant in plan.participants if participant.weight}
        self._contributors = weighty.intersection(self._peers)
        self._receiving = StallWatch[PeerId](stall_s=stall_s, planned=incoming, late_s=late_s)
        self._sending = StallWatch[PeerId](stall_s=stall_s, planned=outgoing, late_s=late_s)
        self._late = StallWatch[PeerId](stall_s=stall_s + LATE_S, planned={}, late_s=late_s)
        self._quiet = StallWatch[PeerId](stall_s=QUIET_S, planned={})
        self._waiting_s, self._waits_since = in_crowd(STALL_S, len(plan.participants)), Since()
        received, taken = _totals(counters.moved(peer) for peer in self._peers)
        self._download = BusyRate(now, received)
        self._upload = BusyRate(now, taken)

    def look(self, now: float) -> Stall:
        """Note where everyone stands; returns who stalls."""
        moved = {peer: self._counters.moved(peer) for peer in self._peers}
        wanted = self._reduction.received_bytes
        received = {peer: moved[peer].received + wanted.get(peer, 0) for peer in self._peers}
        waiting = self._reduction.waiting_for()
        queued = [peer for peer in self._peers if self._counters.queued_bytes(peer)]
        self._receiving.look(now, owing=waiting.contributions, moved=received)
        self._late.look(now, owing=waiting.finals, moved=received)
        self._quiet.look(now, owing=waiting.finals, moved=received)
        self._sending.look(now, owing=queued, moved={peer: moved[peer].taken for peer in self._peers})
        came, went = _totals(moved.values())
        self._download.look(now, came, busy=bool(waiting.contributions or waiting.finals))
        self._upload.look(now, went, busy=bool(queued))
        direct = self._receiving.stalled() | self._sending.stalled()
        late = self._late.stalled() - direct
        if self._waits_since.note(bool(waiting.contributions), now) >= self._waiting_s:
            self._waited_at = now
        if now - self._waited_at < self.stall_s:
            late.add(self._me)
        return Stall(frozenset(direct), frozenset(late))

    def overdue(self, stall: Stall) -> Stall:
        """Add to `stall` what is to be said of a reduction that has had its time.

        Whoever lacks those of no more than half of the other contributors accuses these, however steadily they come:
        by a byte now and then one could hold up all for ever. Else all are slow, and have to be given more time.
        """
        waiting = self._reduction.waiting_for()
        owing = waiting.contributions if 2 * len(waiting.contributions) <= len(self._contributors) else frozenset()
        late = frozenset() if waiting.contributions else waiting.finals
        return Stall(stall.peers | owing, stall.late | late)

    def quiet(self) -> set[PeerId]:
        """Peers that owe finals and move nothing, although not for long enough to blame anybody."""
        return self._quiet.stalled()

    def rates(self) -> tuple[int, int]:
        """Bytes/s up and down, while there was something to move; 0 where there was not enough to tell."""
        return self._upload.bytes_per_s(RATE_LEAST_S), self._download.bytes_per_s(RATE_LEAST_S)


def planned_ways(plan: Plan, ways: Collection[Way]) -> dict[Way, float]:
    """Bytes/s expected from the one to the other of each, where their rates are known: as both ends expect it."""
    incoming = {receiver: _planned(plan, receiver)[0] for _, receiver in ways}
    return {way: incoming[way[1]][way[0]] for way in ways}


def _totals(moved: Iterable[Moved]) -> tuple[int, int]:
    """Bytes that came, and that were taken, in all."""
    both = sum(moved, Moved())
    return both.received, both.taken


def _planned(plan: Plan, me: PeerId) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
    """Bytes/s expected from and to each peer whose rates are known: its share of the narrower end."""
    mine = next(p for p in plan.participants if p.peer == me)
    others = max(1, len(plan.remaining) - 1)

    def share(one: int, other: int) -> float:
        return min((rate for rate in (one, other) if rate), default=0) / others

    remaining = [p for p in plan.participants if p.peer in plan.remaining]
    incoming = {p.peer: share(p.upload, mine.download) for p in remaining}
    return incoming, {p.peer: share(mine.upload, p.download) for p in remaining}
