"""Every schedule of a small agreement, over the machines that nodes run: no two values may ever be certified.

A state is what each member is in (`member.Member`, by number), which values have been certified, and how many
crashes and leaves may still happen. The network is what has been said: anyone may hear any of it later, in any order,
any number of times, or never, which is delay, reordering, repetition and loss. A member may give up on its view and
move to any higher one, be killed after or within a step, lose what was not on disk and return, or leave, at any moment.
After each step votes are counted as someone would who had heard them all.

Nothing below changes what can be certified; `Scope(reduced=False)` does without, and the tests compare the two.

* *Steps of members are remembered.* Machines are deterministic and share nothing but messages.
* *Breadth first, and dead is silent.* No step of one member takes one from another, and what has been said stays said.
  So being lost, or down for good, is to take no further step, and needs no state of its own.
* *Lower views first.* Give each step a rank: 4v for moving to view v, 4v+1 for leading it, 4v+2 for accepting what is
  proposed in it and 4v+3 for voting, but never less than that of a step it depends on, by its member or by what that
  heard. Steps that do not depend on each other commute, so each schedule can be sorted by rank and ends in the same
  state; only sorted ones are walked.
* *What cannot matter is forgotten.* A machine never reads its tables below its own view; of what a member said below
  its view only proposals and its highest vote are kept. Which quorum a certificate is of makes no difference. In a
  sorted schedule all votes of a view come before any move beyond it, so they are counted by then. That every message
  is said at its own rank is checked as it is said.
* *Votes are counted, not heard.* Hearing one changes only whether its hearer knows the outcome, and then it is silent.
* *View changes and leaves are heard by the lead of the view only, when they make it act.* For others they are a reason
  to move, which they may do without. Hearing some, and not yet enough, changes nothing that others see.
* *Who hears a proposal has its finals.* Without them it does not vote, as if it had not heard.
* *Prepares are heard by who accepted the same, when they make it vote.* Fewer change nothing that others see.
* *Prepares and votes in the last view come first.* Nothing depends on them, and having more of them certifies no less.
* *Members that nothing tells apart* (`Scope.first_alike`) are sorted: exchanging them exchanges whole schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.lab.explore.member import MakeAgreement, Members, Outcome, plain_agreement
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.search import Exploration, OnProgress, Search, State, ignore_progress
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Leave, Message, Prepare, Propose, ViewChange, Vote

PROGRESS_PERIOD_STATES = 4096

Cast = tuple[int, bytes]
"""A vote: its view and the hash of its value."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Meaning of the last number of a state: the values certified, and what may still happen."""

    certified: frozenset[bytes]
    crashes: int
    leaves: int


def _without_later(steps: list[tuple[int, Outcome]]) -> list[tuple[int, Outcome]]:
    """Keep the first step that signs in the last view, if any; before a vote also what would come too late."""
    last = [step for step in steps if step[1].in_last_view]
    if not last:
        return steps
    first = min(last, key=lambda step: step[1].rank)
    if not first[1].votes:
        return [first]
    return [step for step in steps if step is first or step[1].rank < first[1].rank]


