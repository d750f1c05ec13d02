"""Trust in the peers that share rollouts: faults add demerits, good groups and time take them away.

A peer with as many demerits as `ignored_at` is ignored until they have fallen to half of that, so one that is let in
again and cheats again is out after half as many faults. A fault counts against who delivered the bytes, which for
announcements is their signer. A fresh identity starts without demerits; what that buys an attacker is bounded by the
byte budget of the intake and by the quotas of the exchange.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Reason

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


@dataclass(slots=True)
class _Standing:
    demerits: float
    round: int
    ignored: bool = False


class Trust:
    """Demerits of peers, as of this node's round. At most PEER_LIMIT peers; those with the fewest make room.

    May be used from several threads: the exchange reports faults while the judge works.
    """

    def __init__(self, settings: TrustSettings | None = None) -> None:
        self._settings = settings or TrustSettings()
        self._standings: dict[PeerId, _Standing] = {}
        self._round = 0
        self._lock = threading.Lock()

    def advance(self, round_number: int) -> None:
        """This node's round is now `round_number`; rounds never go back."""
        with self._lock:
            self._round = max(self._round, round_number)

    def fault(self, peer: PeerId, reason: Reason) -> None:
        """`peer` broke this rule."""
        weight = WEIGHTS.get(reason, 0.0)
        if not weight:
            return
        with self._lock:
            standing = self._present(peer) or self._admit(peer)
            # Capped, so that a flood does not put a peer out for longer than a few half-lives.
            standing.demerits = min(standing.demerits + weight, 4 * self._settings.ignored_at)
            standing.ignored = standing.ignored or standing.demerits >= self._settings.ignored_at

    def good(self, peer: PeerId) -> None:
        """A group of `peer` was what it said."""
        with self._lock:
            standing = self._present(peer)
            if standing is not None:
                standing.demerits = max(0.0, standing.demerits - self._settings.good)

    def demerits(self, peer: PeerId) -> float:
        """Of a peer, as of this round."""
        with self._lock:
            standing = self._present(peer)
            return 0.0 if standing is None else standing.demerits

    def ignored(self, peer: PeerId) -> bool:
        """Whether what the peer offers is to be ignored."""
        with self._lock:
            standing = self._present(peer)
            return standing is not None and standing.ignored

    def _present(self, peer: PeerId) -> _Standing | None:
        """The peer's standing, brought to this round."""
        standing = self._standings.get(peer)
        if standing is None:
            return None
        if standing.round < self._round:
            standing.demerits *= 0.5 ** ((self._round - standing.round) / self._settings.half_life)
            standing.round = self._round
        if standing.ignored and standing.demerits <= self._settings.ignored_at / 2:
            standing.ignored = False
        return standing

    def _admit(self, peer: PeerId) -> _Standing:
        if len(self._standings) >= PEER_LIMIT:
            del self._standings[min(self._standings, key=lambda one: self._standings[one].demerits)]
        return self._standings.setdefault(peer, _Standing(demerits=0.0, round=self._round))
