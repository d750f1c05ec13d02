"""Places for peers where there is not room for all: which rank comes first, and which gives way to another.

    FIRST        members of the last certificate, founders, the authority, and peers that this node's user named
    CONTRIBUTOR  other members after some round; where none is certified, peers of whom this node took something
    STRANGER     peers that never contributed

A newcomer where all places are taken gets one of a lower rank: a stranger's rather than a contributor's, and of one
rank the one that was silent longest. Nobody gives way to its like, so a FIRST peer gives way to nobody; but a
stranger that said nothing for `SILENT_STRANGER_S` gives way to another one, which may have more to say. Where nobody
gives way there is no place left, and the newcomer is told so.

A peer that this node dials only because somebody's record has its address gains nothing by that: records are free.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from shoal.protocol.identity import PeerId

SILENT_STRANGER_S = 300.0
"""Without a word beyond signs of life. Every node that runs says who it is every 200 s at least (records.py)."""

CONTRIBUTORS_LIMIT = 1024


class Rank(IntEnum):
    """Rank of a peer in the swarm, as this node knows it."""

    STRANGER = 0
    CONTRIBUTOR = 1
    FIRST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place that is taken. silent_s: seconds since its holder last sent more than a sign of life."""

    peer: PeerId
    rank: Rank
    silent_s: float


def gives_way(places: Iterable[Place], newcomer: Rank) -> PeerId | None:
    """Choose the holder whose place a newcomer gets where all are taken; None where nobody gives way to it."""
    may = [place for place in places if _may_give_way(place, newcomer)]
    return min(may, key=lambda place: (place.rank, -place.silent_s, place.peer)).peer if may else None


def _may_give_way(place: Place, newcomer: Rank) -> bool:
    if place.rank == newcomer == Rank.STRANGER:
        return place.silent_s >= SILENT_STRANGER_S
    return place.rank < newcomer


def next_around(ring: Sequence[PeerId], me: PeerId, count: int) -> Sequence[PeerId]:
    """The next `count` peers after `me` around a ring of peers in order, or all where there are fewer."""
    here = bisect(ring, me)
    return (*ring[here:], *ring[:here])[:count]


class Contributors:
    """Peers of whom a node took something, where no certificate says who contributed; the last ones of this life."""

    def __init__(self) -> None:
        self._peers: dict[str, None] = {}

    def note(self, peer: str) -> None:
        """Note that something of this peer was taken."""
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > CONTRIBUTORS_LIMIT:
            del self._peers[next(iter(self._peers))]

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers
