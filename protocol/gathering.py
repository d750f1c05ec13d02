"""Who will take part in a round: what everyone announced, who is still awaited, since when half of them are ready."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Participant, Plan, Ready
from shoal.protocol.planning import CONTRIBUTOR, OBSERVER, ROLES, TRAINING

READIES_LIMIT = 4 * MEMBER_LIMIT
"""Outsiders beyond this many are not listened to; members always are."""


class Gathering:
    """The announcements of one round.

    members: the electorate. returners: they, and those who were members lately, whose weight counts as theirs does.
    state: the digest of S(e-1) held here; who holds another must heal before it takes part. banned: not listened to.
    shunned: proven here to have lied, and planned only where there is no quorum without.
    """

    def __init__(
        self,
        *,
        members: Iterable[PeerId],
        returners: Iterable[PeerId],
        state: bytes,
        banned: Iterable[PeerId] = (),
    ) -> None:
        self._members = frozenset(members)
        self._banned = frozenset(banned)
        self.returners = (self._members | frozenset(returners)) - self._banned
        self.shunned: set[PeerId] = set()
        self._state = state
        self._readies: dict[PeerId, Ready] = {}
        self.half_ready_at: float | None = None

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._readies

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._readies)

    def get(self, peer: PeerId) -> Ready | None:
        """What `peer` announced."""
        return self._readies.get(peer)

    def squares(self, plan: Plan) -> dict[PeerId, tuple[float, ...]]:
        """What those told of their contributions whom `plan` counts, without who is proven to lie."""
        readies = ((p, self._readies.get(p.peer)) for p in plan.participants if p.weight and p.peer not in self.shunned)
        return {
            p.peer: r.squares
            for p, r in readies
            if r is not None and r.role == CONTRIBUTOR and (r.root, r.life) == (p.root, p.life)
        }

    def receive(self, sender: PeerId, ready: Ready) -> None:
        """Take a peer's announcement. Raises RemoteError if it breaks the protocol."""
        if ready.role not in ROLES:
            raise RemoteError(f"unknown role {ready.role!r}", peer=sender)
        known = self._readies.get(sender)
        if known is not None and known.role == CONTRIBUTOR and ready.role == CONTRIBUTOR and known.root != ready.root:
            raise RemoteError("two contributions in one round", peer=sender)
        self.take(sender, ready)

    def take(self, sender: PeerId, ready: Ready) -> None:
        """A contribution stands, except that a node that restarted may have lost it: then it becomes an observer."""
        known = self._readies.get(sender)
        if sender in self._banned:
            return
        if known is None and len(self._readies) >= READIES_LIMIT and sender not in self._members:
            return
        if known is None or known.role != CONTRIBUTOR or ready.role == OBSERVER or ready.life != known.life:
            self._readies[sender] = ready

    def forget(self, peer: PeerId) -> None:
        """It died. It may return without its contribution; if it has it still, it says so again."""
        self._readies.pop(peer, None)

    def withdrew(self, peer: PeerId) -> bool:
        """Whether it announced that it has no contribution (any more)."""
        ready = self._readies.get(peer)
        return ready is not None and ready.role == OBSERVER

    def restarted(self, participant: Participant) -> bool:
        """Whether it announced itself in another life than the one that is planned."""
        ready = self._readies.get(participant.peer)
        return ready is not None and ready.life != participant.life

    def candidates(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> dict[PeerId, Ready]:
        """Everyone who may be in a plan: alive, announced, on the same state, not on the way out."""
        return {
            peer: ready
            for peer, ready in self._readies.items()
            if peer in alive and peer not in leaves and ready.state == self._state
        }

    def awaited(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> set[PeerId]:
        """Living trainers that have not announced a contribution yet."""
        settled = {p for p, r in self._readies.items() if r.role != TRAINING}
        members = {p for p in self._members if p in alive} - set(leaves)
        training = {p for p, r in self._readies.items() if r.role == TRAINING and p in alive}
        return (members | (training & self.returners)) - settled - self.shunned

    def astray(self, alive: Collection[PeerId]) -> set[PeerId]:
        """Living members that announced themselves on another state than the one held here."""
        return {p for p, r in self._readies.items() if p in self._members and p in alive and r.state != self._state}

    def nobody_trains(self, alive: Collection[PeerId]) -> bool:
        """Whether no living member, or late one, is making a contribution or has made one."""
        busy = (p for p, r in self._readies.items() if r.role in (CONTRIBUTOR, TRAINING) and p in alive)
        return not any(p in self.returners for p in busy)

    def note_half_ready(self, alive: Collection[PeerId], leaves: Collection[PeerId], now: float) -> None:
        """Remember when at least half of those who train were done."""
        if self.half_ready_at is None:
            done = {p for p, r in self._readies.items() if r.role == CONTRIBUTOR and p in self.returners}
            trainers = self.awaited(alive, leaves) | done
            if done and 2 * len(done) >= len(trainers):
                self.half_ready_at = now
