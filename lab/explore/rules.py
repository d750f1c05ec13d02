"""Every schedule of a small model of the rules of agreement, with liars: what they can do, and what never happens.

The machines that nodes run are explored in `agreement.py`; here are the rules alone, so that more voters, more views
and liars who send anything at any time fit. A state is what each honest voter remembers, has on disk and has said, what
honest leads proposed, and what was taken from a careful liar (`rules_liar.py`). The network is what has been signed:
anyone may be shown any of it later, in any order, or never. A liar has signed everything from the start: both values,
every ViewChange with any prepare certificate that there is, hidden ones too, leaves, far views, and to each member
something else; what takes others' signatures (a certificate) it can make of those that exist only.

What must never happen:

* two values certified; in `crash` with a liar, without evidence that convicts it;
* a certificate with fewer signatures than a quorum's, or, in `lying`, of a value that no honest member accepts;
* an honest member signing what convicts it, or what it may not accept;
* no decision once the network is calm and a quorum is honest and up: at the latest in the first view with such a lead,
  which is one of the next f + 1 if f others lie or are dead.

Nothing below changes what can be certified; `RulesScope(reduced=False)` does without, and the tests compare the two.

* *Lower views first.* No signature is ever enabled by one of a higher view, and none takes away what another enabled
  but for its own sender. So each schedule can be sorted: leaves, then for each view the moves to it, its proposal, its
  Prepares, its votes.
* *All move together.* Who moves to a view and then does nothing there has only said more than who stayed; and in a
  sorted schedule no lower view has anything left to be done in. Likewise whoever skips views may as well visit them.
* *All prepare what an honest lead proposed.* It is the view's only proposal, and a Prepare binds its sender to nothing
  in later views.
* *Members that nothing tells apart* are sorted. Leading is apart from voting: a lead proposes what others said.
* *A restart in the midst of a step* loses what is not on disk yet, and was not said, or says again what is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.lab.explore.rules_bugs import Bug
from shoal.lab.explore.rules_calm import Calm
from shoal.lab.explore.rules_guards import FREE, Facts, Guards, Mover
from shoal.lab.explore.rules_liar import Used
from shoal.lab.explore.rules_scope import LYING, Kind, RulesScope, outvotes
from shoal.lab.explore.rules_voter import NONE, Memory, Signatures, Signing, Voter, new_voter
from shoal.lab.explore.search import Exploration, OnProgress, Search, State, ignore_progress

PROGRESS_PERIOD_STATES = 4096
_MOVE, _PROPOSE, _PREPARE, _VOTE, _RANKS = range(5)

UNJUSTIFIED = "unjustified"
LED_FREE, LED_COMPELLED = "free", "compelled"


class Common(NamedTuple):
    """State beside that of the voters.

    The rank and view of the last step, the restarts left, what honest leads proposed in each view and what members make
    of it, and what was taken from a careful liar.
    """

    rank: int
    view: int
    crashes: int
    proposals: tuple[tuple[tuple[int, str], ...], ...]
    used: Used


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of a member: the `state` after it, and what is wrong with it, if anything.

    votes: whether it may have made a certificate. moves: whether it gives a view up.
    """

    text: str
    state: State
    violation: str | None = None
    votes: bool = False
    moves: bool = False


class _Said(NamedTuple):
    """Messages of a voter so far, as lists."""

    prepares: tuple[tuple[int, int], ...]
    votes: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, tuple[int, ...]], ...]


