"""Scope of the model of the rules: how large, with which liars, about which values.

Voters are numbered in the order in which they lead, and sets of them are bit masks: voter v is bit v, and leads view v,
v + n, and so on. Views and values are small integers too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.protocol.errors import ConfigError
from shoal.protocol.voting import FaultModel

MEMBERS_LIMIT, VIEWS_LIMIT, PLANS_LIMIT, CRASHES_LIMIT, LEAVES_LIMIT = 9, 6, 4, 4, 2
CRASH, LYING = FaultModel.CRASH.value, FaultModel.LYING.value


@dataclass(frozen=True, kw_only=True)
class RulesScope:
    """Bounds on the schedules of the model. Member v leads view v.

    quorum: the fault model, `crash` or `lying`. `liars` members from number `liar` on may send any message at any time.
    `views` are 0 to views − 1; `plans` is how many values an honest lead may choose from; `planner` is which member
    planned the round before; the last `leaves` honest members may leave; `crashes` is how often somebody restarts.
    With `careless` the one liar of `crash` may sign what convicts it: then it may fork, and forks are not told.
    With `disputed` the last honest member misses itself in plan B, and refuses it where its lead is free.
    `reduced` leaves out schedules that differ in nothing, `exchanged` those that differ in names only; see `rules.py`.
    Raises ConfigError for what is out of range.
    """

    quorum: str = LYING
    members: int = 4
    views: int = 2
    liars: int = 0
    liar: int = 0
    planner: int = 0
    plans: int = 2
    leaves: int = 0
    crashes: int = 0
    careless: bool = False
    disputed: bool = False
    reduced: bool = True
    exchanged: bool = True

    def __post_init__(self) -> None:
        if self.quorum not in (CRASH, LYING):
            raise ConfigError(f"--quorum {self.quorum}: must be crash or lying")
        for name, value, low, high in (
            ("members", self.members, 1, MEMBERS_LIMIT),
            ("views", self.views, 1, VIEWS_LIMIT),
            ("liars", self.liars, 0, self.members - 1),
            ("liar", self.liar, 0, self.members - max(self.liars, 1)),
            ("planner", self.planner, 0, self.members - 1),
            ("plans", self.plans, 1, PLANS_LIMIT),
            ("leaves", self.leaves, 0, min(LEAVES_LIMIT, self.members - self.liars)),
            ("crashes", self.crashes, 0, CRASHES_LIMIT),
        ):
            if not low <= value <= high:
                raise ConfigError(f"--{name} {value}: must be from {low} to {high}")
        if self.quorum == LYING and self.members < 4:
            raise ConfigError(f"--members {self.members}: lying needs 4 or more")

    @property
    def careful(self) -> bool:
        """True if the liar says nothing that convicts it, so that a fork without evidence is found if there is one."""
        return self.quorum == CRASH and self.liars == 1 and not self.careless

    @property
    def forks_tolerated(self) -> bool:
        """True if there are more liars than the quorum is made for, free to be convicted."""
        return self.quorum == CRASH and self.liars > 0 and not self.careful

    @cached_property
    def liar_mask(self) -> int:
        """The liars."""
        return ((1 << self.liars) - 1) << self.liar

    @cached_property
    def honest(self) -> tuple[int, ...]:
        """The numbers of the honest members."""
        return tuple(i for i in range(self.members) if not self.liar_mask >> i & 1)

    @cached_property
    def leavers(self) -> tuple[int, ...]:
        """The honest members that may leave."""
        return self.honest[len(self.honest) - self.leaves :]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """The places, among the honest, of members that nothing tells apart; leading is apart from voting here."""
        if not (self.reduced and self.exchanged):
            return ()
        special = {self.planner if self.quorum == CRASH else -1, *self.leavers}
        if self.disputed:
            special.add(self.honest[-1])
        return tuple(place for place, member in enumerate(self.honest) if member not in special)

    def lead(self, view: int) -> int:
        """The member that leads a view."""
        return view % self.members


class Kind(enum.Enum):
    """Judgement of honest members on a value."""

    TRUE = "true"
    """All computed it."""
    DISPUTED = "disputed"
    """True, but the last honest member is left out of it."""
    UNFAIR = "unfair"
    """The digest is true; no honest member would accept the rest from a free lead: strangers in, honest members out."""
    FALSE = "false"
    """No honest member computed the digest."""


class ModelValue(NamedTuple):
    """A value that may be proposed: its name, what honest members think of it, and the leaves that it counts."""

    name: str
    kind: Kind
    leaves: int = 0


def values_of(scope: RulesScope) -> tuple[ModelValue, ...]:
    """The values of a scope: each plan with each set of leaves, then what only liars propose.

    Those are `unfair`, `false`, and `taken`, which is unfair and counts leaves of all honest members.
    """
    leavers = [*scope.leavers, *(i for i in range(scope.members) if scope.liar_mask >> i & 1)]
    values: list[ModelValue] = []
    for plan in range(scope.plans):
        for leaves in _subsets(leavers if scope.quorum == CRASH else ()):
            name = "".join([chr(ord("A") + plan), *(f"-{i}" for i in leavers if leaves >> i & 1)])
            kind = Kind.DISPUTED if scope.disputed and plan == 1 else Kind.TRUE
            values.append(ModelValue(name, kind, leaves))
    if scope.liars:
        values.append(ModelValue("unfair", Kind.UNFAIR))
        values.append(ModelValue("false", Kind.FALSE))
        values.append(ModelValue("taken", Kind.UNFAIR, ((1 << scope.members) - 1) & ~scope.liar_mask))
    return tuple(values)


def _subsets(members: Sequence[int]) -> list[int]:
    return [
        sum(1 << member for place, member in enumerate(members) if chosen >> place & 1)
        for chosen in range(1 << len(members))
    ]


def outvotes(scope: RulesScope, supporters: int, leaves: int = 0) -> bool:
    """The quorum rule in other words than the protocol's, for who judges the model.

    `lying`: the others are fewer than a third. `crash`: more than half of who stayed, or half with the last planner.
    """
    if scope.quorum == LYING:
        return 3 * (scope.members - supporters.bit_count()) < scope.members
    stayed = ((1 << scope.members) - 1) & ~leaves
    inside = (supporters & stayed).bit_count()
    outside = stayed.bit_count() - inside
    tie = inside == outside and bool(supporters & stayed & 1 << scope.planner)
    return inside > outside or tie
