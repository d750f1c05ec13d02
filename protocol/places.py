"""Places that are not enough for everybody: who comes first, and who gives way to whom.

    FIRST        members of the last certificate, founders, the authority, and whom this node's user named
    CONTRIBUTOR  whoever else was a member after some round; where none is certified, of whom this node took something
    STRANGER     who never contributed

Who comes to where all places are taken gets one of a lower rank: a stranger's rather than a contributor's, and of one
rank the one that was silent longest. Nobody gives way to its like, so whoever is FIRST gives way to nobody; but a
stranger that said nothing for `SILENT_STRANGER_S` gives way to another one, who may have more to say. Where nobody
gives way there is no place left, and the newcomer is told so.

Whom this node dials only because somebody's record says where it is gains nothing by that: records are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from shoal.protocol.identity import PeerId

SILENT_STRANGER_S = 60.0
"""Without a word beyond signs of life. Every node that runs says who it is every few seconds."""

CONTRIBUTORS_LIMIT = 1024


class Rank(IntEnum):
    """Rank of a peer in the swarm, as this node knows it."""

    STRANGER = 0
    CONTRIBUTOR = 1
    FIRST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One that is taken. silent_s: since its holder last said more than that it is alive."""

    peer: PeerId
    rank: Rank
    silent_s: float


def gives_way(places: Iterable[Place], newcomer: Rank) -> PeerId | None:
    """The holder of the place that a newcomer gets where all are taken; None where nobody gives way to it."""
    may = [place for place in places if _may_give_way(place, newcomer)]
    return min(may, key=lambda place: (place.rank, -place.silent_s, place.peer)).peer if may else None


def _may_give_way(place: Place, newcomer: Rank) -> bool:
    if place.rank == newcomer == Rank.STRANGER:
        return place.silent_s >= SILENT_STRANGER_S
    return place.rank < newcomer


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
