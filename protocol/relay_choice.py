"""Paths through thirds for pairs that cannot reach each other, or of which one accuses the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Relay

THIRDS_LIMIT = 3
"""Paths that are tried between two: where the fault is in none of them, each only takes longer to show it."""

Pair = tuple[PeerId, PeerId]
"""Two peers between whom something is wrong, the lower first."""


def pair_of(one: PeerId, other: PeerId) -> Pair:
    """The two as a pair."""
    return (min(one, other), max(one, other))


def relays_of(plan: Plan) -> dict[Pair, PeerId]:
    """Through whom `plan` leads each pair that it relays."""
    peers = [p.peer for p in plan.participants] if plan.relays else []
    return {pair_of(peers[r.one], peers[r.other]): peers[r.via] for r in plan.relays}


class RelayChoice:
    """Which third was tried for which pair in this round."""

    def __init__(self) -> None:
        self._tried: dict[Pair, set[PeerId]] = {}

    def note(self, plan: Plan) -> None:
        """A plan with these relays was made or adopted."""
        for pair, via in relays_of(plan).items():
            self._tried.setdefault(pair, set()).add(via)

    def around(
        self, plan: Plan, pairs: Collection[Pair], alive: Collection[PeerId]
    ) -> tuple[tuple[Relay, ...], set[Pair]]:
        """The relays of `plan` with new ones for `pairs`; and the pairs for which everybody was tried, or enough.

        Who needs a relay to one of the two itself is none for them.
        """
        peers = [p.peer for p in plan.participants]
        relays, without = relays_of(plan), set[Pair]()
        troubled = {peer for pair in pairs for peer in pair}
        for pair in sorted(pairs):
            tried = self._tried.get(pair, set())
            apart = relays.keys() | set(pairs)
            free = [
                p
                for p in plan.remaining()
                if p in alive and p not in pair and p not in tried and not any(pair_of(p, end) in apart for end in pair)
            ]
            if not free or len(tried) >= THIRDS_LIMIT:
                without.add(pair)
                continue
            free.sort(key=lambda p: (p in troubled, sum(p == via for via in relays.values()), p))
            relays[pair] = free[0]
        return pack_relays(peers, relays), without


def pack_relays(peers: list[PeerId], relays: Mapping[Pair, PeerId]) -> tuple[Relay, ...]:
    """`relays` (pair to third) by places among `peers`, in order."""
    place = {peer: i for i, peer in enumerate(peers)}
    packed = []
    for (one, other), via in relays.items():
        first, second = sorted((place[one], place[other]))
        packed.append(Relay(first, second, place[via]))
    return tuple(sorted(packed, key=lambda relay: (relay.one, relay.other)))
