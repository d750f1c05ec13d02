"""Neighbours: the few peers with which a node keeps links where not every pair needs one.

Each node dials CHOSEN_LINKS peers of its own choice: the next one in a circle of all that are known, ordered by the
hashes of their PeerIds, and the others at random. Both ends have a link, so a node has some ten in all, and
NEIGHBOUR_LIMIT at most. When one is lost another is chosen.

* *The circle holds the graph together.* Two halves that were apart are one circle again as soon as they know of each
  other, where random links alone would not be made anew, since everybody has enough of them. These in turn make the
  ways short, and hold where the circle is broken: with four of them a node, all but surely, the graph stays connected
  when a fifth of its nodes go at once.
* *A node's own choice is its defence.* Links that others made may all be one attacker's; CHOSEN_LINKS places are kept
  for whom this node dials itself. PeerIds are free, so half of the choices at random are among those that have proven
  something (`shoal.protocol.places`), once PROVEN_LEAST of them are known: a lone founder would be dialled by all.
* *Who is gone is known by its neighbours alone.* A record says that a peer was there at most RECORD_TTL_S ago. Who
  watched it die counts it as gone until it signs a newer record.

What all are to hear travels by gossip over these links.

Sans-IO: who is known, linked and being dialled are arguments, and so is whom to dial again by now.

Source: choices of one's own beside whoever comes, as in Heilman et al., "Eclipse Attacks on Bitcoin's Peer-to-Peer
Network" (USENIX Security 2015); a circle beside random links, as in Leitão et al., "HyParView" (DSN 2007), has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Set
from functools import lru_cache

from blake3 import blake3

from shoal.protocol.identity import PeerId
from shoal.protocol.records import RECORD_LIMIT

CHOSEN_LINKS = 5
"""Links that a node makes by its own choice; others choose it about as often."""
NEIGHBOUR_LIMIT = 16
"""Links of a node, those that others made included."""
PROVEN_SHARE = 0.5
"""Of the choices at random: among peers that have proven something."""
PROVEN_LEAST = 8
"""Known peers that have proven something from which on these are preferred: fewer would be dialled by everybody."""
WATCH_PACE = 5.0
"""Neighbours are watched, and links with them waited for, so many times as long as where rounds wait for everybody:
nobody waits for a neighbour, and another one costs more work than a slow one, which slow nodes have no time for."""
UNLINKED_S = 120.0
"""So long a peer whose link was lost is watched on, while the link is made again or its end is found: longer than the
failure detector takes."""

Order = tuple[int, int]
"""(boot, sequence) of a record."""


@lru_cache(maxsize=2 * RECORD_LIMIT)
def _place(peer: PeerId) -> bytes:
    """The place of a peer in the circle."""
    return blake3(peer.encode()).digest(8)


def circle_after(me: PeerId, peers: Collection[PeerId]) -> list[PeerId]:
    """Return peers as they follow `me` in the circle."""
    mine = _place(me)
    return sorted(peers, key=lambda peer: (_place(peer) <= mine, _place(peer), peer))


class Neighbours:
    """The choice of one node."""

    def __init__(self, *, me: PeerId, rng: random.Random) -> None:
        self._me = me
        self._rng = rng
        self._chosen: set[PeerId] = set()  # linked, or being dialled
        self._died: dict[PeerId, Order] = {}  # with its newest record at that time
        self._known: set[PeerId] = set()
        self._circle: list[PeerId] = []
        """These in the order of the circle, which is kept: who chooses looks often, and few come and go."""

    def kept_places(self, linked: Collection[PeerId]) -> int:
        """Count the links that this node has not yet made by its own choice: nobody who comes has their places."""
        return max(0, CHOSEN_LINKS - len(self._chosen.intersection(linked)))

    def settle(self, linked: Collection[PeerId]) -> frozenset[PeerId]:
        """Begin to have few links: some are kept at random, as many as this node chooses; return the others."""
        kept = self._rng.sample(sorted(linked), min(CHOSEN_LINKS, len(linked)))
        self._chosen = set(kept)
        return frozenset(linked).difference(kept)

    def choose(
        self,
        *,
        known: Set[PeerId],
        linked: Collection[PeerId],
        dialled: Collection[PeerId],
        may_dial: Callable[[PeerId], bool],
        is_proven: Callable[[PeerId], bool],
    ) -> list[PeerId]:
        """Choose whom to dial now, at most CHOSEN_LINKS; one more than these where another comes next in the circle.

        known: everybody else of whom this node knows. dialled: those whose dials are under way. may_dial: whether a
        peer that is neither linked nor dialled may be dialled by now.
        """
        taken = {*linked, *dialled}
        self._chosen &= taken
        made: list[PeerId] = []
        following = self._next_in_circle(known, taken, may_dial)
        if following is not None:
            made.append(following)
        lacking = CHOSEN_LINKS - len(self._chosen) - len(made)
        if lacking > 0:
            proven = {peer for peer in known if is_proven(peer)}
            others = [peer for peer in known if peer not in taken and peer != following and may_dial(peer)]
            made += self._draw(sorted(others), lacking, proven if len(proven) >= PROVEN_LEAST else set())
        self._chosen.update(made)
        return made

    def _next_in_circle(
        self, known: Set[PeerId], taken: Collection[PeerId], may_dial: Callable[[PeerId], bool]
    ) -> PeerId | None:
        """Find who is to be dialled since it comes next, None where the next one that is there is linked already."""
        if self._known != known:
            self._known, self._circle = set(known), circle_after(self._me, known)
        for peer in self._circle:
            if peer in taken:
                return None
            if may_dial(peer):
                return peer
        return None

    def _draw(self, peers: list[PeerId], count: int, preferred: Collection[PeerId]) -> list[PeerId]:
        """Draw so many of these, or all; each is one of the preferred with PROVEN_SHARE, while there are any."""
        self._rng.shuffle(peers)
        drawn: list[PeerId] = []
        while peers and len(drawn) < count:
            first = [peer for peer in peers if peer in preferred] if self._rng.random() < PROVEN_SHARE else []
            drawn.append((first or peers)[0])
            peers.remove(drawn[-1])
        return drawn

    # -- who is gone -----------------------------------------------------------------------------------------

    def died(self, peer: PeerId, order: Order) -> None:
        """A neighbour died, whose newest record is that of `order`."""
        self._died[peer] = order

    def lives(self, peer: PeerId) -> None:
        """A peer is linked, or was heard after all."""
        self._died.pop(peer, None)

    def is_gone(self, peer: PeerId, order: Order) -> bool:
        """True if a peer died here, and has not signed anything newer than the record of `order` since."""
        return peer in self._died and order <= self._died[peer]

    def keep(self, known: Collection[PeerId]) -> None:
        """Forget the deaths of all but these."""
        self._died = {peer: order for peer, order in self._died.items() if peer in known}
