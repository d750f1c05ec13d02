"""Newcomers on their way to the state at the head: leads wait for them, for a bounded share of the swarm's time.

Rounds can be shorter than it takes to fetch a state, or the finals since the one that was fetched. Whoever only ran
after them would be behind for ever. So a newcomer that could be there within the grace deadline says that it comes: by
a Ready of a joiner that names no state. The rounds go on meanwhile, so every node takes note of it, whichever round the
Ready is of; and a lead that has all its trainers holds its plan back for who comes:

    the newcomer announces itself on the state of the round    ─► plan, with the newcomer
    the grace deadline of the round                            ─► plan, without it

For so long, times `REST` and the number of members, that lead waits for nobody again. All leads together thus spend at
most one part in `REST` of the time on newcomers, however many there are and whatever they say.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Message, Ready, Value
from shoal.protocol.planning import JOINER, absent_ready

REST = 20
NEWCOMERS_LIMIT = 64
"""Of more that come at once, those that said so last are waited for."""


def coming(previous: Value) -> Ready:
    """What a node says that is on its way to the state after `previous`."""
    return absent_ready(JOINER, previous, NO_HASH)


class Newcomers:
    """Who is coming, as far as one node heard, and what it may still spend on waiting for them as a lead."""

    def __init__(self) -> None:
        self._said_at: dict[PeerId, float] = {}
        self._waiting: tuple[bytes, float] | None = None  # the base of the round, and since when
        self._rest_until = float("-inf")

    def heard(self, peer: PeerId, message: Message, now: float) -> None:
        """Take note if `peer` says that it comes."""
        if not isinstance(message, Ready) or (message.role, message.state) != (JOINER, NO_HASH):
            return
        self._said_at.pop(peer, None)
        self._said_at[peer] = now
        while len(self._said_at) > NEWCOMERS_LIMIT:
            del self._said_at[next(iter(self._said_at))]

    def hold_back(self, previous: Value, possible: Collection[PeerId], now: float, *, patience_s: float) -> bool:
        """Whether the plan after `previous`, for which everything else is here, waits for somebody who comes.

        possible: the living that may take part and have not announced themselves on the state of this round. Whoever
        said that it comes is believed for `patience_s`.
        """
        awaited = any(now - at < patience_s for peer, at in self._said_at.items() if peer in possible)
        if not awaited or now < self._rest_until:
            return False
        if self._waiting is None or self._waiting[0] != previous.hash:
            self._waiting = (previous.hash, now)
        return True

    def planned(self, previous: Value, now: float) -> None:
        """The plan after `previous` is made: whoever has not come by then has to say so again."""
        if self._waiting is not None and self._waiting[0] == previous.hash:
            self._rest_until = now + REST * len(previous.members) * (now - self._waiting[1])
            self._said_at.clear()
        self._waiting = None
