"""Newcomers on their way to the state at the head: leads wait for them, for a bounded share of the swarm's time.

Rounds can be shorter than it takes to fetch a state, or the finals since the one that was fetched. Whoever only ran
after them would be behind for ever. So a newcomer that could be there within the grace deadline says that it comes: by
a Ready of a joiner that names no state. The rounds go on meanwhile, so every node takes note of it, whichever round the
Ready is of; and a lead that has all its trainers holds its plan back for who comes:

    the newcomer announces itself on the state of the round    ─► plan, with the newcomer
    the grace deadline of the round                            ─► plan, without it

Every lead pays for its waits out of a token bucket: a second of waiting costs as many seconds as there are members, one
comes in every `REST` seconds, up to `SAVED_LIMIT_S`, and a wait begins where nothing is owed. So a short wait leaves
room for another, and one up to the grace is rested for afterwards. In a span of time all leads of n members together
wait for at most

    span / REST + SAVED_LIMIT_S + n × grace                  (of one that decides alone, ALONE_S in place of grace)

however many newcomers there are and whatever they say: in the long run one part in `REST` of the time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.protocol.identity import PeerId
from shoal.protocol.limits import TokenBucket
from shoal.protocol.messages import NO_HASH, Message, Ready, Value
from shoal.protocol.planning import JOINER, absent_ready

REST = 20
SAVED_LIMIT_S = 10.0
"""Seconds that all leads together may spend on newcomers at once, before they rest for it."""
ALONE_S = 300.0
"""For so long one that decides rounds alone waits at most, if the grace is shorter: a round of its own takes no longer
than its training, and whoever has a narrow line to it never has a state that is still the newest."""
LAPSE_LIMIT_S = 1.0
"""After this a lead that does not ask whether to wait, having lost its quorum or its turn, is not waiting."""
NEWCOMERS_LIMIT = 64
"""Of more that come at once, those that said so last are waited for."""


def coming(previous: Value) -> Ready:
    """Return the Ready of a node on its way to the state after `previous`."""
    return absent_ready(JOINER, previous, NO_HASH)


@dataclass(slots=True, kw_only=True)
class _Wait:
    """The plan after `base` is held back: since when, and when that was asked for last."""

    base: bytes
    since: float
    asked: float
    leads: int

    def cost_s(self, now: float) -> float:
        """Cost of this wait now that it is over, in seconds of all leads."""
        return (self.asked - self.since + min(now - self.asked, LAPSE_LIMIT_S)) * self.leads


def patience_s(voters: int, grace_s: float) -> float:
    """Time for which a plan is held back for newcomers at most, from when half of those who train are ready."""
    return max(grace_s, ALONE_S) if voters == 1 else grace_s


class Newcomers:
    """Newcomers that one node heard from, and the time it may still spend, as a lead, on waiting for them."""

    def __init__(self) -> None:
        self._said_at: dict[PeerId, float] = {}
        self._wait: _Wait | None = None
        self._saved = TokenBucket(1 / REST, SAVED_LIMIT_S)

    def heard(self, peer: PeerId, message: Message, now: float) -> None:
        """Take note if `peer` says that it comes."""
        if not isinstance(message, Ready) or (message.role, message.state) != (JOINER, NO_HASH):
            return
        self._said_at.pop(peer, None)
        self._said_at[peer] = now
        while len(self._said_at) > NEWCOMERS_LIMIT:
            del self._said_at[next(iter(self._said_at))]

    def hold_back(
        self, previous: Value, possible: Collection[PeerId], now: float, *, leads: int, timeout_s: float
    ) -> bool:
        """True if the plan after `previous`, complete but for newcomers, waits for one of them.

        possible: the living that may take part and have not announced themselves on the state of this round. Whoever
        said that it comes is believed for `timeout_s`; nobody holds the plan back longer. leads: how many take turns.
        """
        if not any(now - at < timeout_s for peer, at in self._said_at.items() if peer in possible):
            return False
        if self._wait is None or self._wait.base != previous.hash or now - self._wait.asked > LAPSE_LIMIT_S:
            self._pay(now)
            if not self._saved.has(0.0, now):
                return False
            self._wait = _Wait(base=previous.hash, since=now, asked=now, leads=leads)
        self._wait.asked = now
        return now - self._wait.since < timeout_s

    def planned(self, previous: Value, now: float) -> None:
        """Note that the plan after `previous` is made: newcomers that missed it have to announce themselves again."""
        if self._wait is not None and self._wait.base == previous.hash:
            self._said_at.clear()
        self._pay(now)

    def _pay(self, now: float) -> None:
        if self._wait is not None:
            self._saved.owe(self._wait.cost_s(now), now)
        self._wait = None
