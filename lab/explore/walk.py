"""Random schedules of an agreement that is too large to walk whole, with the same checks at every step.

Messages lie in a bag for each receiver; one is lost, heard, or heard and kept for another time. Nothing is reduced:
every message goes to everyone, and votes and certificates are heard. A seed gives the same walks again.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.lab.explore.agreement import Explorer
from shoal.lab.explore.member import MakeAgreement, Members, Outcome, plain_agreement
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.search import (
    Exploration,
    OnProgress,
    State,
    Walk,
    ignore_progress,
    taken_from,
    walk_at_random,
)
from shoal.lab.explore.word import order_of
from shoal.protocol.messages import Certificate, Message, Vote

STEPS_PER_MEMBER_LIMIT = 60
"""A walk this long ends, and the next begins."""

LOSS, REPEAT = 0.1, 0.15
VOTE_LOSS = (0.1, 0.6, 0.95)
"""Probabilities that a vote is lost: the outcome stays unknown then, and members go through many views with votes
behind them."""


def walk(
    scope: Scope,
    steps: int,
    seed: int,
    make: MakeAgreement = plain_agreement,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Exploration[Scope]:
    """Take `steps` random steps, in as many walks as it needs; the planner is another in each."""
    rng = random.Random(seed)

    def begin() -> _HonestWalk:
        return _HonestWalk(replace(scope, reduced=False, planner=rng.randrange(scope.members)), rng, make)

    return walked(scope, begin, steps, on_progress)


class AgreementWalk(Walk):
    """A schedule of those of the members that are honest. Subclasses judge what comes of each step.

    weights: how likely a member hears, computes, proposes, moves, returns, or leaves.
    loss: how likely a message is lost; vote_loss: a vote or a certificate.
    """

    def __init__(
        self,
        members: Members,
        honest: Sequence[int],
        rng: random.Random,
        *,
        weights: Sequence[float],
        loss: float,
        vote_loss: float,
    ) -> None:
        super().__init__(STEPS_PER_MEMBER_LIMIT * members.scope.members)
        self.members = members
        self._honest, self._rng, self._weights = honest, rng, weights
        self._loss, self._vote_loss = loss, vote_loss
        self._numbers = list(members.start)
        self._crashes, self._leaves = members.scope.crashes, members.scope.leaves
        self._bags: dict[int, list[tuple[int, Message]]] = {position: [] for position in honest}
        self._kinds: list[Callable[[int, int], list[Outcome]]] = [
            self._hears,
            members.computes,
            members.proposes,
            members.moves,
            members.returns,
            members.leaves,
        ]

    def step(self) -> str | None:
        """Let an honest member do something, or nothing; returns what must never happen and happened."""
        position = self._rng.choice(self._honest)
        (kind,) = self._rng.choices(self._kinds, self._weights)
        possible = kind(position, self._numbers[position])
        possible = [o for o in possible if o.crashes <= self._crashes and o.leaves <= self._leaves]
        if not possible:
            return None
        outcome = possible[0] if self._rng.random() < 0.6 else self._rng.choice(possible)
        self.path.append(f"member {position} {outcome.text}")
        before, self._numbers[position] = self._numbers[position], outcome.after
        self._crashes -= outcome.crashes
        self._leaves -= outcome.leaves
        states = self.members.states
        for message in sorted(states[outcome.after].said - states[before].said, key=order_of):
            for receiver in self._honest:
                if receiver != position:
                    self._bags[receiver].append((position, message))
        return self._judged(position, outcome)

    def _hears(self, position: int, number: int) -> list[Outcome]:
        if not self._bags[position]:
            return []
        sender, message = taken_from(self._bags[position], self._rng, repeat=REPEAT)
        loss = self._vote_loss if isinstance(message, Vote | Certificate) else self._loss
        return [] if self._rng.random() < loss else self.members.hears(position, number, sender, message)

    @abstractmethod
    def names_certified(self) -> frozenset[str]:
        """Name the values that have been certified."""

    @abstractmethod
    def _judged(self, position: int, outcome: Outcome) -> str | None:
        """Return what must never happen and happened in the step of a member, if anything did."""


def walked(scope: Scope, begin: Callable[[], AgreementWalk], steps: int, on_progress: OnProgress) -> Exploration[Scope]:
    """Walk through a scope at random, and report what was found."""
    met: list[tuple[int, frozenset[str]]] = []

    def ended(one: AgreementWalk) -> None:
        met.append((len(one.members.states), one.names_certified()))

    figures = walk_at_random(begin, ended, steps, on_progress)
    certified = frozenset(names for _, names in met)
    return Exploration(scope=scope, member_states=sum(count for count, _ in met), certified=certified, **figures)


class _HonestWalk(AgreementWalk):
    def __init__(self, scope: Scope, rng: random.Random, make: MakeAgreement) -> None:
        self._explorer = Explorer(scope, make)
        self._state: State = self._explorer.start
        weights = (20.0, 6.0, 6.0, rng.choice((0.5, 1.0, 2.0)), 0.3, 0.1)
        vote_loss, everyone = rng.choice(VOTE_LOSS), range(scope.everyone)
        super().__init__(self._explorer.members, everyone, rng, weights=weights, loss=LOSS, vote_loss=vote_loss)

    def names_certified(self) -> frozenset[str]:
        return self._explorer.certified(self._state)

    def _judged(self, position: int, outcome: Outcome) -> str | None:
        after = self._explorer.after(self._state, position, outcome)
        if isinstance(after, str):
            return after
        self._state = after
        return None
