"""The plan of a row as one of its members follows it: the head's word, with what was lost since.

The plan of a round and turn is one; attempts go on without more and more of those in it. A later attempt has all that
the earlier have, so who missed one needs no other than the newest, and either may come before the other.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from shoal.lab.rows.row_list import RowList
from shoal.lab.rows.row_messages import RowLoss, RowPlan, RowReady, RowTerm
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId


class FollowedPlan:
    """Plan of one round under one `head`, as a member follows it."""

    def __init__(self, head: PeerId) -> None:
        self._head = head
        self.plan: RowPlan | None = None
        self.attempt = 0
        self.lost: tuple[int, ...] = ()
        """Places on the list that the last attempt goes on without."""

    def take(self, plan: RowPlan, listed: RowList, mine: int, made: RowReady | None) -> bool:
        """The head's plan. Returns whether it is new. Raises RemoteError for one that cannot be."""
        if self.plan is not None:
            if plan != self.plan:
                raise RemoteError("two plans of one round of a row", peer=self._head)
            return False
        if plan.list != listed.roster.hash or plan.terms[-1].place >= len(listed):
            raise RemoteError("a plan for another list than the round's", peer=self._head)
        term = _term_at(plan, mine)
        if term is not None and term.tokens and made is not None and term.tokens != made.tokens:
            raise RemoteError("a plan that weighs a member otherwise than it told", peer=self._head)
        self.plan = plan
        return True

    def lose(self, loss: RowLoss, size: int) -> bool:
        """The head goes on without some; `size` is of the list. Returns whether that is new.

        Raises RemoteError for a loss that brings somebody back, or is not what this attempt was before.
        """
        if loss.attempt < self.attempt or (loss.attempt == self.attempt and loss.gone == self.lost):
            return False
        if loss.attempt == self.attempt or not set(self.lost) < set(loss.gone) or loss.gone[-1] >= size:
            raise RemoteError("a plan again that brings back who was lost, or says two things", peer=self._head)
        self.attempt, self.lost = loss.attempt, loss.gone
        return True

    def term(self, place: int) -> RowTerm | None:
        """The part of who stands at `place`, if it is in the plan and not lost."""
        if self.plan is None or place in self.lost:
            return None
        return _term_at(self.plan, place)


def _term_at(plan: RowPlan, place: int) -> RowTerm | None:
    """Term of the member at `place`; they are in the order of the list."""
    at = bisect_left(plan.terms, place, key=attrgetter("place"))
    return plan.terms[at] if at < len(plan.terms) and plan.terms[at].place == place else None