class RulesExplorer:
    """Walks the schedules of a scope, with a bug or none.

    With `forks_only` nothing but what is certified is judged.
    """

    def __init__(self, scope: RulesScope, bug: Bug | None = None, *, forks_only: bool = False) -> None:
        self.scope, self.bug = scope, bug
        self.guards = Guards(scope, bug)
        self.values = self.guards.values
        self.certified: set[frozenset[str]] = {frozenset()}
        self.voters: list[Voter] = []
        self._forks_only = forks_only
        self._signatures = Signatures(len(self.values), bug)
        self._calm = Calm(scope, bug, self._signatures)
        self._numbers: dict[Voter, int] = {}
        self._said: list[_Said] = []
        self._verdicts: dict[object, str | None] = {}
        self._commons: list[Common] = []
        self._common_numbers: dict[Common, int] = {}
        common = Common(0, 0, scope.crashes, ((),) * scope.views, self.guards.liar.start)
        first = self._number(new_voter(scope.views))
        self.start: State = (*(first for _ in scope.honest), self._common_number(common))

    # -- the search ----------------------------------------------------------------------------------------------

    def run(self, limit: int | None = None, on_progress: OnProgress = ignore_progress) -> Exploration[RulesScope]:
        """Walk every schedule, breadth first, until something is wrong or `limit` states were met."""
        search = Search(self.start, self.steps, self.after, progress_period_states=PROGRESS_PERIOD_STATES)
        search.run(limit, on_progress)
        figures = search.figures()
        if figures["violations"] and len(self.scope.alike) > 1:
            # Members were exchanged on the way to it: search with their names.
            named = RulesExplorer(replace(self.scope, exchanged=False), self.bug, forks_only=self._forks_only)
            (finding,) = named.run().violations
            figures["violations"] = (finding,)
        return Exploration(
            scope=self.scope, member_states=len(self.voters), certified=frozenset(self.certified), **figures
        )

    def after(self, state: State, position: int, step: Step) -> State | str:
        """The state after a step, or what must never happen and happened in it."""
        violation = None if self._forks_only else step.violation
        if violation is None and step.votes:
            violation = self._judged(step.state)
        return step.state if violation is None else violation

    def steps(self, state: State) -> list[tuple[int, Step]]:
        """The steps that are possible, each with the member that takes it."""
        facts, common = self.facts(state), self._commons[state[-1]]
        stalled = None if self._forks_only else self._calm.stalled([self._memory(n) for n in state[:-1]], facts)
        if stalled is not None:
            return [(0, Step(text=f"and the others calm down: {stalled}", state=state, violation="no decision"))]
        steps: list[tuple[int, Step]] = []
        if state == self.start and self.scope.liars:
            steps.append((self.scope.liar, Step(text="shows what certificates it has", state=state, votes=True)))
        if self._together(common):
            steps += [(self.scope.honest[0], step) for step in self._prepared_together(state, facts, common)]
        for place, number in enumerate(state[:-1]):
            member = self.scope.honest[place]
            steps += [(member, step) for step in self._by_voter(state, facts, common, place, self.voters[number])]
        for view in self._led_views(state, common):
            steps += [(self.scope.lead(view), step) for step in self._proposals(state, facts, common, view)]
        if self.scope.reduced and common.view + 1 < self.scope.views:
            steps.append((self.scope.honest[0], self._moved_together(state, common)))
        return steps

    # -- states --------------------------------------------------------------------------------------------------

    def _number(self, voter: Voter) -> int:
        number = self._numbers.setdefault(voter, len(self.voters))
        if number == len(self.voters):
            self.voters.append(voter)
            self._said.append(
                _Said(
                    tuple(_signed(voter.prepares)),
                    tuple(_signed(voter.votes)),
                    tuple((view, codes) for view, codes in enumerate(voter.moves) if codes),
                )
            )
        return number

    def _memory(self, number: int) -> Memory:
        return self.voters[number].memory

    def _common_number(self, common: Common) -> int:
        number = self._common_numbers.setdefault(common, len(self._commons))
        if number == len(self._commons):
            self._commons.append(common)
        return number

    def facts(self, state: State) -> Facts:
        """Collect what the honest have signed."""
        prepares: dict[tuple[int, int], int] = {}
        votes: dict[tuple[int, int], int] = {}
        movers: list[list[Mover]] = [[] for _ in range(self.scope.views)]
        left = 0
        for member, number in zip(self.scope.honest, state, strict=False):
            said, bit = self._said[number], 1 << member
            for at in said.prepares:
                prepares[at] = prepares.get(at, 0) | bit
            for at in said.votes:
                votes[at] = votes.get(at, 0) | bit
            for view, codes in said.moves:
                movers[view].append((bit, codes))
            left |= bit if self.voters[number].left else 0
        return Facts(prepares, votes, movers, left)

    def _changed(self, state: State, place: int, voter: Voter, common: Common) -> State:
        numbers = [*state[:-1]]
        numbers[place] = self._number(voter)
        return (*self._sorted(numbers), self._common_number(common))

    def _sorted(self, numbers: list[int]) -> list[int]:
        alike = self.scope.alike
        for place, number in zip(alike, sorted(numbers[place] for place in alike), strict=True):
            numbers[place] = number
        return numbers

    def _ranked(self, common: Common, view: int, kind: int, used: Used, killed: int = 0) -> Common | None:
        """Return what is common after a step, or None where reduced schedules have that step earlier."""
        if not self.scope.reduced:
            return common._replace(used=used, crashes=common.crashes - killed)
        rank = view * _RANKS + kind
        return None if rank < common.rank else common._replace(rank=rank, view=view, used=used)

    # -- what a voter does ---------------------------------------------------------------------------------------

    def _by_voter(self, state: State, facts: Facts, common: Common, place: int, voter: Voter) -> Iterator[Step]:
        memory, member = voter.memory, self.scope.honest[place]
        if common.crashes and voter.disk != memory:
            after = common._replace(crashes=common.crashes - 1)
            returned = self._changed(state, place, voter._replace(memory=voter.disk), after)
            yield Step(text="is killed and returns", state=returned)
        if memory.left and self.bug is not Bug.SIGNS_AFTER_LEAVING:
            return
        if member in self.scope.leavers and not memory.left:
            yield from self._leaves(state, common, place, voter)
        below = self.bug is Bug.PREPARES_BELOW
        for view in range(0 if below else memory.view, memory.view + 1):
            if not self._together(common):
                yield from self._prepares(state, facts, common, place, voter, view)
        below = self.bug is Bug.VOTES_BELOW
        for view in range(0 if below else memory.view, memory.view + 1):
            yield from self._votes(state, facts, common, place, voter, view)
        if not self.scope.reduced and memory.view + 1 < self.scope.views:
            view = memory.view + 1
            for signing in self._signatures.move(voter, view):
                yield from self._signs(state, common, place, signing, view, _MOVE, f"moves to view {view}", common.used)

    def _signs(
        self,
        state: State,
        common: Common,
        place: int,
        signing: Signing,
        view: int,
        kind: int,
        text: str,
        used: Used,
    ) -> Iterator[Step]:
        after = self._ranked(common, view, kind, used, signing.killed)
        if after is not None and after.crashes >= 0:
            killed = ", is killed before it writes that, and returns" if signing.killed else ""
            reached = self._changed(state, place, signing.voter, after)
            told = text + killed
            yield Step(text=told, state=reached, violation=signing.wrong, votes=kind == _VOTE, moves=kind == _MOVE)

    def _leaves(self, state: State, common: Common, place: int, voter: Voter) -> Iterator[Step]:
        member = self.scope.honest[place]
        proposed = any(row for view, row in enumerate(common.proposals) if self.scope.lead(view) == member)
        if proposed or (voter.memory.signed and self.bug is not Bug.LEAVES_AFTER_SIGNING):
            return
        for signing in self._signatures.leave(voter):
            yield from self._signs(state, common, place, signing, 0, _MOVE, "leaves", common.used)

    def _prepares(
        self, state: State, facts: Facts, common: Common, place: int, voter: Voter, view: int
    ) -> Iterator[Step]:
        member, prepared = self.scope.honest[place], voter.memory.prepared[view]
        if prepared != NONE and self.bug is not Bug.PREPARES_TWICE:
            return
        for value, free, used in self._offered(facts, common, view):
            if value == prepared or not self.guards.accepts(member, value, free=free):
                continue
            text = f"prepares {self.values[value].name} in view {view}"
            for signing in self._signatures.prepare(voter, view, value):
                wrong = signing.wrong or self._unacceptable(facts, view, value)
                yield from self._signs(state, common, place, signing._replace(wrong=wrong), view, _PREPARE, text, used)

    def _together(self, common: Common) -> bool:
        """True if all who would prepare the one proposal of this view may do so at once."""
        return self.scope.reduced and self.scope.lead(common.view) in self.scope.honest

    def _prepared_together(self, state: State, facts: Facts, common: Common) -> Iterator[Step]:
        view, numbers = common.view, [*state[:-1]]
        ranked = self._ranked(common, view, _PREPARE, common.used)
        if ranked is None or ranked == common:
            return
        for value, free, _ in self._offered(facts, common, view):
            for place, number in enumerate(numbers):
                voter = self.voters[number]
                if not voter.memory.left and self.guards.accepts(self.scope.honest[place], value, free=free):
                    numbers[place] = self._number(next(self._signatures.prepare(voter, view, value)).voter)
            text = f"and all other honest members prepare {self.values[value].name} in view {view}"
            reached = (*self._sorted(numbers), self._common_number(ranked))
            yield Step(text=text, state=reached, violation=self._unacceptable(facts, view, value))

    def _offered(self, facts: Facts, common: Common, view: int) -> Iterator[tuple[int, bool, Used]]:
        """The proposals of a view that a member may be shown: value, whether nothing compels it, what it takes."""
        if self.scope.lead(view) in self.scope.honest:
            for value, led in common.proposals[view]:
                if led != UNJUSTIFIED:
                    yield value, led == LED_FREE, common.used
            return
        for target, shown in self.guards.compelled(facts, view, facts.movers[view], common.used):
            for value in range(len(self.values)) if target == FREE else (target,):
                proven = self.guards.proven(self.values[value].leaves, facts, shown)
                used = proven and self.guards.liar.propose(proven, view, value)
                if used is not None:
                    yield value, target == FREE, used

    def _unacceptable(self, facts: Facts, view: int, value: int) -> str | None:
        """Return what is wrong with preparing a value, if it is one that only liars propose."""
        kind = self.values[value].kind
        if kind is Kind.FALSE:
            return "an honest member signed a digest that it did not compute"
        if kind is Kind.UNFAIR:
            return "an honest member signed what it does not accept"
        return None

    def _votes(self, state: State, facts: Facts, common: Common, place: int, voter: Voter, view: int) -> Iterator[Step]:
        memory = voter.memory
        values: Sequence[int] = [memory.prepared[view]]
        if self.bug is Bug.VOTES_TWICE:
            values = [value for value in range(len(self.values)) if value != memory.voted[view]]
        elif values[0] == NONE or memory.voted[view] != NONE:
            return
        for value in values:
            used = self.guards.prepared(facts, view, value, common.used)
            if used is None:
                continue
            text = f"votes for {self.values[value].name} in view {view}"
            for signing in self._signatures.vote(voter, view, value):
                yield from self._signs(state, common, place, signing, view, _VOTE, text, used)

    def _moved_together(self, state: State, common: Common) -> Step:
        view, wrong = common.view + 1, None
        numbers = [*state[:-1]]
        for place, number in enumerate(numbers):
            voter = self.voters[number]
            if not voter.memory.left:
                signing = next(self._signatures.move(voter, view))
                numbers[place] = self._number(signing.voter)
                wrong = wrong or signing.wrong
        after = common._replace(view=view, rank=view * _RANKS)
        reached = (*self._sorted(numbers), self._common_number(after))
        return Step(text=f"and all other honest members move to view {view}", state=reached, violation=wrong)

    # -- what a lead does ----------------------------------------------------------------------------------------

    def _led_views(self, state: State, common: Common) -> Iterator[int]:
        views = [common.view]
        if not self.scope.reduced:
            views = list(range(1 + max(self.voters[number].memory.view for number in state[:-1])))
        for view in views:
            lead = self.scope.lead(view)
            if lead in self.scope.honest and not self._left(state, lead):
                again = self.bug is Bug.FORGETS_PROPOSAL and common.crashes > 0 and len(common.proposals[view]) == 1
                if again or not common.proposals[view]:
                    yield view

    def _left(self, state: State, member: int) -> bool:
        return self.voters[state[self.scope.honest.index(member)]].left

    def _proposals(self, state: State, facts: Facts, common: Common, view: int) -> Iterator[Step]:
        again, lead = bool(common.proposals[view]), self.scope.lead(view)
        for target, used, justified in self.guards.led(facts, view, facts.movers[view], common.used):
            led = UNJUSTIFIED if not justified else LED_FREE if target == FREE else LED_COMPELLED
            for value, after in self._led_values(facts, lead, target, used):
                if again and common.proposals[view][0][0] == value:
                    continue
                ranked = self._ranked(common, view, _PROPOSE, after, killed=int(again))
                if ranked is None:
                    continue
                row = (*common.proposals[view], (value, led))
                proposals = (*common.proposals[:view], row, *common.proposals[view + 1 :])
                reached = (*state[:-1], self._common_number(ranked._replace(proposals=proposals)))
                wrong = "two values in one view" if again else None
                text = f"proposes {self.values[value].name} in view {view}"
                yield Step(text=f"is killed, returns and {text}" if again else text, state=reached, violation=wrong)

    def _led_values(self, facts: Facts, lead: int, target: int, used: Used) -> Iterator[tuple[int, Used]]:
        if target != FREE:
            yield target, used
            return
        for value, (_, kind, leaves) in enumerate(self.values):
            own = kind is Kind.TRUE or (kind is Kind.DISPUTED and lead != self.scope.honest[-1])
            after = self.guards.proven(leaves, facts, used) if own else None
            if after is not None:
                yield value, after

    # -- what must never happen ----------------------------------------------------------------------------------

    def _judged(self, state: State) -> str | None:
        """Return what is wrong with the certificates that anyone could make of what has been signed."""
        facts, used = self.facts(state), self._commons[state[-1]].used
        votes = frozenset(facts.votes.items()), facts.left, used
        if votes not in self._verdicts:
            self._verdicts[votes] = self._verdict(facts, used)
        return self._verdicts[votes]

    def _verdict(self, facts: Facts, used: Used) -> str | None:
        certified: dict[int, list[tuple[int, Used]]] = {}
        for view in range(self.scope.views):
            for value in range(len(self.values)):
                after = self.guards.decided(facts, view, value, used)
                if after is not None:
                    certified.setdefault(value, []).append((view, after))
        for value, made in certified.items():
            for view, _ in made:
                wrong = self._unfounded(facts, view, value)
                if wrong is not None:
                    return wrong
        if self.scope.careful:
            return self._unpunished(facts, certified)
        self.certified.add(frozenset(self.values[value].name for value in certified))
        return "fork" if len(certified) > 1 and not self.scope.forks_tolerated else None

    def _unfounded(self, facts: Facts, view: int, value: int) -> str | None:
        name, kind, leaves = self.values[value]
        voters = facts.votes.get((view, value), 0) | self.scope.liar_mask
        if not outvotes(self.scope, voters, leaves & (facts.left | self.scope.liar_mask)):
            return "certified by fewer than a quorum"
        if self.scope.quorum == LYING and kind in (Kind.UNFAIR, Kind.FALSE):
            return f"certified {name}, which no honest member accepts"
        return None

    def _unpunished(self, facts: Facts, certified: dict[int, list[tuple[int, Used]]]) -> str | None:
        for value, made in certified.items():
            self.certified.add(frozenset({self.values[value].name}))
            for other in certified:
                for _, used in made if other != value else ():
                    views = range(self.scope.views)
                    if any(self.guards.decided(facts, view, other, used) is not None for view in views):
                        return "a fork that convicts nobody"
        return None


def _signed(row: Sequence[int]) -> Iterator[tuple[int, int]]:
    for view, values in enumerate(row):
        for value in range(values.bit_length()):
            if values >> value & 1:
                yield view, value
