"""Message relay: between two members that have no link, a third that is linked to both passes messages on.

    A ──Reach(lacks B)──► F, G, H …          each tells all it is linked to whom it does not reach itself
    A ──Ready──► F ──the same envelope──► B  F and G do so, the first two of A's and B's common neighbours by hash,
                                             of members and founders as far as there are any
    A ──Ready──► H                           H keeps it to itself

Only what came over its signer's own link is passed on, once, so no message makes more than one hop, and no more than
`RELAYS_PER_PAIR` copies of it reach anybody. The receiver checks the signer's signature as always, and takes what it
has already from nobody: a relay can withhold a message, not change, invent or repeat one. How much a node passes on
from one to another, and how much between all pairs together, is bounded.

Where everybody reaches everybody, nothing of this costs more than looking at an empty table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates, TokenBucket, take_of_all
from shoal.protocol.messages import domain_hash

RELAYS_PER_PAIR = 2
PATH_BYTES_PER_S = 128 << 10
PATH_BURST_BYTES = 4 << 20
"""From one to another. A round's messages of one signer are some hundred KiB at most, most of them once."""
TOTAL_BYTES_PER_S = 8 << 20
TOTAL_BURST_BYTES = 64 << 20
PATH_LIMIT = 4096
"""Beyond it the path that was used least lately begins anew."""


class MessageRelay:
    """Pairs without a link, as this node knows them, and what follows for the messages that pass through it.

    Peers are named only while they are linked: `told` when one says whom it lacks, `forget` when its link is lost.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self.belongs: Callable[[PeerId], bool] = lambda peer: False
        """True for a peer of the swarm, as all nodes know it: where enough are, strangers pass on nothing."""
        self._lacks: dict[PeerId, frozenset[PeerId]] = {}
        self._paths: Rates[tuple[PeerId, PeerId]] = Rates(PATH_BYTES_PER_S, PATH_BURST_BYTES, limit=PATH_LIMIT)
        self._total = TokenBucket(TOTAL_BYTES_PER_S, TOTAL_BURST_BYTES)
        self.dropped = 0
        """Copies that there was no room for."""

    @property
    def needed(self) -> bool:
        """True if anybody is known who does not reach somebody."""
        return bool(self._lacks)

    @property
    def lacking(self) -> frozenset[PeerId]:
        """The live peers that this node does not reach itself."""
        return self._lacks.get(self._me, frozenset())

    def lack(self, peers: Collection[PeerId]) -> None:
        """This node does not reach these live peers."""
        self.told(self._me, peers)

    def told(self, peer: PeerId, lacks: Collection[PeerId]) -> None:
        """A linked peer says whom it does not reach."""
        if lacks:
            self._lacks[peer] = frozenset(lacks) - {peer}
        else:
            self._lacks.pop(peer, None)

    def forget(self, peer: PeerId) -> None:
        """Its link is lost: what it would say is not known any more."""
        self._lacks.pop(peer, None)

    def apart(self, one: PeerId, other: PeerId) -> bool:
        """True if either of the two says that it does not reach the other."""
        return other in self._lacks.get(one, ()) or one in self._lacks.get(other, ())

    def targets(self, signer: PeerId, linked: Collection[PeerId], size_bytes: int, now: float) -> tuple[PeerId, ...]:
        """Peers to pass a message on to that came from its signer itself, as far as there is allowance for it.

        The bytes are counted as sent.
        """
        if self.apart(self._me, signer):
            return ()
        chosen = [p for p in sorted(linked) if self.apart(signer, p) and self._me in self.through(signer, p, linked)]
        return tuple(peer for peer in chosen if self._spend(signer, peer, size_bytes, now))

    def through(self, one: PeerId, other: PeerId, linked: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Peers that pass on what the two have to say to each other, as far as is known; `linked` to this node.

        The choice depends on nothing but the pair, those who reach both, and who belongs, so all come to the same.
        """
        near = {self._me, *linked} - {one, other}
        members = set(filter(self.belongs, near))
        chosen = self._by_hash(one, other, members)
        if len(chosen) < RELAYS_PER_PAIR:
            chosen += self._by_hash(one, other, near - members)
        return tuple(chosen[:RELAYS_PER_PAIR])

    def _by_hash(self, one: PeerId, other: PeerId, peers: Collection[PeerId]) -> list[PeerId]:
        """Those of the peers that reach both, in the order in which they are to pass on what the two say."""
        pair = [end.encode() for end in sorted((one, other))]
        common = [peer for peer in peers if not self.apart(peer, one) and not self.apart(peer, other)]
        return sorted(common, key=lambda peer: domain_hash("forward", *pair, peer.encode()))

    def _spend(self, signer: PeerId, target: PeerId, size_bytes: int, now: float) -> bool:
        fits = take_of_all((self._paths.of((signer, target), now), self._total), size_bytes, now)
        self.dropped += not fits
        return fits
