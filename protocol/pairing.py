"""Pairing under the strategy `gossip`: a proposal that everyone computes alone, and its negotiation.

**Proposal.** Sort the live members by H("gossip-pair", swarm, round, draw, peer) and take them two by two; of an odd
number the last has nobody. Where two see the same members they propose the same pair, and over rounds each pair is as
likely as any other. Draw 0 gives the first candidate, later draws the ones after.

**Negotiation.** Views differ, so a proposal binds nobody: two are partners where each has an offer of the other's.

    state      input                           then
    TRAINING   an offer                        held, whatever its round
    TRAINING   own vector made                 PAIRED with whose offer is held, the proposed one before others;
                                               nobody's: SEEKING the first candidate, who is made an offer
    SEEKING    the candidate's offer           PAIRED
               another's offer                 declined at once, so that a circle of three does not wait for itself
               declined, dead, or late         the next candidate; after CANDIDATE_LIMIT the step is made alone
    PAIRED     the vector cannot be had        the next candidate, or alone
    OVER       (the step is being made)        offers of later rounds are held for the next, others declined

A candidate has `timeout_s` to answer, so a round is delayed by CANDIDATE_LIMIT times that at most, whoever is slow.

**Rounds** are logical clocks: nobody waits for all others to be in a round. After round r comes r + 1, or the round
that others lead to if that is more; and a vector is of the round that others lead to when it is made. So who is slow,
or was away, skips numbers, and then proposes the same pairs as they do. Two peers lead to where both say they are; one
alone leads a round a step, however far it says it is. And whoever's clock is elsewhere is a partner all the same, so
that no word keeps two apart.

Sans-IO: `(input, now)` in, effects out. Which values travel is in `shoal.collectives.gossip`.
Source: NoLoCo, arXiv 2506.10911 (random pairs, no collective).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.protocol.errors import LocalError
from shoal.protocol.gossip_messages import Decline, GossipMessage, Offer, Taken, Withdraw
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash

CANDIDATE_LIMIT: Final = 2
DRAW_LIMIT: Final = 8
"""Draws in which candidates are looked for: a small swarm proposes the same pair again and again."""
LED_ALONE_ROUNDS: Final = 1
"""One peer that says it is further leads so far."""
HELD_LIMIT: Final = 64
ROUND_LIMIT: Final = 1 << 62
"""Nobody is led beyond it by what a peer says of its round."""


class Phase(StrEnum):
    """Phase of a node's round."""

    PAUSED = "paused"
    TRAINING = "training"
    SEEKING = "seeking"
    PAIRED = "exchanging"
    OVER = "stepping"


