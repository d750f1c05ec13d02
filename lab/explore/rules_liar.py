"""Liars of the model: what they have been needed for, and whether it convicts them.

Liars keep no promise, so they need no state: each of their messages is there as soon as somebody wants it. A careful
liar, who says nothing that convicts it, is another matter: what honest members took from it is recorded, and whatever
would convict it together with that is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.lab.explore.rules_voter import NONE

UNSHOWN = -2
"""The liar has shown no ViewChange to a view."""


class Used(NamedTuple):
    """Messages that were taken from a careful liar.

    Whether it left, the value of its Prepare, Propose and Vote in each view, and for each view the lowest view of a
    prepare certificate with which it said it moved there.
    """

    left: bool
    prepared: tuple[int, ...]
    proposed: tuple[int, ...]
    voted: tuple[int, ...]
    moved: tuple[int, ...]


class Liar:
    """Answers whether a liar can say something more, which is what it has said then, or None if that convicts it.

    Evidence is two Prepares, Proposes or Votes in one view, a ViewChange below its sender's own vote, and a Leave
    beside any other signature of the round.
    """

    def __init__(self, views: int, *, careful: bool) -> None:
        self.careful = careful
        nothing = (NONE,) * views
        self.start = Used(False, nothing, nothing, nothing, (UNSHOWN,) * views)

    def leave(self, used: Used) -> Used | None:
        """Have the liar leave; None if that, with what was used before, would convict it."""
        return self._judged(used._replace(left=True)) if self.careful else used

    def prepare(self, used: Used, view: int, value: int) -> Used | None:
        """Have the liar prepare a value; None if that would convict it."""
        if not self.careful:
            return used
        row = _signed(used.prepared, view, value)
        return None if row is None else self._judged(used._replace(prepared=row))

    def propose(self, used: Used, view: int, value: int) -> Used | None:
        """Have the liar propose a value; None if that would convict it."""
        if not self.careful:
            return used
        row = _signed(used.proposed, view, value)
        return None if row is None else self._judged(used._replace(proposed=row))

    def vote(self, used: Used, view: int, value: int) -> Used | None:
        """Have the liar vote for a value; None if that would convict it."""
        if not self.careful:
            return used
        row = _signed(used.voted, view, value)
        return None if row is None else self._judged(used._replace(voted=row))

    def move(self, used: Used, view: int, shown: int) -> Used | None:
        """Have the liar move to `view` with a prepare certificate of view `shown`, or NONE; None if that convicts it.

        It may always move beyond the last view.
        """
        if not self.careful or view >= len(used.moved):
            return used
        before = used.moved[view]
        lowest = shown if before == UNSHOWN else min(before, shown)
        return self._judged(used._replace(moved=(*used.moved[:view], lowest, *used.moved[view + 1 :])))

    def _judged(self, used: Used) -> Used | None:
        left, prepared, proposed, voted, moved = used
        if left:
            signed = any(value != NONE for row in (prepared, proposed, voted) for value in row)
            return None if signed or any(shown != UNSHOWN for shown in moved) else used
        for view, shown in enumerate(moved):
            if shown != UNSHOWN and any(voted[v] != NONE for v in range(shown + 1, view)):
                return None
        return used


def _signed(row: tuple[int, ...], view: int, value: int) -> tuple[int, ...] | None:
    if row[view] not in (NONE, value):
        return None
    return (*row[:view], value, *row[view + 1 :])
