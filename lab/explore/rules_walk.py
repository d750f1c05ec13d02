"""Random schedules of the model of the rules, where they are too many to walk whole, with the same checks at each step.

Nothing is reduced: members move when they like, and may restart. A seed gives the same walks again.
"""

from __future__ import annotations

import random
from dataclasses import replace

from shoal.lab.explore.rules import RulesExplorer
from shoal.lab.explore.rules_bugs import Bug
from shoal.lab.explore.rules_scope import RulesScope
from shoal.lab.explore.search import Exploration, OnProgress, Walk, ignore_progress, walk_at_random

STEPS_PER_MEMBER_LIMIT = 40
"""A walk this long ends, and the next begins."""

RELUCTANCE = (1.0, 0.3, 0.05)
"""Weights of a member's move beside its other steps: where it seldom moves, views fill with Prepares and votes."""


def walk_rules(
    scope: RulesScope,
    steps: int,
    seed: int,
    bug: Bug | None = None,
    *,
    forks_only: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Exploration[RulesScope]:
    """Take `steps` random steps, in as many walks as it needs; which members lie is drawn for each."""
    rng = random.Random(seed)
    explorers: dict[int, RulesExplorer] = {}

    def begin() -> _Walk:
        liar = rng.randrange(scope.members - scope.liars + 1) if scope.liars else 0
        if liar not in explorers:
            here = replace(scope, reduced=False, liar=liar)
            explorers[liar] = RulesExplorer(here, bug, forks_only=forks_only)
        return _Walk(explorers[liar], rng)

    figures = walk_at_random(begin, lambda _: None, steps, on_progress)  # what it met is in its explorer
    return Exploration(
        scope=replace(scope, reduced=False),
        member_states=max(len(explorer.voters) for explorer in explorers.values()),
        certified=frozenset(names for explorer in explorers.values() for names in explorer.certified),
        **figures,
    )


class _Walk(Walk):
    def __init__(self, explorer: RulesExplorer, rng: random.Random) -> None:
        super().__init__(STEPS_PER_MEMBER_LIMIT * explorer.scope.members)
        self._explorer, self._rng = explorer, rng
        self._state = explorer.start
        self._reluctance = rng.choice(RELUCTANCE)

    def step(self) -> str | None:
        """Take a step that is possible; where there is none it is over."""
        steps = self._explorer.steps(self._state)
        if not steps:
            self.over = True
            return None
        weights = [self._reluctance if step.moves else 1.0 for _, step in steps]
        ((member, step),) = self._rng.choices(steps, weights)
        self.path.append(f"member {member} {step.text}")
        reached = self._explorer.after(self._state, member, step)
        if isinstance(reached, str):
            return reached
        self._state = reached
        return None
