"""Probation: a peer that lost a dispute is left out of the next reductions, for longer if it loses another soon.

A member that keeps a reduction from ending costs everybody the time it takes to find out who it was, and could do so in
every round. So every node takes note of whom it saw lose such a dispute (`Accusations.losers`), and where it leads
plans without them for some turns, if the rest are enough:

    lost a dispute                                       ─► left out for FIRST_REST_TURNS
    again, within twice the time it was left out for     ─► for twice as many, up to REST_LIMIT_TURNS
    not again within that time                           ─► all is as if it had never been

A turn is one round. But where the lead was a party itself it alone knows that it judged rightly, and it may be long
until it leads again: for who led the round, a turn is as many rounds as there are voters.

Nothing of it is agreed on: a lead that saw nothing of it plans with them, and sees it then. Who is left out votes where
it has a vote, follows the rounds, and keeps what it learnt meanwhile for the first round that counts it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term, Value

FIRST_REST_TURNS = 2
REST_LIMIT_TURNS = 64  # rounds for which who lost disputes is not planned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """Exclusion of a peer. since: the round of the last dispute that it lost. turn_rounds: the rounds of a turn."""

    since: int
    turns: int
    turn_rounds: int

    def covers(self, round: int) -> bool:
        """True if the peer is left out of this round."""
        return round <= self.since + self.turns * self.turn_rounds

    def remembers(self, round: int) -> bool:
        """True if a dispute in this round comes soon after the last."""
        return round <= self.since + 2 * self.turns * self.turn_rounds


class Probation:
    """The peers that one node leaves out where it leads; one object for all its rounds."""

    def __init__(self) -> None:
        self._rests: dict[PeerId, _Rest] = {}
        self._term: Term | None = None

    def lost(self, peers: Collection[PeerId], previous: Value, *, turn_rounds: int) -> None:
        """Note who lost a dispute in the round after `previous`. turn_rounds: until this node judges again, if it did.

        By another's judgement a turn is one round.
        """
        self._keep_to(previous.next_term)
        round = previous.next_round
        self._rests = {peer: rest for peer, rest in self._rests.items() if rest.remembers(round)}
        for peer in peers:
            last = self._rests.get(peer)
            if last is None:
                self._rests[peer] = _Rest(since=round, turns=FIRST_REST_TURNS, turn_rounds=turn_rounds)
            elif last.since < round:
                turns, turn_rounds = min(2 * last.turns, REST_LIMIT_TURNS), max(turn_rounds, last.turn_rounds)
                self._rests[peer] = _Rest(since=round, turns=turns, turn_rounds=turn_rounds)

    def left_out(self, previous: Value) -> frozenset[PeerId]:
        """Return the peers that this node does not plan in the round after `previous`."""
        self._keep_to(previous.next_term)
        return frozenset(peer for peer, rest in self._rests.items() if rest.covers(previous.next_round))

    def _keep_to(self, term: Term) -> None:
        """Forget all in another term: its rounds have other numbers."""
        if self._term != term:
            self._term, self._rests = term, {}
