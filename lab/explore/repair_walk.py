"""Random schedules of a round with repairs that is too large to walk whole, with the same checks at every step.

What was said to a member, and posted to it, lies in its bags; one of it is taken, or taken and kept for another time,
and a payload may be lost. Who returns is told and sent everything again. A lead acts on some of what it was told, and
on what it happens to believe. A seed gives the same walks again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from shoal.lab.explore.repair import RepairExploration, RepairExplorer
from shoal.lab.explore.repair_judge import Parcel
from shoal.lab.explore.repair_member import LOUD
from shoal.lab.explore.repair_run import Components, Passed
from shoal.lab.explore.repair_scope import RepairScope
from shoal.lab.explore.repair_steps import Context, Outcome, told_parcel
from shoal.lab.explore.search import OnProgress, State, Walk, ignore_progress, taken_from, walk_at_random
from shoal.protocol.messages import Message, Plan

STEPS_PER_MEMBER_LIMIT = 80
"""A walk this long ends, and the next begins."""

LOSS, REPEAT = 0.02, 0.1
"""Of a payload, and of anything that is taken."""
BELIEVED_ALIVE = (0.99, 0.95, 0.8)
"""Of another member, in a walk."""
PASSED = {Passed.NOTHING: 12.0, Passed.DEADLINES: 4.0, Passed.TIMEOUT: 0.5}
HEARD = 0.9
"""Of a word on which a lead may act."""
KILLED_WITHIN = 0.03
"""Of steps within which a member can be killed, where any may return."""
TRIES = 50
"""To find something that changes somebody."""


def walk_repair(
    scope: RepairScope,
    steps: int,
    seed: int,
    components: Components | None = None,
    *,
    on_progress: OnProgress = ignore_progress,
) -> RepairExploration:
    """Take `steps` random steps, in as many walks as it needs; chunks are dealt anew in each."""
    rng, found = random.Random(seed), _Found()

    def begin() -> _Walk:
        return _Walk(replace(scope, reduced=False, shift=rng.randrange(scope.members)), rng, components)

    figures = walk_at_random(begin, found.add, steps, on_progress)
    return RepairExploration(
        scope=scope,
        member_states=found.member_states,
        plans=len(found.plans),
        revisions=len(found.revisions),
        repaired=len(found.revisions & found.reduced),
        certified=len(found.certified),
        **figures,
    )


@dataclass(slots=True)
class _Found:
    """Findings of all walks: by hash, the plans made, those that revise another, those with finals, and values."""

    member_states: int = 0
    plans: set[bytes] = field(default_factory=set)
    revisions: set[bytes] = field(default_factory=set)
    reduced: set[bytes] = field(default_factory=set)
    certified: set[bytes] = field(default_factory=set)

    def add(self, walk: _Walk) -> None:
        visited = [walk.explorer.members.states[number] for number in walk.visited]
        plans = {m for member in visited for m in member.said if isinstance(m, Plan)}
        self.member_states += len(visited)
        self.plans |= {plan.hash for plan in plans}
        self.revisions |= {plan.hash for plan in plans if plan.lineage != plan.hash}
        self.reduced |= {plan for member in visited for plan, _ in member.finals}
        self.certified |= walk.explorer.certified


_Kind = Callable[[int, tuple[int, ...], Context], Iterable[Outcome]]


class _Walk(Walk):
    def __init__(self, scope: RepairScope, rng: random.Random, components: Components | None) -> None:
        super().__init__(STEPS_PER_MEMBER_LIMIT * scope.members)
        self.explorer = RepairExplorer(scope, components)
        self.state: State = self.explorer.start
        self._rng = rng
        self._members = self.explorer.members
        self._alive = rng.choice(BELIEVED_ALIVE)
        self._words: list[list[tuple[int, Message]]] = [[] for _ in range(scope.members)]
        self._parcels: list[list[Parcel]] = [[] for _ in range(scope.members)]
        self.visited = set(self.state[:-1])
        """The states of members that it came through, by number."""
        for position in range(scope.members):
            self._fill(position)
        weights: list[tuple[_Kind, float]] = [
            (self._arrives, 20.0),
            (self._hears, 8.0),
            (self._acts, 4.0),
            (self._copies, 1.0),
            (self._fetches, 2.0),
            (self._returns, 0.05),
        ]
        self._kinds, self._weights = [kind for kind, _ in weights], [weight for _, weight in weights]

    def step(self) -> str | None:
        """Take a step, if one is soon found, or else it is over; returns what must never happen and happened."""
        before = len(self.path)
        for _ in range(TRIES):
            kind = self._try()
            if kind is not None or len(self.path) > before:
                return kind
        self.over = True
        return None

    def _try(self) -> str | None:
        rng, members = self._rng, self._members
        position = rng.randrange(self.explorer.scope.members)
        voices = tuple(members.voice_of[number] for number in self.state[:-1])
        (kind,) = rng.choices(self._kinds, self._weights)
        found = kind(position, voices, members.context(position, self.state[position], voices))
        possible = [o for o in found if not o.crashes or self.explorer.may_return(self.state, position)]
        if not possible:
            return None
        wrong = [o for o in possible if o.violation is not None]
        whole = possible[-1]  # what comes before are kills within it
        outcome = rng.choice(wrong or possible) if wrong or rng.random() < KILLED_WITHIN else whole
        self.path.append(f"member {position} {outcome.text}")
        after = self.explorer.after(self.state, position, outcome)
        if isinstance(after, str):
            return after
        before, self.state = members.states[self.state[position]], after
        self.visited.add(after[position])
        self._hand_out(position, before.said, before.posted)
        if outcome.crashes:  # it is told and sent everything again
            self._fill(position)
        return None

    def _fill(self, position: int) -> None:
        """All that others have said and posted to a member by now."""
        self._words[position], self._parcels[position] = [], []
        for sender in range(len(self._words)):
            if sender != position:
                self._hand_out(sender, frozenset(), frozenset(), only=position)

    def _hand_out(
        self, position: int, said: frozenset[Message], posted: frozenset[Parcel], *, only: int | None = None
    ) -> None:
        """Put a member's new messages and posts into the bags of all, or into that of one."""
        member = self._members.states[self.state[position]]
        # In an order that does not depend on hashes, which differ between processes.
        for message in sorted(member.said - said, key=repr):
            for receiver, bag in enumerate(self._words):
                if receiver != position and only in (None, receiver) and isinstance(message, LOUD):
                    bag.append((position, message))
        for parcel in sorted(member.posted - posted, key=repr):
            if only in (None, parcel.to):
                self._parcels[parcel.to].append(parcel)

    # -- what a member does --------------------------------------------------------------------------------------

    def _arrives(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        bag, reduction = self._parcels[position], self._members.states[self.state[position]].reduction
        if reduction is None:
            return ()
        plan_order = (reduction.plan.view, reduction.plan.attempt)
        here = [
            p for p in bag if p.lineage == reduction.lineage and p.plan_order <= plan_order
        ]  # others wait for their plan
        if not here:
            return ()
        parcel = self._rng.choice(here)
        if self._rng.random() > REPEAT:
            bag.remove(parcel)
        return (
            ()
            if self._rng.random() < LOSS
            else context.does(f"gets {told_parcel(parcel)}", lambda run: run.deliver(parcel))
        )

    def _hears(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        bag, rng = self._words[position], self._rng
        if not bag:
            return ()
        sender, message = taken_from(bag, rng, repeat=REPEAT)
        return context.does(*rng.choice(list(context.hears(sender, message))))

    def _acts(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        rng, members = self._rng, self._members
        minded = [(i, members.messages[m]) for i, m in members.minded(position, self.state[position], voices)]
        minded.sort(key=repr)  # as in the bags
        heard = tuple(word for word in rng.sample(minded, len(minded)) if rng.random() < HEARD)
        peers = members.setup.peers
        alive = frozenset(p for i, p in enumerate(peers) if i == position or rng.random() < self._alive)
        (passed,) = rng.choices(list(PASSED), list(PASSED.values()))
        return context.does(*context.looks(heard, alive, passed))

    def _copies(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        return context.copies(self._one_of(self._members.to_copy(position, self.state[position], voices)))

    def _fetches(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        return context.fetches(self._one_of(self._members.to_fetch(self.state[position], voices)))

    def _returns(self, position: int, voices: tuple[int, ...], context: Context) -> Iterable[Outcome]:
        found = list(context.returns()) if self.explorer.may_return(self.state, position) else []
        return [self._rng.choice(found)] if found else ()

    def _one_of(self, known: frozenset[tuple[bytes, bytes]]) -> frozenset[tuple[bytes, bytes]]:
        return frozenset([self._rng.choice(sorted(known))]) if known else known
