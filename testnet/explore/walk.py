"""Random schedules of an agreement that is too large to walk whole, with the same checks at every step.

Messages lie in a bag for each receiver; one is lost, heard, or heard and kept for another time. Nothing is reduced:
every message goes to everyone, and votes and certificates are heard. A seed gives the same walks again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from shoal.protocol.messages import Certificate, Message, Vote
from shoal.testnet.explore.agreement import Explorer
from shoal.testnet.explore.member import MakeAgreement, Outcome, plain_agreement
from shoal.testnet.explore.scope import Scope
from shoal.testnet.explore.search import Exploration, Finding, OnProgress, State, ignore_progress
from shoal.testnet.explore.word import order_of

STEPS_PER_MEMBER_LIMIT = 60
"""A walk this long ends, and the next begins."""

LOSS, REPEAT = 0.1, 0.15
VOTE_LOSS = (0.1, 0.6, 0.95)
"""Where votes get lost the outcome stays unknown, and members go through many views with votes behind them."""

PROGRESS_PERIOD_STEPS = 256


def walk(
    scope: Scope,
    steps: int,
    seed: int,
    make: MakeAgreement = plain_agreement,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Exploration[Scope]:
    """Take `steps` random steps, in as many walks as it needs; the planner is another in each."""
    began = time.perf_counter()
    rng = random.Random(seed)
    taken = members = 0
    certified: set[frozenset[str]] = set()
    finding: Finding | None = None
    while taken < steps and finding is None:
        here = replace(scope, reduced=False, planner=rng.randrange(scope.members))
        one = _Walk(here, rng, make)
        for _ in range(min(steps - taken, STEPS_PER_MEMBER_LIMIT * scope.members)):
            kind = one.step()
            taken += 1
            if taken % PROGRESS_PERIOD_STEPS == 0:
                on_progress(taken, taken)
            if kind is not None:
                finding = Finding(kind=kind, schedule=tuple(one.path))
                break
        members += len(one.explorer.members.states)
        certified.add(one.explorer.certified(one.state))
    return Exploration(
        scope=scope,
        states=taken,
        transitions=taken,
        member_states=members,
        seconds=time.perf_counter() - began,
        complete=False,
        certified=frozenset(certified),
        violations=() if finding is None else (finding,),
    )


class _Walk:
    def __init__(self, scope: Scope, rng: random.Random, make: MakeAgreement) -> None:
        self.explorer = Explorer(scope, make)
        self.state: State = self.explorer.start
        self.path: list[str] = []
        self._rng = rng
        self._crashes, self._leaves = scope.crashes, scope.leaves
        self._bags: list[list[tuple[int, Message]]] = [[] for _ in range(scope.members)]
        members = self.explorer.members
        self._kinds: list[Callable[[int, int], list[Outcome]]] = [
            self._hears,
            members.computes,
            members.proposes,
            members.moves,
            members.returns,
            members.leaves,
        ]
        self._weights = (20.0, 6.0, 6.0, rng.choice((0.5, 1.0, 2.0)), 0.3, 0.1)
        self._vote_loss = rng.choice(VOTE_LOSS)

    def step(self) -> str | None:
        """Somebody does something, or nothing; returns what must never happen and happened."""
        rng = self._rng
        position = rng.randrange(len(self._bags))
        (kind,) = rng.choices(self._kinds, self._weights)
        possible = kind(position, self.state[position])
        possible = [o for o in possible if o.crashes <= self._crashes and o.leaves <= self._leaves]
        if not possible:
            return None
        outcome = possible[0] if rng.random() < 0.6 else rng.choice(possible)
        self.path.append(f"member {position} {outcome.text}")
        after = self.explorer.after(self.state, position, outcome)
        if isinstance(after, str):
            return after
        self._crashes -= outcome.crashes
        self._leaves -= outcome.leaves
        states = self.explorer.members.states
        for message in sorted(states[after[position]].said - states[self.state[position]].said, key=order_of):
            for receiver, bag in enumerate(self._bags):
                if receiver != position:
                    bag.append((position, message))
        self.state = after
        return None

    def _hears(self, position: int, number: int) -> list[Outcome]:
        bag, rng = self._bags[position], self._rng
        if not bag:
            return []
        at = rng.randrange(len(bag))
        sender, message = bag[at]
        if rng.random() > REPEAT:
            bag[at] = bag[-1]
            bag.pop()
        loss = self._vote_loss if isinstance(message, Vote | Certificate) else LOSS
        return [] if rng.random() < loss else self.explorer.members.hears(position, number, sender, message)
