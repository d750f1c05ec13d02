"""Every schedule of a small round in which participants are lost and the reduction is repaired.

A state is what each member is in (`repair_run.Member`, by number) and who may still return how often. A
member is the round machine and the reduction that nodes run, its agreement log, and all that it said and posted. It
begins when all contributions are announced, or one is late, and the lead of view 0 has planned. From then on

* any message may be heard, and any payload arrive, later, in any order, again, or never;
* anyone may believe anyone dead at any moment, rightly or not, for as long as it likes: a lead evicts and plans by
  whatever it believes, a member moves to the next view;
* the deadlines that a lead keeps, and the patience of the others, may run out at any moment or never;
* anyone may be killed at any moment, between any two records, lose what is not on disk, and return, in another life,
  with its contribution or without. Being killed for good is to take no further step, and needs no state.

What every step does is judged by `repair_judge.py`; what members did together, here: of one plan nobody finds
two digests, and no two values gather a quorum of votes in a view each.

How the schedules are kept few, without leaving out what somebody could see:

* *Steps of members are remembered*, and who heard something and did nothing about it is as if it had not heard: what
  was said stays said. So reports, view changes and what is held are heard in the step in which a lead acts on them, in
  every combination of one such word from each; and what anyone believes lasts for one step.
* *Arrivals are put off until they matter.* A payload changes nothing that others see until it completes a sum (which
  is posted), or the last final (which is reported), or the reduction is interrupted by a close-off, a revision or
  its end: then it matters which had arrived, and every part of what was on its way is tried.
  `RepairScope(reduced=False)` lets them come one by one at any moment, and a test compares what is said.
* *Votes in the last view come first*: nothing depends on them, and what their member may do in lower views can be done
  before the proposal, on which it does not depend.

Left out by default: plans heard after newer ones of the same lead (`stale`).

Left out always: plans that give a reduction nothing but more time, relays, stalls that are told (they evict as beliefs
do), leaves, payloads in pieces (`test_reassembly.py`), frames between `follow` and `repair`, and finals
that are fetched for a vote while a reduction of their plan goes on: any payload that was posted may arrive, so it may
bring them. Finals that are copied into a reduction all come at once: of what was posted, any part may have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.lab.explore.repair_member import Members
from shoal.lab.explore.repair_run import Components
from shoal.lab.explore.repair_scope import RepairScope, Returns
from shoal.lab.explore.repair_steps import Outcome
from shoal.lab.explore.search import Finding, OnProgress, Search, State, ignore_progress
from shoal.lab.quorum_rule import outweighs
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Vote

PROGRESS_PERIOD_STATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairExploration:
    """Findings of a search.

    `complete`: every schedule of the scope was walked. `plans`, `revisions` and `repaired` are how many
    plans were made, how many of them revise another, and of how many of these somebody had all finals;
    `certified` how many values gathered a quorum of votes, each in some schedule.
    """

    scope: RepairScope
    states: int
    transitions: int
    member_states: int
    seconds: float
    complete: bool
    plans: int
    revisions: int
    repaired: int
    certified: int
    violations: tuple[Finding, ...] = ()


class RepairExplorer:
    """Walks the schedules of a scope; `components` is what members are made of."""

    def __init__(self, scope: RepairScope, components: Components | None = None) -> None:
        self.scope = scope
        self.members = Members(scope, components)
        self._returns = Returns(scope)
        self.start: State = (*self.members.start, self._returns.start)
        self._order: list[State] = []
        self.certified: set[bytes] = set()
        """Values that gathered a quorum of votes in some schedule."""
        self._possible: dict[tuple[int, ...], list[Outcome]] = {}

    def run(self, limit: int | None = None, on_progress: OnProgress = ignore_progress) -> RepairExploration:
        """Walk every schedule, breadth first, until something is wrong or `limit` states were met."""
        search = Search(self.start, self._steps, self.after, progress_period_states=PROGRESS_PERIOD_STATES)
        self._order = search.order
        search.run(limit, on_progress)
        plans = {m for member in self.members.states for m in member.said if isinstance(m, Plan)}
        revisions = {plan.hash for plan in plans if plan.lineage != plan.hash}
        return RepairExploration(
            scope=self.scope,
            member_states=len(self.members.states),
            plans=len(plans),
            revisions=len(revisions),
            repaired=len(revisions.intersection(plan for plan, _ in self.members.finals)),
            certified=len(self.certified),
            **search.figures(),
        )

    def sayings(self) -> frozenset[tuple[int, str]]:
        """All that was said, posted and found in the schedules that `run` walked, as (member, text)."""
        numbers = {pair for state in self._order for pair in enumerate(state[:-1])}
        states = self.members.states
        words = {(i, repr(message)) for i, number in numbers for message in states[number].said}
        posts = {(i, repr(parcel)) for i, number in numbers for parcel in states[number].posted}
        return frozenset(words | posts | {(i, repr(f)) for i, number in numbers for f in states[number].finals})

    # -- the steps that are possible -----------------------------------------------------------------------------

    def _steps(self, state: State) -> list[tuple[int, Outcome]]:
        voices = tuple([self.members.voice_of[number] for number in state[:-1]])
        steps: list[tuple[int, Outcome]] = []
        for position, number in enumerate(state[:-1]):
            key = (position, number, *voices)
            possible = self._possible.get(key)
            if possible is None:
                possible = self._possible[key] = self.members.steps(position, number, voices)
            for outcome in possible:
                if not outcome.crashes or self.may_return(state, position):
                    if outcome.last_vote:
                        return [(position, outcome)]
                    steps.append((position, outcome))
        return steps

    def may_return(self, state: State, position: int) -> bool:
        """True if this member may be killed and return once more."""
        return self._returns.allowed(state[-1], position)

    def after(self, state: State, position: int, outcome: Outcome) -> State | str:
        """The state after a step, or what must never happen and happened in it."""
        if outcome.violation is not None:
            return outcome.violation
        numbers = [*state[:position], outcome.after, *state[position + 1 : -1]]
        if outcome.computed and self._two_digests(numbers):
            return "two digests of one plan"
        if outcome.votes and self._forked(numbers):
            return "fork"
        return (*numbers, state[-1] - outcome.crashes * self._returns.one(position))

    def _two_digests(self, numbers: list[int]) -> bool:
        found = {pair for number in numbers for pair in self.members.states[number].finals}
        return len({plan for plan, _ in found}) < len(found)

    def _forked(self, numbers: list[int]) -> bool:
        """Count all votes ever cast, view by view, with a quorum rule of its own."""
        setup = self.members.setup
        voters: dict[tuple[int, bytes], set[PeerId]] = {}
        for peer, number in zip(setup.peers, numbers, strict=True):
            for message in self.members.states[number].said:
                if isinstance(message, Vote):
                    voters.setdefault((message.view, message.value), set()).add(peer)
        certified = {value for (_, value), peers in voters.items() if outweighs(setup.previous, peers)}
        self.certified |= certified
        return len(certified) > 1
