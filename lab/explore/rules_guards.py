"""The guards of the model: what is a quorum, which certificates there are, what ViewChanges compel, what is accepted.

Everything asks what *could* be received: a guard holds if some of the messages that were signed satisfy it, those of
liars among them. So it holds for good, and nothing that is said later makes it false. Each bug stands beside the rule
that it breaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.lab.explore.quorum_table import reached
from shoal.lab.explore.rules_bugs import Bug
from shoal.lab.explore.rules_liar import Liar, Used
from shoal.lab.explore.rules_scope import CRASH, LYING, Kind, RulesScope, values_of
from shoal.lab.explore.rules_voter import NONE

FREE = -1
"""Nothing compels a value."""

Mover = tuple[int, tuple[int, ...]]
"""A voter, as a bit, and the prepare certificates with which it said it moved to a view."""


class Facts(NamedTuple):
    """Signatures of honest voters: who prepared and voted, by view and value, who moved to each view, who left."""

    prepares: dict[tuple[int, int], int]
    votes: dict[tuple[int, int], int]
    movers: Sequence[Sequence[Mover]]
    left: int


class Guards:
    """The rules for one scope, with a bug or none."""

    def __init__(self, scope: RulesScope, bug: Bug | None) -> None:
        self.scope, self.bug = scope, bug
        self.values = values_of(scope)
        self.liar = Liar(scope.views, careful=scope.careful)
        self._liars = scope.liar_mask
        self._quorums: dict[tuple[int, int], bool] = {}

    # -- quorums -------------------------------------------------------------------------------------------------

    def is_quorum(self, supporters: int, leaves: int) -> bool:
        """True if voters are a quorum, for a value or for ViewChanges that count these leaves."""
        known = self._quorums.get((supporters, leaves))
        if known is None:
            known = self._quorums[supporters, leaves] = self._is_quorum(supporters, leaves)
        return known

    def _is_quorum(self, supporters: int, leaves: int) -> bool:
        scope, count = self.scope, supporters.bit_count()
        if self.bug is Bug.TWO_THIRDS_DOWN and scope.quorum == LYING:
            return count >= 2 * scope.members // 3
        if self.bug is Bug.HALF:
            return 2 * count >= scope.members
        planners = [scope.planner]
        if self.bug is Bug.TIE_FOR_TWO:
            planners.append((scope.planner + 1) % scope.members)
        return any(reached(scope.quorum, scope.members, planner, supporters, leaves) for planner in planners)

    def _suffices(self, honest: int, leaves: int, *, lying: bool, fewer: bool = False) -> bool:
        """True if honest voters, with the liars or without, are enough; `fewer` if one may be missing."""
        supporters = honest | (self._liars if lying else 0)
        if self.is_quorum(supporters, leaves):
            return True
        if self.bug is Bug.STRANGERS and lying and self._liars:
            return True
        if fewer or (self.bug is Bug.SIGNER_TWICE and lying and self._liars):
            return any(self.is_quorum(supporters | 1 << i, leaves) for i in range(self.scope.members))
        return False

    def proven(self, leaves: int, facts: Facts, used: Used) -> Used | None:
        """Check that all who are said to have left signed that; returns what it takes from a liar, None if not."""
        if self.bug is Bug.UNPROVEN_LEAVES:
            return used
        if leaves & ~self._liars & ~facts.left:
            return None
        return self.liar.leave(used) if leaves & self._liars else used

    # -- certificates --------------------------------------------------------------------------------------------

    def prepared(self, facts: Facts, view: int, value: int, used: Used) -> Used | None:
        """Find a prepare certificate of a value in a view; returns what it takes from a liar, None without one."""
        leaves = self.values[value].leaves
        proven = self.proven(leaves, facts, used)
        if proven is None or self.bug is Bug.ONE_STEP:
            return proven
        supporters = facts.prepares.get((view, value), 0)
        if self.bug is Bug.MIXES_VIEWS:
            supporters = _union(mask for (_, of), mask in facts.prepares.items() if of == value)
        if self.bug is Bug.MIXES_VALUES:
            supporters = _union(mask for (at, _), mask in facts.prepares.items() if at == view)
        fewer = self.bug is Bug.SMALL_CERTIFICATE
        if self._suffices(supporters, leaves, lying=False, fewer=fewer):
            return proven
        if self._liars and self._suffices(supporters, leaves, lying=True, fewer=fewer):
            return self.liar.prepare(proven, view, value)
        return None

    def decided(self, facts: Facts, view: int, value: int, used: Used) -> Used | None:
        """Find a quorum of votes for a value in a view; returns what it takes from a liar, None without one."""
        leaves = self.values[value].leaves
        proven = self.proven(leaves, facts, used)
        if proven is None:
            return None
        supporters = facts.votes.get((view, value), 0)
        if self.bug is Bug.MIXES_VOTES:
            supporters = _union(mask for (_, of), mask in facts.votes.items() if of == value)
        if self._suffices(supporters, leaves, lying=False):
            return proven
        if self._liars and self._suffices(supporters, leaves, lying=True):
            return self.liar.vote(proven, view, value)
        return None

    # -- view changes --------------------------------------------------------------------------------------------

    def compelled(self, facts: Facts, view: int, movers: Sequence[Mover], used: Used) -> set[tuple[int, Used]]:
        """List what one quorum's ViewChanges to a view can compel, by the rule of members: a value, or FREE."""
        if view == 0 or self.bug is Bug.ACCEPTS_WITHOUT_MOVES:
            return {(FREE, used)}
        lowest, invented = self.bug is Bug.FOLLOWS_LOWEST, self.bug in (Bug.BELIEVES_INVENTED, Bug.ONE_STEP)
        compelled = self._shown(facts, view, movers, used, lowest=lowest, invented=invented)
        if self.bug is Bug.IGNORES_CERTIFICATES:
            return {(FREE, after) for _, after in compelled}
        return compelled

    def led(self, facts: Facts, view: int, movers: Sequence[Mover], used: Used) -> set[tuple[int, Used, bool]]:
        """List what an honest lead may conclude from one quorum, and whether members find that this compels it."""
        right = {(target, after, True) for target, after in self.compelled(facts, view, movers, used)}
        if view == 0:
            return right
        if self.bug is Bug.LEAD_IGNORES_HIGHEST:
            return {(FREE, after, target == FREE) for target, after, _ in right}
        if self.bug in (Bug.LEAD_TAKES_LOWEST, Bug.LEAD_BELIEVES_INVENTED):
            lowest = self.bug is Bug.LEAD_TAKES_LOWEST
            taken = self._shown(facts, view, movers, used, lowest=lowest, invented=not lowest)
            return {(target, after, (target, after, True) in right) for target, after in taken}
        return right

    def _shown(
        self, facts: Facts, view: int, movers: Sequence[Mover], used: Used, *, lowest: bool, invented: bool
    ) -> set[tuple[int, Used]]:
        """The values of the highest certificate, or the `lowest`, in any one quorum's ViewChanges."""
        found: set[tuple[int, Used]] = set()
        values = len(self.values)
        for level in range(-1, view):
            supporters, shown = 0, set[int]()
            for bit, codes in movers:
                views = [code // values for code in codes]
                if any(at == NONE or at >= level if lowest and level >= 0 else at <= level for at in views):
                    supporters |= bit
                shown.update(code % values if level >= 0 else FREE for code in codes if code // values == level)
            if level < 0:
                shown = {FREE}
            for leaves, after in self._leaves(facts, used):
                if self._suffices(supporters, leaves, lying=False):
                    found.update((target, after) for target in shown)
            if self._liars and self._suffices(supporters, facts.left, lying=True):
                found.update(self._lied(facts, view, level, shown, used, invented=invented))
        return found

    def _leaves(self, facts: Facts, used: Used) -> Iterator[tuple[int, Used]]:
        yield facts.left, used
        if self._liars and self.scope.quorum == CRASH:
            after = self.liar.leave(used)
            if after is not None:
                yield facts.left | self._liars, after

    def _lied(
        self, facts: Facts, view: int, level: int, shown: set[int], used: Used, *, invented: bool
    ) -> Iterator[tuple[int, Used]]:
        """List what a liar's ViewChange compels at `level`, which may itself be what shows the certificate."""
        targets = shown if level < 0 else range(len(self.values))
        for target in targets:
            held: Used | None = used
            if target not in shown and not invented:
                held = self.prepared(facts, level, target, used)
            after = None if held is None else self.liar.move(held, view, level)
            if after is not None:
                yield target, after

    # -- what is accepted ----------------------------------------------------------------------------------------

    def accepts(self, member: int, value: int, *, free: bool) -> bool:
        """True if an honest member prepares a value that nothing compels, or that is compelled."""
        kind = self.values[value].kind
        if kind is Kind.FALSE:
            return self.bug is Bug.ACCEPTS_FALSE
        if not free and self.bug not in (Bug.COMPARES_COMPELLED, Bug.ONE_STEP):
            return True
        if kind is Kind.UNFAIR:
            return self.bug is Bug.ACCEPTS_UNFAIR
        return kind is Kind.TRUE or member != self.scope.honest[-1]

    def joins_far(self, movers: int) -> bool:
        """True if ViewChanges of these move a member further than to its next view."""
        return self.is_quorum(movers, 0) or (self.bug is Bug.FOLLOWS_ONE and movers > 0)


def _union(masks: Iterator[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