class Explorer:
    """Walks the schedules of a scope.

    With `forks_only` broken promises pass, to see whether they lead to a fork; if none is found that way, reduced
    schedules prove nothing, since they rely on promises. Raises LocalError for machines that step out of their order.
    """

    def __init__(self, scope: Scope, make: MakeAgreement = plain_agreement, *, forks_only: bool = False) -> None:
        self.scope = scope
        self.members = Members(scope, make, forks_only=forks_only)
        self._make = make
        self._forks_only = forks_only
        self._standings = [Standing(frozenset(), scope.crashes, scope.leaves)]
        self._standing_numbers = {self._standings[0]: 0}
        self.start: State = (*self.members.start, 0)
        self._order: list[State] = []
        # Of each Member, by its number: its rank, its votes, what it says to all and to leads, whether it may lead.
        self._ranks: list[int] = []
        self._votes: list[frozenset[Cast]] = []
        self._prepares: list[frozenset[Cast]] = []
        self._offers: list[int] = []
        self._voices: list[int] = []
        self._waiting: list[bool] = []
        self._voting: list[bool] = []
        self._said: list[tuple[Message, ...]] = []
        self._said_numbers: dict[frozenset[Message], int] = {}
        self._outcomes: dict[tuple[int, tuple[int, ...]], list[Outcome]] = {}
        self._own: dict[int, list[Outcome]] = {}
        self._heard: dict[tuple[int, int, int], list[Outcome]] = {}

    # -- the search ----------------------------------------------------------------------------------------------

    def run(self, limit: int | None = None, on_progress: OnProgress = ignore_progress) -> Exploration[Scope]:
        """Walk every schedule, breadth first, until a promise is broken or `limit` states were met."""
        search = Search(self.start, self._steps, self.after, progress_period_states=PROGRESS_PERIOD_STATES)
        order = self._order = search.order
        search.run(limit, on_progress)
        figures = search.figures()
        if figures["violations"] and self.scope.first_alike < self.scope.everyone:
            # Members were exchanged on the way to it: search with their names.
            named = replace(self.scope, exchanged=False)
            (finding,) = Explorer(named, self._make, forks_only=self._forks_only).run().violations
            figures["violations"] = (finding,)
        return Exploration(
            scope=self.scope,
            member_states=len({number for state in order for number in state[:-1]}),
            certified=frozenset(self.certified(state) for state in order),
            **figures,
        )

    def certified(self, state: State) -> frozenset[str]:
        """The names of the values that have been certified."""
        return frozenset(self.members.values.name(v) for v in self._standings[state[-1]].certified)

    def sayings(self) -> frozenset[tuple[int, str]]:
        """All that was ever said in the schedules that `run` walked, as (member, text)."""
        numbers = {pair for state in self._order for pair in enumerate(state[:-1])}
        return frozenset(
            (position, self.members.values.told(message))
            for position, number in numbers
            for message in self.members.states[number].said
        )

    # -- the steps that are possible -----------------------------------------------------------------------------

    def _steps(self, state: State) -> list[tuple[int, Outcome]]:
        if len(self._ranks) < len(self.members.states):
            self._learn()
        ranks, standing = self._ranks, self._standings[state[-1]]
        numbers = state[:-1]
        now = max([ranks[number] for number in numbers])
        offered = tuple([self._offers[number] for number in numbers])
        steps: list[tuple[int, Outcome]] = []
        for position, number in enumerate(numbers):
            if self._waiting[number] or self._voting[number]:
                outcomes = self._possible(position, number, tuple([self._voices[other] for other in numbers]))
            else:
                outcomes = self._possible(position, number, offered)
            for outcome in outcomes:
                if outcome.rank >= now and outcome.crashes <= standing.crashes and outcome.leaves <= standing.leaves:
                    steps.append((position, outcome))
        return _without_later(steps)

    def _learn(self) -> None:
        """Take note of what others may see of the Members that are new."""
        for member in self.members.states[len(self._ranks) :]:
            said = member.said
            self._ranks.append(member.rank)
            self._votes.append(frozenset((m.view, m.value) for m in said if isinstance(m, Vote)))
            self._prepares.append(frozenset((m.view, m.value) for m in said if isinstance(m, Prepare)))
            self._voices.append(self._said_number(frozenset(m for m in said if not isinstance(m, Vote))))
            if self.scope.reduced:
                self._offers.append(self._said_number(frozenset(m for m in said if isinstance(m, Propose))))
                self._waiting.append(self.members.may_lead(member))
                self._voting.append(self.members.may_vote(member))
            else:
                self._offers.append(self._said_number(said))
                self._waiting.append(False)
                self._voting.append(False)

    def _said_number(self, said: frozenset[Message]) -> int:
        number = self._said_numbers.setdefault(said, len(self._said))
        if number == len(self._said):
            self._said.append(tuple(said))
        return number

    def _possible(self, position: int, number: int, heard: tuple[int, ...]) -> list[Outcome]:
        """List a member's possible steps when each member has sent the messages numbered in `heard`."""
        outcomes = self._outcomes.get((number, heard))
        if outcomes is not None:
            return outcomes
        if number not in self._own:
            self._own[number] = self.members.own_steps(position, number)
        outcomes = list(self._own[number])
        for sender, said in enumerate(heard):
            if sender != position:
                outcomes += self._hears(position, number, sender, said)
        if self._waiting[number]:
            outcomes += self._leads(position, number, heard)
        if self._voting[number]:
            outcomes += self.members.votes(position, number, self._others(position, heard, Prepare))
        if self.scope.reduced:
            self._outcomes[number, heard] = outcomes
        return outcomes

    def _hears(self, position: int, number: int, sender: int, said: int) -> list[Outcome]:
        key = (number, sender, said)
        outcomes = self._heard.get(key)
        if outcomes is None:
            messages = [m for m in self._said[said] if not self.scope.reduced or isinstance(m, Propose)]
            outcomes = [o for m in messages for o in self.members.hears(position, number, sender, m)]
            self._heard[key] = outcomes
        return outcomes

    def _leads(self, position: int, number: int, heard: tuple[int, ...]) -> list[Outcome]:
        return self.members.leads(position, number, self._others(position, heard, ViewChange, Leave))

    def _others(self, position: int, heard: tuple[int, ...], *kinds: type[Message]) -> list[tuple[int, Message]]:
        """Messages of these kinds from the other members, each with its sender."""
        others = [(i, message) for i, said in enumerate(heard) if i != position for message in self._said[said]]
        return [(i, message) for i, message in others if isinstance(message, kinds)]

    # -- what a step does to the whole ---------------------------------------------------------------------------

    def after(self, state: State, position: int, outcome: Outcome) -> State | str:
        """The state after a step, or what must never happen and happened in it."""
        if outcome.violation is not None:
            return outcome.violation
        numbers = [*state[:position], outcome.after, *state[position + 1 : -1]]
        number = state[-1]
        if outcome.votes or outcome.certificate or outcome.crashes or outcome.leaves:
            if len(self._votes) < len(self.members.states):
                self._learn()
            standing = self._stands(self._standings[number], numbers, outcome)
            if isinstance(standing, str):
                return standing
            number = self._standing_numbers.setdefault(standing, len(self._standings))
            if number == len(self._standings):
                self._standings.append(standing)
        first = self.scope.first_alike
        numbers[first:] = sorted(numbers[first:])
        return (*numbers, number)

    def _stands(self, before: Standing, numbers: list[int], outcome: Outcome) -> Standing | str:
        certified = set(before.certified)
        for vote in outcome.votes:
            if not self._forks_only and not self._suffice(vote, numbers, self._prepares):
                return "a vote without a prepare certificate"
            if self._suffice(vote, numbers, self._votes):
                certified.add(vote[1])
        certificate = outcome.certificate
        if certificate is not None:
            voters = self._signers((certificate.view, certificate.value.hash), numbers, self._votes)
            if not voters.issuperset(certificate.signers):
                return "certified without votes"
            certified.add(certificate.value.hash)
        if len(certified) > 1:
            return "fork"
        return Standing(frozenset(certified), before.crashes - outcome.crashes, before.leaves - outcome.leaves)

    def _signers(self, vote: Cast, numbers: list[int], said: list[frozenset[Cast]]) -> set[PeerId]:
        return {self.members.peers[i] for i, number in enumerate(numbers) if vote in said[number]}

    def _suffice(self, vote: Cast, numbers: list[int], said: list[frozenset[Cast]]) -> bool:
        leaves = self.members.values.by_hash[vote[1]].leaves
        return self.members.outweigh(self._signers(vote, numbers, said), leaves)
