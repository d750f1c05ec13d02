"""Followers: nodes that take the state of every round, and neither vote, contribute nor own chunks.

A follower is no participant of plans. It keeps links with a few peers (neighbours.py), be they members or followers
like itself, and waits at AWAITED_LIMIT of them for what follows on its chain:

    follower                               whom it waits at
      what follows on entry h? ─────────►    FOLLOWERS_LIMIT others wait here     ─► refused
                               ◄─────────    more than h, and the state, are here ─► the entries, at once
                               ◄─────────    else ─► the entries as soon as they are; none after AWAIT_S
      checks them, has the finals of the rounds, and gives the entries to those who wait at it

So each certificate goes down a tree of its own, whose roots are the members. A follower waits at its parent, who
brought the last entry, and at one other after the other. Where its parent is gone the other one brings the next entry,
and is the parent from then on. Two that wait at each other give each other nothing; each waits at a third as well.

* *What comes is checked*: each entry by the signatures of a quorum that the one before names, finals by their owners'
  signatures and the certified digest. Who brings anything else is left alone for a while, as who does not answer is.
* *What a node gives is bounded*: it lets FOLLOWERS_LIMIT followers in at most, and gives to who is linked alone.
* *Nothing waits for ever*: not to be answered, nor at a parent that has nothing. At one peer no wait begins within
  AGAIN_S of the last one, unless that brought something.

Sans-IO: the time is an argument, in seconds of any monotonic clock.

Source: the first to bring something is the parent, the others stand by, as in Leitão, Pereira, Rodrigues, "Epidemic
Broadcast Trees" (SRDS 2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from shoal.protocol.chain import Chain
from shoal.protocol.donors import DonorScores
from shoal.protocol.identity import PeerId
from shoal.protocol.places import next_around
from shoal.protocol.records import NodeRecord

FOLLOWS: Final = "follows"
"""In a record's capabilities: its node is a follower."""
FOLLOWERS_LIMIT: Final = 16
"""Followers that one node gives to."""
AWAITED_LIMIT: Final = 2
"""Linked peers at which a follower waits: its parent, and another in case that one is gone."""
WAITS_LIMIT: Final = 2 * AWAITED_LIMIT
"""Waits under way, with those at peers that are linked no more."""
AWAIT_S: Final = 10.0
"""A wait that brings nothing is over then: the peer may be gone, behind, or waiting at this node."""
LET_IN_S: Final = 10.0
"""From the answer to a hello to the link, at most: two questions of five seconds."""
AGAIN_S: Final = 1.0
"""Between the beginnings of two waits at one peer, where the first brought nothing: whoever answers at once with
nothing is not asked all the time."""


def is_follower(record: NodeRecord | None) -> bool:
    """True if a peer says of itself that it is a follower."""
    return record is not None and FOLLOWS in record.capabilities


def has_room(followers: Collection[PeerId], newcomer: PeerId) -> bool:
    """True if a node that gives to these followers has a place for another."""
    return newcomer in followers or len(followers) < FOLLOWERS_LIMIT


class Places:
    """Places that a node has for followers: those that are linked, and those that were just let in, take one each."""

    def __init__(self) -> None:
        self._let_in: dict[PeerId, float] = {}

    def take(
        self,
        newcomer: PeerId,
        linked: Collection[PeerId],
        now: float,
        comes_first: Callable[[PeerId], bool] = lambda peer: False,
    ) -> bool:
        """Let a newcomer in, if there is a place for it; the place is its own until its link is made, or LET_IN_S.

        linked: the followers that are. Many may say hello at once, before any of them is linked. comes_first: whether a
        peer has contributed; for one that has, a place that another has is free.
        """
        self._let_in = {p: at for p, at in self._let_in.items() if now - at < LET_IN_S and p not in linked}
        taken = {*linked, *self._let_in}
        if not has_room(taken, newcomer):
            if not comes_first(newcomer) or not has_room(set(filter(comes_first, taken)), newcomer):
                return False
            if (other := next((peer for peer in self._let_in if not comes_first(peer)), None)) is not None:
                del self._let_in[other]
        self._let_in[newcomer] = now
        return True


class Parents:
    """The peers at which a follower waits. `scores` remembers who did not answer, or brought what does not hold."""

    def __init__(self, me: PeerId, scores: DonorScores) -> None:
        self._me = me
        self._scores = scores
        self._parent: PeerId | None = None
        self._waits: set[PeerId] = set()
        self._began_at: dict[PeerId, float] = {}

    @property
    def parent(self) -> PeerId | None:
        """The peer that brought the last entry; None where it failed since, or nobody brought any."""
        return self._parent

    def first(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Order peers so that the parent comes first: what it told of it has."""
        return sorted(peers, key=lambda peer: peer != self._parent)

    def next(self, linked: Collection[PeerId], now: float) -> PeerId | None:
        """Pick whom to wait at from now on; None if nobody. Called whenever a wait may be due."""
        here = len(self._waits.intersection(linked))
        if here >= AWAITED_LIMIT or len(self._waits) >= WAITS_LIMIT:
            return None
        self._began_at = {peer: at for peer, at in self._began_at.items() if peer in linked}
        possible = [
            peer
            for peer in next_around(sorted(linked), self._me, len(linked))
            if peer not in self._waits
            and now - self._began_at.get(peer, -math.inf) >= AGAIN_S
            and not self._scores.resting(peer, now)
        ]
        if not possible:
            return None
        longest_ago = min(possible, key=lambda peer: self._began_at.get(peer, -math.inf))
        chosen = self._parent if self._parent in possible else longest_ago
        self._waits.add(chosen)
        self._began_at[chosen] = now
        return chosen

    def brought(self, peer: PeerId, *, new: bool) -> None:
        """The wait at `peer` is over, and it answered; new: with entries that hold and were not here."""
        self._waits.discard(peer)
        if new:
            self._parent = peer
            self._began_at.pop(peer, None)
            self._scores.showed(peer)

    def failed(self, peer: PeerId, now: float) -> None:
        """The wait at `peer` is over: it did not answer, has no place left, or what it brought does not hold."""
        self._waits.discard(peer)
        self._scores.disappointed(peer, now)
        if self._parent == peer:
            self._parent = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that waits: for an entry after the first `after`, or a rebase beyond so many, before `until`."""

    after: int
    rebases: int
    until: float


class Waiting:
    """Those who wait at this node, FOLLOWERS_LIMIT at most."""

    def __init__(self) -> None:
        self._asked: dict[PeerId, Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def come(self, peer: PeerId, after: int, rebases: int, now: float) -> bool:
        """`peer` waits from now on, in place of how it waited before; False where there is no place left."""
        if not has_room(self._asked, peer):
            return False
        self._asked[peer] = Asked(after, rebases, now + AWAIT_S)
        return True

    def due(self, chain: Chain, now: float, *, current: bool) -> list[PeerId]:
        """Those who are to be answered now, by what the chain has; they wait no more.

        current: the state at its head is here, so that who is told of it finds here what it then asks for.
        """
        over = [
            peer
            for peer, asked in self._asked.items()
            if now >= asked.until or (current and chain.after(asked.after, 1, asked.rebases))
        ]
        for peer in over:
            del self._asked[peer]
        return over

    def gone(self, peer: PeerId) -> None:
        """`peer` waits no more."""
        self._asked.pop(peer, None)
