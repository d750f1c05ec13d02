"""Random schedules of the model of the rules, where they are too many to walk whole, with the same checks at each step.

Nothing is reduced: members move when they like, and may restart. A seed gives the same walks again.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from shoal.testnet.explore.rules import RulesExplorer
from shoal.testnet.explore.rules_bugs import Bug
from shoal.testnet.explore.rules_scope import RulesScope
from shoal.testnet.explore.search import Exploration, Finding, OnProgress, ignore_progress

STEPS_PER_MEMBER_LIMIT = 40
"""A walk this long ends, and the next begins."""

RELUCTANCE = (1.0, 0.3, 0.05)
"""How likely a member moves, beside its other steps: where it seldom does, views fill with Prepares and votes."""

PROGRESS_PERIOD_STEPS = 256


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
    began = time.perf_counter()
    rng = random.Random(seed)
    explorers: dict[int, RulesExplorer] = {}
    taken = 0
    finding: Finding | None = None
    while taken < steps and finding is None:
        liar = rng.randrange(scope.members - scope.liars + 1) if scope.liars else 0
        if liar not in explorers:
            here = replace(scope, reduced=False, liar=liar)
            explorers[liar] = RulesExplorer(here, bug, forks_only=forks_only)
        walked, finding = _walk(explorers[liar], rng, min(steps - taken, STEPS_PER_MEMBER_LIMIT * scope.members))
        taken += walked
        on_progress(taken, taken)
    return Exploration(
        scope=replace(scope, reduced=False),
        states=taken,
        transitions=taken,
        member_states=max(len(explorer.voters) for explorer in explorers.values()),
        seconds=time.perf_counter() - began,
        complete=False,
        certified=frozenset(names for explorer in explorers.values() for names in explorer.certified),
        violations=() if finding is None else (finding,),
    )


def _walk(explorer: RulesExplorer, rng: random.Random, limit: int) -> tuple[int, Finding | None]:
    """One walk, until nothing is left to do: how many steps it took, and what never may happen and did."""
    state = explorer.start
    path: list[str] = []
    reluctance = rng.choice(RELUCTANCE)
    for taken in range(1, limit + 1):
        steps = explorer.steps(state)
        if not steps:
            return taken, None
        weights = [reluctance if step.moves else 1.0 for _, step in steps]
        ((member, step),) = rng.choices(steps, weights)
        path.append(f"member {member} {step.text}")
        reached = explorer.after(state, member, step)
        if isinstance(reached, str):
            return taken, Finding(kind=reached, schedule=tuple(path))
        state = reached
    return limit, None