@dataclass(frozen=True, slots=True)
class Say:
    """Send this to `peer`."""

    peer: PeerId
    message: GossipMessage


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the vector that `peer` offers, and say `fetched` or `failed`."""

    peer: PeerId
    offer: Offer


@dataclass(frozen=True, slots=True)
class Alone:
    """Make the step without a partner; `reasons` say why, by candidate."""

    reasons: tuple[str, ...]


Effect = Say | Fetch | Alone


def pairs(swarm: bytes, round: int, members: Collection[PeerId], *, draw: int = 0) -> list[tuple[PeerId, PeerId]]:
    """The proposal of a draw: disjoint pairs of `members`, all of them but at most one."""
    place = round.to_bytes(8, "little") + draw.to_bytes(8, "little")
    order = sorted(set(members), key=lambda peer: domain_hash("gossip-pair", swarm, place, peer.encode()))
    return list(zip(order[::2], order[1::2], strict=False))


def candidates(swarm: bytes, round: int, me: PeerId, others: Collection[PeerId]) -> list[PeerId]:
    """List the peers to ask, in this order: at most CANDIDATE_LIMIT different ones."""
    found: list[PeerId] = []
    for draw in range(DRAW_LIMIT):
        for pair in pairs(swarm, round, {*others, me}, draw=draw):
            if me in pair:
                other = pair[1] if pair[0] == me else pair[0]
                if other not in found and len(found) < CANDIDATE_LIMIT:
                    found.append(other)
    return found


class PairingMachine:
    """One node's exchanges, round after round, of which `round` is done.

    shape: of its vectors, as in `Offer`. timeout_s: how long a candidate may take to answer.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        swarm: bytes,
        shape: tuple[str, int, int],
        timeout_s: float,
        round: int = 0,
    ) -> None:
        self._me = me
        self._swarm = swarm
        self._shape = shape
        self.timeout_s = timeout_s
        self.round = round
        self.phase = Phase.OVER
        self.partner: PeerId | None = None
        """Peer that this node is seeking or exchanging with."""
        self._offer: Offer | None = None
        self._deadline = 0.0
        self._candidates: list[PeerId] = []
        self._reasons: list[str] = []
        self._tried: set[PeerId] = set()
        self._held: dict[PeerId, Offer] = {}
        self._named: dict[PeerId, int] = {}
        self._owed: dict[PeerId, int] = {}

    @property
    def next_round(self) -> int:
        """The round that comes after this one."""
        return max(self.round + 1, self._led_to())

    @property
    def owed(self) -> bool:
        """True if somebody may still be fetching this node's vector."""
        return bool(self._owed)

    # -- this node's own course ------------------------------------------------------------------------------

    def begin(self, round: int) -> None:
        """Begin another round: this node trains."""
        if round <= self.round:
            raise LocalError(f"round {round} begins after round {self.round}")
        self.round, self.phase, self.partner, self._offer = round, Phase.TRAINING, None, None
        self._owed.clear()

    def pause(self) -> list[Effect]:
        """Make no vector for now, and tell so every peer that waits for one, or asks."""
        if self.phase is not Phase.TRAINING:
            return []
        self.phase = Phase.PAUSED
        return [self._decline(peer) for peer in list(self._held)]

    def resume(self) -> None:
        """The round of before the pause goes on."""
        if self.phase is Phase.PAUSED:
            self.phase = Phase.TRAINING

    def catch_up(self) -> int:
        """Take the round that others lead to as this node's, just before the vector of it is made."""
        self.round = max(self.round, self._led_to())
        return self.round

    def made(self, offer: Offer, others: Collection[PeerId], now: float) -> list[Effect]:
        """Hold this round's vector, which is made, ready for others, and look for a partner among them."""
        if self.phase not in (Phase.TRAINING, Phase.PAUSED) or offer.round != self.round:
            raise LocalError(f"a vector of round {offer.round} in round {self.round}, {self.phase}")
        self._offer, self._reasons, self._tried = offer, [], set()
        self._candidates = candidates(self._swarm, self.round, self._me, others)
        waiting = [peer for peer in self._held if peer in others]
        if not waiting:
            return self._next(now)
        first = self._candidates[0] if self._candidates and self._candidates[0] in waiting else waiting[0]
        effects: list[Effect] = [Say(first, offer), *self._pair(first, self._held.pop(first))]
        late = [peer for peer in list(self._held) if self._held[peer].round <= self.round]
        return effects + [self._decline(peer) for peer in late]

    def fetched(self, peer: PeerId) -> list[Effect]:
        """The partner's vector is here, and is what it offered: the step follows."""
        if self.phase is not Phase.PAIRED or peer != self.partner:
            return []
        self.phase = Phase.OVER
        return []

    def failed(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """Note that the partner's vector cannot be had."""
        return self._give_up(reason, now) if self.phase is Phase.PAIRED and peer == self.partner else []

    def leave(self) -> list[Effect]:
        """Take part in nothing more."""
        effects: list[Effect] = [self._decline(peer) for peer in list(self._held)]
        if self.phase is Phase.SEEKING and self.partner is not None:
            effects.append(Say(self.partner, Withdraw(round=self.round)))
        self.phase = Phase.PAUSED
        return effects

    # -- others ----------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: GossipMessage, now: float) -> list[Effect]:
        """Handle a message from a peer."""
        if isinstance(message, Offer):
            return self._receive_offer(peer, message)
        if isinstance(message, Decline):
            self._hear(peer, message.mine)
            waits = self.phase in (Phase.SEEKING, Phase.PAIRED)
            if waits and peer == self.partner and message.round == self.round:
                return self._give_up("declined", now)
        elif isinstance(message, Withdraw):
            held = self._held.get(peer)
            if held is not None and held.round == message.round:
                del self._held[peer]
            elif self.phase is Phase.PAIRED and peer == self.partner:
                return self._give_up("withdrew", now)
        elif isinstance(message, Taken) and self._owed.get(peer) == message.round:
            del self._owed[peer]
        return []

    def tick(self, alive: Collection[PeerId], now: float) -> list[Effect]:
        """Act on the time that passed, or on a change of the peers that are alive."""
        known: tuple[dict[PeerId, Offer] | dict[PeerId, int], ...] = (self._held, self._owed, self._named)
        for by_peer in known:
            for peer in [peer for peer in by_peer if peer not in alive]:
                del by_peer[peer]
        if self.phase not in (Phase.SEEKING, Phase.PAIRED) or self.partner is None:
            return []
        if self.partner not in alive:
            return self._give_up("is gone", now)
        if self.phase is Phase.SEEKING and now >= self._deadline:
            late = Say(self.partner, Withdraw(round=self.round))
            return [late, *self._give_up(f"did not answer in {self.timeout_s:.1f} s", now)]
        return []

    def _receive_offer(self, peer: PeerId, offer: Offer) -> list[Effect]:
        self._hear(peer, offer.round)
        if offer.shape != self._shape:
            return self._refuse(peer, offer)
        if self.phase is Phase.SEEKING and peer == self.partner:
            return self._pair(peer, offer)
        ahead = self.phase is not Phase.PAUSED and offer.round > self.round
        if (self.phase is Phase.TRAINING or ahead) and (peer in self._held or len(self._held) < HELD_LIMIT):
            self._held[peer] = offer
            return []
        return self._refuse(peer, offer)

    def _pair(self, peer: PeerId, offer: Offer) -> list[Effect]:
        self.phase, self.partner = Phase.PAIRED, peer
        self._tried.add(peer)
        self._owed[peer] = self.round
        return [Fetch(peer, offer)]

    def _give_up(self, reason: str, now: float) -> list[Effect]:
        self._reasons.append(f"{self.partner} {reason}")
        return self._next(now)

    def _next(self, now: float) -> list[Effect]:
        left = [peer for peer in self._candidates if peer not in self._tried]
        if not left or self._offer is None or len(self._tried) >= CANDIDATE_LIMIT:
            self.phase, self.partner = Phase.OVER, None
            return [Alone(tuple(self._reasons) or ("nobody else is there",))]
        self.phase, self.partner, self._deadline = Phase.SEEKING, left[0], now + self.timeout_s
        self._tried.add(left[0])
        held = self._held.pop(left[0], None)
        return [Say(left[0], self._offer), *([] if held is None else self._pair(left[0], held))]

    def _hear(self, peer: PeerId, round: int) -> None:
        if round < ROUND_LIMIT:
            self._named[peer] = round

    def _led_to(self) -> int:
        """The round that at least two peers say they have come to; or a little further than this, if one alone does."""
        second, first = sorted((0, 0, *self._named.values()))[-2:]
        return max(second, min(first, self.round + LED_ALONE_ROUNDS))

    def _decline(self, peer: PeerId) -> Say:
        offer = self._held.pop(peer)
        return Say(peer, Decline(round=offer.round, mine=self.round))

    def _refuse(self, peer: PeerId, offer: Offer) -> list[Effect]:
        self._held.pop(peer, None)
        return [Say(peer, Decline(round=offer.round, mine=self.round))]
