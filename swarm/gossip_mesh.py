"""GossipSub's neighbours, in the order in which peers come.

Whoever asks to be a neighbour is one until the next heartbeat, which keeps a few at random. Strangers that pass nothing
on could so be all that a node has. Here those stay who come first (`shoal.protocol.places`), and are asked until there
are enough of them; the others have the room that is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from shoal.protocol.identity import PeerId

from libp2p.peer.id import ID  # isort: skip
from libp2p.pubsub.gossipsub import GossipSub  # isort: skip

Changes = defaultdict[ID, list[str]]
"""Topics, by peer."""


class OrderedMesh(GossipSub):  # type: ignore[misc]
    """GossipSub with an order among its neighbours; `comes_first` says who has a place before others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.comes_first: Callable[[PeerId], bool] = lambda peer: False

    def mesh_heartbeat(self) -> tuple[Changes, Changes]:
        """Whom to ask to be a neighbour, and whom to tell that it is none any more; both are so already."""
        asked = [(peer, topic) for topic in self.mesh for peer in self._lacking(topic)]
        for peer, topic in asked:
            self.mesh[topic].add(peer)
            self._notify_mesh_peer_added(peer, topic)
        graft, prune = super().mesh_heartbeat()
        for peer, topic in asked:
            graft[peer].append(topic)
        return graft, prune

    def _lacking(self, topic: str) -> list[ID]:
        """Who comes first and is to become a neighbour, as long as there are not `degree` of them."""
        subscribed = self.pubsub.peer_topics.get(topic, ())
        first = [peer for peer in subscribed if self._is_first(peer) and self._is_gossipsub_peer(peer)]
        more = [peer for peer in first if peer not in self.mesh[topic] and not self._check_back_off(peer, topic)]
        has = sum(peer in self.mesh[topic] for peer in first)
        found: list[ID] = self.select_from_minus(self.degree - has, more, ())
        return found

    def _select_peers_for_pruning(self, topic: str, num_to_prune: int) -> list[ID]:
        """Who gives way where there are too many: at random, but nobody who comes first before all others have."""
        others = [peer for peer in self.mesh[topic] if not self._is_first(peer)]
        gone: list[ID] = self.select_from_minus(num_to_prune, others, ())
        first = [peer for peer in self.mesh[topic] if self._is_first(peer)]
        gone += self.select_from_minus(num_to_prune - len(gone), first, ())
        return gone

    def _is_first(self, peer: ID) -> bool:
        return self.comes_first(PeerId(str(peer)))
