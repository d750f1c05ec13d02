"""Trust in the peers that share rollouts: faults add demerits, good groups and time take them away.

A peer with `IGNORED_AT` demerits is ignored until they have fallen to half of that, so one that is let in
again and cheats again is out after half as many faults. A fault counts against who delivered the bytes, which for
announcements is their signer. A fresh identity starts without demerits; what that buys an attacker is bounded by the
byte budget of the intake and by the quotas of the exchange.

A node keeps one `Trust`, in its daemon: the exchange and the selection report faults to it and ask it, and what the
judge finds comes to it with the verdicts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Reason
from shoal.protocol.suspicion import Suspicion

PEER_LIMIT = 4096
IGNORED_AT = 4.0
"""Demerits."""
HALF_LIFE_ROUNDS = 64.0
"""Of demerits, in this node's rounds."""
GOOD = 0.1
"""Demerits that a good group takes away."""

WEIGHTS = {
    Reason.MALFORMED: 2.0,
    Reason.FORGED: 2.0,
    Reason.DUPLICATE: 0.5,
    Reason.COPIED: 1.0,
    Reason.FOREIGN_TASK: 2.0,
    Reason.UNKNOWN_TASK: 0.5,
    Reason.MISLABELLED: 2.0,
    Reason.TOO_LARGE: 2.0,
    Reason.HINT: 1.0,
    Reason.UNSCORED: 0.25,  # texts that take long to score, on purpose or because this machine was busy
    Reason.UNAVAILABLE: 0.05,  # who was killed and is back no longer has all that it offered
    Reason.STALE: 0.05,
    Reason.OTHER_POLICY: IGNORED_AT,
}
"""Demerits of each fault; what is not here is nobody's fault."""


HONEST_MISSES: Final = 0.001
"""Share of tokens that who draws from the policy that it names seems not to have drawn from it, at the most."""
OTHER_MISSES: Final = 0.02
"""The same of who draws from another, at the least that is looked for."""
DOUBT_LIMIT: Final = math.log(1e9)
"""Doubt in a peer that is as good as proof: to be honest it would have to have had such luck as one in so many has."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a group that were gone through again, and those of them that its policy does not draw."""

    tokens: int
    missed: int

    @property
    def doubt(self) -> float:
        """The logarithm of how much more probable this is of who draws from another policy than it names."""
        kept = self.tokens - self.missed
        return self.missed * math.log(OTHER_MISSES / HONEST_MISSES) + kept * math.log(
            (1 - OTHER_MISSES) / (1 - HONEST_MISSES)
        )

    @property
    def is_proof(self) -> bool:
        """True if this alone is enough."""
        return self.doubt >= DOUBT_LIMIT


class Trust:
    """Demerits of peers, as of this node's round. At most PEER_LIMIT peers; those with the fewest make room.

    Doubt is what replays add up to: a cumulative sum that never falls below 0, so that who was honest for long has
    nothing saved up (CUSUM: E. S. Page, Biometrika 41, 1954).

    on_ignored: is told of each peer that is ignored from now on, and by which fault.
    """

    def __init__(self, on_ignored: Callable[[PeerId, Reason], None] = lambda *_: None) -> None:
        self._on_ignored = on_ignored
        self._demerits = Suspicion(half_life=HALF_LIFE_ROUNDS, limit=PEER_LIMIT)
        self._ignored: set[PeerId] = set()
        self._doubts: OrderedDict[PeerId, float] = OrderedDict()
        self._round = 0

    def advance(self, round_number: int) -> None:
        """Note that this node's round is now `round_number`; rounds never go back."""
        self._round = max(self._round, round_number)

    def fault(self, peer: PeerId, reason: Reason) -> None:
        """Note that `peer` broke this rule."""
        weight = WEIGHTS.get(reason, 0.0)
        if not weight:
            return
        is_ignored = self.ignored(peer)
        # Capped, so that a flood does not put a peer out for longer than a few half-lives.
        self._demerits.add(peer, weight, self._round, most=4 * IGNORED_AT)
        if is_ignored or self.demerits(peer) >= IGNORED_AT:
            self._ignored.add(peer)
            if not is_ignored:
                self._on_ignored(peer, reason)
            if len(self._ignored) > PEER_LIMIT:
                self.all_ignored()  # lets go of those that made room

    def good(self, peer: PeerId) -> None:
        """Note that a group of `peer` was what it was announced as."""
        if self.demerits(peer):
            self._demerits.add(peer, -GOOD, self._round)

    def replayed(self, peer: PeerId, found: Replayed) -> None:
        """Note what was found of a group that a peer says it drew from a policy."""
        doubt = max(0.0, self._doubts.pop(peer, 0.0) + found.doubt)
        if doubt >= DOUBT_LIMIT:
            self.fault(peer, Reason.OTHER_POLICY)
            doubt = DOUBT_LIMIT / 2
        if doubt:
            self._doubts[peer] = doubt
            while len(self._doubts) > PEER_LIMIT:
                self._doubts.popitem(last=False)

    def demerits(self, peer: PeerId) -> float:
        """Return those of a peer, as of this round."""
        return self._demerits.of(peer, self._round)

    def ignored(self, peer: PeerId) -> bool:
        """Return whether what the peer offers is to be ignored."""
        if peer in self._ignored and self.demerits(peer) <= IGNORED_AT / 2:
            self._ignored.remove(peer)
        return peer in self._ignored

    def all_ignored(self) -> list[PeerId]:
        """Return every peer that is to be ignored, in the order of their names."""
        return sorted(peer for peer in tuple(self._ignored) if self.ignored(peer))
