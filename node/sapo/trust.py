"""Trust in the peers that share rollouts: faults add demerits, good groups and time take them away.

A peer with as many demerits as `ignored_at` is ignored until they have fallen to half of that, so one that is let in
again and cheats again is out after half as many faults. A fault counts against who delivered the bytes, which for
announcements is their signer. A fresh identity starts without demerits; what that buys an attacker is bounded by the
byte budget of the intake and by the quotas of the exchange.

A node keeps one `Trust`, in its daemon: the exchange and the selection report faults to it and ask it, and what the
judge finds comes to it with the verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Reason
from shoal.protocol.suspicion import Suspicion

PEER_LIMIT = 4096

WEIGHTS = {
    Reason.MALFORMED: 2.0,
    Reason.FORGED: 2.0,
    Reason.REPLAYED: 0.5,
    Reason.DUPLICATE: 0.5,
    Reason.COPIED: 1.0,
    Reason.FOREIGN_TASK: 2.0,
    Reason.UNKNOWN_TASK: 0.5,
    Reason.MISLABELLED: 2.0,
    Reason.TOO_LARGE: 2.0,
    Reason.HINT: 1.0,
    Reason.UNSCORED: 0.25,  # texts that take long to score, on purpose or because this machine was busy
    Reason.QUOTA: 0.02,
    Reason.UNAVAILABLE: 0.05,  # who was killed and is back no longer has all that it offered
    Reason.STALE: 0.05,
}
"""Demerits of each fault; what is not here is nobody's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustSettings:
    """`ignored_at`: demerits. `half_life`: of demerits, in this node's rounds. `good`: what a good group takes away."""

    ignored_at: float = 4.0
    half_life: float = 64.0
    good: float = 0.1

    def __post_init__(self) -> None:
        """Raises LocalError."""
        if not (self.ignored_at > 0 and self.half_life > 0 and self.good >= 0):
            raise LocalError(f"trust needs positive bounds, not {self}")


class Trust:
    """Demerits of peers, as of this node's round. At most PEER_LIMIT peers; those with the fewest make room."""

    def __init__(self, settings: TrustSettings | None = None) -> None:
        self._settings = settings or TrustSettings()
        self._demerits = Suspicion(half_life=self._settings.half_life, limit=PEER_LIMIT)
        self._ignored: set[PeerId] = set()
        self._round = 0

    def advance(self, round_number: int) -> None:
        """Note that this node's round is now `round_number`; rounds never go back."""
        self._round = max(self._round, round_number)

    def fault(self, peer: PeerId, reason: Reason) -> None:
        """Note that `peer` broke this rule."""
        weight, ignored_at = WEIGHTS.get(reason, 0.0), self._settings.ignored_at
        if not weight:
            return
        is_ignored = self.ignored(peer)
        # Capped, so that a flood does not put a peer out for longer than a few half-lives.
        self._demerits.add(peer, weight, self._round, most=4 * ignored_at)
        if is_ignored or self.demerits(peer) >= ignored_at:
            self._ignored.add(peer)
            if len(self._ignored) > PEER_LIMIT:
                self.all_ignored()  # lets go of those that made room

    def good(self, peer: PeerId) -> None:
        """Note that a group of `peer` was what it was announced as."""
        if self.demerits(peer):
            self._demerits.add(peer, -self._settings.good, self._round)

    def demerits(self, peer: PeerId) -> float:
        """Return those of a peer, as of this round."""
        return self._demerits.of(peer, self._round)

    def ignored(self, peer: PeerId) -> bool:
        """Return whether what the peer offers is to be ignored."""
        if peer in self._ignored and self.demerits(peer) <= self._settings.ignored_at / 2:
            self._ignored.remove(peer)
        return peer in self._ignored

    def all_ignored(self) -> list[PeerId]:
        """Return every peer that is to be ignored, in the order of their names."""
        return sorted(peer for peer in tuple(self._ignored) if self.ignored(peer))
