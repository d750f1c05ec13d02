"""What the lead does about lone accusations: another path for the two, and another, until it shows who is at fault.

    a lone accusation stands for RELAY_SETTLE_S        ─► the pair is led through a third
    it is repeated there, and the third has spoken,
    or has not for RELAY_SETTLE_S                      ─► through the next third
    no third is left, or enough were tried             ─► one of the two goes (`Accusations.loser`)

Where enough thirds agree before, `Accusations.believed` says so. Whom the lead listens to is limited too: who is the
accuser in THIRDS_LIMIT of such plans has its accusation settled as if no third were left. So a liar that accuses one
after the other comes to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from shoal.protocol.accusations import Dispute
from shoal.protocol.facts import RoundFacts
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Relay
from shoal.protocol.relay_choice import THIRDS_LIMIT, Pair, RelayChoice, pair_of, relays_of

RELAY_SETTLE_S = 3.0
"""How long a lone accusation stands before the lead believes that the fault lies between the two: long enough for the
failure detector to suspect who is silent altogether."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The `losers` go; if there are none, the reduction goes on with these `relays`."""

    losers: frozenset[PeerId]
    relays: tuple[Relay, ...]


class Disputes:
    """What one lead made of the lone accusations of a round."""

    def __init__(self, facts: RoundFacts) -> None:
        self.relay_choice = RelayChoice()
        self._facts = facts
        self._since: dict[Dispute, float] = {}
        self._heeded: dict[PeerId, int] = {}
        """By accuser, the plans that were made on its word."""

    def adopted(self, plan: Plan) -> None:
        """All that stood was about another plan."""
        self._since = {}
        self.relay_choice.note(plan)

    def rule(self, plan: Plan, now: float, *, overdue: bool) -> Ruling | None:
        """What is due now. overdue: the reduction has had its time, and nothing is waited for any more."""
        facts = self._facts
        disputes = facts.accusations.disputes(plan, facts.alive)
        self._since = {dispute: self._since.get(dispute, now) for dispute in disputes}
        due = {one for one in disputes if overdue or self._is_due(plan, one, now)}
        if not due:
            return None
        relayed = relays_of(plan).keys()
        pairs = {pair_of(*one) for one in disputes if one in due or pair_of(*one) not in relayed}
        relays, without = self.relay_choice.around(plan, pairs, facts.alive)
        losers = self._losers(plan, [one for one in due if self._is_spent(one, without)], disputes)
        if not losers and relays == plan.relays:
            return None
        if not losers:
            for accuser in {one[0] for one in disputes if pair_of(*one) in pairs - without}:
                self._heeded[accuser] = self._heeded.get(accuser, 0) + 1
        return Ruling(losers, relays)

    def _is_due(self, plan: Plan, dispute: Dispute, now: float) -> bool:
        facts = self._facts
        spoken = facts.accusations.spoken_of(plan, dispute, facts.alive)
        return spoken or now - self._since[dispute] >= RELAY_SETTLE_S

    def _is_spent(self, dispute: Dispute, without: Collection[Pair]) -> bool:
        """Whether nothing more is tried about it."""
        return pair_of(*dispute) in without or self._heeded.get(dispute[0], 0) >= THIRDS_LIMIT

    def _losers(self, plan: Plan, spent: Collection[Dispute], disputes: Collection[Dispute]) -> frozenset[PeerId]:
        """Who goes, so that nothing is left of those that are spent: who is in several of all, since a liar is in all
        of its own; else as relays say. Never this node, which gives up the lead instead."""
        facts, losers = self._facts, set[PeerId]()
        left = sorted(spent, key=lambda one: (self._since[one], one))
        while left:
            pairs = {pair_of(*one) for one in disputes if losers.isdisjoint(one)}
            counts = Counter(peer for pair in pairs for peer in pair)
            one, other = sorted(left[0], key=lambda peer: -counts[peer])
            loser = one if counts[one] > counts[other] else facts.accusations.loser(plan, left[0], facts.alive)
            if loser == facts.me and left[0][::-1] in left:
                loser = next(peer for peer in left[0] if peer != facts.me)
            losers.add(loser)
            left = [one for one in left if loser not in one]
        if facts.me in losers:
            facts.gave_up = facts.agreement.view
        return frozenset(losers) - {facts.me}
