"""What participants say against each other while they reduce, and what the lead may believe of it.

A stall shows at two removes. Directly: a peer owes *me* a contribution, or does not take what I send. Indirectly: an
owner's final is late, but the owner may itself be waiting for somebody. So direct accusations are settled before any
others; and an owner that waits for contributions which do come, only slowly, says so by naming itself among the late,
before the others lose patience, and is not blamed. That holds until the reduction as a whole is overdue.

Where more than two live, a lone accuser is not believed: the fault may lie between the two. Such a pair is given
another path first, through a third. But an accuser does not stand alone if this node's own failure detector, which has
asked through others too, suspects the accused as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Plan, Relay, Stalled

PLANS_LIMIT = MEMBER_LIMIT
"""Plans of one round that one peer may speak about."""
THIRDS_LIMIT = 3
"""Paths that are tried between two: where the fault is in none of them, each only takes longer to show it."""

Pair = tuple[PeerId, PeerId]
"""Two peers between whom something is wrong, the lower first."""


def room_for(table: Mapping[bytes, Mapping[PeerId, object]], sender: PeerId) -> bool:
    """Whether a sender may add to a table keyed by plan: nobody fills it with plans that do not exist."""
    return sum(sender in row for row in table.values()) < PLANS_LIMIT


class Accusations:
    """All that was said in one round, by plan and accuser; the newest word of each stands."""

    def __init__(self) -> None:
        self._said: dict[bytes, dict[PeerId, Stalled]] = {}

    def take(self, sender: PeerId, message: Stalled) -> None:
        """`sender` accuses."""
        if room_for(self._said, sender):
            self._said.setdefault(message.plan, {})[sender] = message

    def believed(self, plan: Plan, alive: Collection[PeerId], suspected: Collection[PeerId] = ()) -> set[PeerId]:
        """Those that enough living participants of `plan` accuse: two of them, or one where that is enough.

        One is enough where it is the only other one, and against those that this node's own detector suspects.
        """
        said = self._heard(plan, alive)
        living = [peer for peer in plan.remaining() if peer in alive]

        def enough(peer: PeerId, accusers: int) -> bool:
            return accusers >= (1 if len(living) <= 2 or peer in suspected else 2)

        direct = {p for p in living if enough(p, sum(p in m.peers for a, m in said.items() if a != p))}
        if direct or any(m.peers for m in said.values()):
            return direct
        excused = _waiting(said) - frozenset(suspected)
        late = {p for p in living if enough(p, sum(p in m.late for a, m in said.items() if a != p))}
        return late - excused

    def anyones(self, plan: Plan, alive: Collection[PeerId]) -> set[PeerId]:
        """Those whom any other living participant accuses directly; of late finals, if there is nobody else."""
        said = self._heard(plan, alive)
        direct = {p for a, m in said.items() for p in m.peers if p != a}
        return direct or {p for a, m in said.items() for p in m.late if p != a}

    def pairs(self, plan: Plan, alive: Collection[PeerId]) -> set[Pair]:
        """Living pairs of which one accuses the other, directly or, if there is no direct word at all, of late finals.

        The accusers of those that `believed` names are not among them.
        """
        said = self._heard(plan, alive)
        if len([peer for peer in plan.remaining() if peer in alive]) < 3 or self.believed(plan, alive):
            return set()
        direct, waiting = any(m.peers for m in said.values()), _waiting(said)
        return {
            (min(accuser, peer), max(accuser, peer))
            for accuser, m in said.items()
            for peer in (m.peers if direct else frozenset(m.late) - waiting)
            if peer in alive and peer != accuser and peer in plan.remaining()
        }

    def _heard(self, plan: Plan, alive: Collection[PeerId]) -> dict[PeerId, Stalled]:
        remaining = plan.remaining()
        return {a: m for a, m in self._said.get(plan.hash, {}).items() if a in alive and a in remaining}


def _waiting(said: Mapping[PeerId, Stalled]) -> frozenset[PeerId]:
    """Those whose finals are late because they wait for contributions that do come."""
    return frozenset(peer for peer, message in said.items() if peer in message.late)


class Detours:
    """Which third was tried for which pair in this round."""

    def __init__(self) -> None:
        self._tried: dict[Pair, set[PeerId]] = {}

    def note(self, plan: Plan) -> None:
        """A plan with these relays was made or adopted."""
        peers = [p.peer for p in plan.participants]
        for relay in plan.relays:
            pair = _pair(peers[relay.one], peers[relay.other])
            self._tried.setdefault(pair, set()).add(peers[relay.via])

    def around(self, plan: Plan, pairs: Collection[Pair], alive: Collection[PeerId]) -> tuple[Relay, ...] | None:
        """The relays of `plan` with new ones for `pairs`; None if for one of them everybody was tried, or enough."""
        peers = [p.peer for p in plan.participants]
        relays = {_pair(peers[r.one], peers[r.other]): peers[r.via] for r in plan.relays}
        for pair in sorted(pairs):
            troubled = {peer for other in pairs for peer in other}
            tried = self._tried.get(pair, set())
            free = [p for p in plan.remaining() if p in alive and p not in pair and p not in tried]
            if not free or len(tried) >= THIRDS_LIMIT:
                return None
            free.sort(key=lambda p: (p in troubled, sum(p == via for via in relays.values()), p))
            relays[pair] = free[0]
        return pack_relays(peers, relays)


def pack_relays(peers: list[PeerId], relays: Mapping[Pair, PeerId]) -> tuple[Relay, ...]:
    """`relays` (pair to third) by places among `peers`, in order."""
    place = {peer: i for i, peer in enumerate(peers)}
    packed = []
    for (one, other), via in relays.items():
        first, second = sorted((place[one], place[other]))
        packed.append(Relay(first, second, place[via]))
    return tuple(sorted(packed, key=lambda relay: (relay.one, relay.other)))


def _pair(one: PeerId, other: PeerId) -> Pair:
    return (min(one, other), max(one, other))
