"""All states of single members of a round with repairs, by number, and what each may do with what others said.

Steps are remembered: machines are deterministic and share nothing but messages and payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from shoal.collectives.finals import Finals
from shoal.lab.explore.repair_copy import copy_of, kept_key, machine_key, reduction_key
from shoal.lab.explore.repair_judge import Parcel
from shoal.lab.explore.repair_run import Components, MemberState, Passed, Run, WayBack
from shoal.lab.explore.repair_scope import RepairScope, ScopeSetup
from shoal.lab.explore.repair_steps import Context, Doing, Outcome, Step, Voice
from shoal.protocol.agreement import NeedFinals
from shoal.protocol.errors import LocalError
from shoal.protocol.messages import (
    NO_HASH,
    Evict,
    Held,
    Message,
    Plan,
    Prepare,
    Propose,
    Ready,
    Report,
    ViewChange,
    Vote,
)

LOUD = Plan | Evict | Propose | Ready
"""Messages on which any member may act when it hears them; on others a lead does, when it acts."""


class Members:
    """All states of members that were met, by number, and what follows from each."""

    def __init__(self, scope: RepairScope, components: Components | None = None) -> None:
        self.scope = scope
        self.setup = ScopeSetup(scope)
        self.components = components or Components()
        self.states: list[MemberState] = []
        self.voices: list[Voice] = []
        self.voice_of: list[int] = []
        self.finals: dict[tuple[bytes, bytes], Finals] = {}
        self._numbers: dict[Hashable, int] = {}
        self._ids: dict[Hashable, int] = {}
        self._voice_numbers: dict[Voice, int] = {}
        self.parcels: dict[int, Parcel] = {}
        self._wanted: dict[tuple[int, int], tuple[int, ...]] = {}
        self._minded: dict[tuple[int, int], tuple[int, ...]] = {}
        self.messages: dict[int, Message] = {}
        self._said: list[list[int]] = []  # of each voice, by their numbers: all its messages, those heard by anyone
        self._loud: list[list[int]] = []
        self._helds: list[int] = []
        self._plans: set[int] = set()
        self._interrupting: dict[Hashable, list[Doing]] = {}
        self._lacking: dict[int, bytes | None] = {}
        self._known: dict[Hashable, list[Outcome]] = {}
        self.start = self._started()

    # -- states --------------------------------------------------------------------------------------------------

    def _started(self) -> tuple[int, ...]:
        """Everyone has announced its contribution, or is late; the lead of view 0 has planned, and nobody knows yet."""
        setup, numbers = self.setup, []
        for position in range(self.scope.members):
            run = Run(setup, self.components, position, MemberState(), {})
            run.begin()
            for other, ready in enumerate(setup.readies):
                if other != position:
                    run.hear(other, ready)
            if self.scope.late is not None and position == 0:
                run.believe(setup.everyone, Passed.TIMEOUT)
            if run.violation is not None:
                raise LocalError(f"the first plan of the round: {run.violation}")
            numbers.append(self._number(position, run.state()))
        return tuple(numbers)

    def _id(self, held: Hashable) -> int:
        return self._ids.setdefault(held, len(self._ids))

    def _number(self, position: int, member: MemberState) -> int:
        key = (
            position,
            self._id(machine_key(member.machine)),
            self._id(reduction_key(member.reduction)),
            self._id(member.log),
            self._id(member.said),
            self._id(member.posted),
            self._id((member.signed, member.closed, member.words)),
            self._id((kept_key(member.kept, member.reduction), frozenset(member.closed_to.items()))),
            self._id((member.finals, member.life, member.lost, member.old)),
        )
        number = self._numbers.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(member)
            voice = Voice(member.said, member.posted, member.finals, member.old)
            at = self._voice_numbers.setdefault(voice, len(self.voices))
            if at == len(self.voices):
                self._learn(voice)
            self.voice_of.append(at)
        return number

    def _learn(self, voice: Voice) -> None:
        self.voices.append(voice)
        said = {self._id(message): message for message in voice.said}
        self.messages |= said
        self._said.append(sorted(said))
        self._loud.append([m for m in sorted(said) if isinstance(said[m], LOUD)])
        self._plans |= {m for m in said if isinstance(said[m], Plan)}
        self._helds.append(self._id(frozenset(m for m in said if isinstance(said[m], Held))))

    # -- steps ---------------------------------------------------------------------------------------------------

    def steps(self, position: int, number: int, voices: tuple[int, ...]) -> list[Outcome]:
        """All that a member may do when the members said what is numbered in `voices`."""
        others = _others(position, voices)
        wanted = tuple(p for _, v in others for p in self._wanted_of(position, number, v))
        context = self.context(position, number, voices)
        outcomes = list(self._remembered((number, wanted), partial(context.arrives, wanted)))
        closed_off = self.states[number].machine._closed_off is not None
        for sender, v in others:
            for which in self._loud[v]:
                held = tuple(self._helds[v] for _, v in others) if closed_off and which in self._plans else None
                if self._stale(number, v, which):
                    continue
                key = ("hear", number, sender, which, held, bool(self.voices[v].old))
                outcomes += self._done(key, context, wanted, partial(context.hears, sender, self.messages[which]))
        quiet = self.minded(position, number, voices)
        outcomes += self._done(("act", number, quiet), context, wanted, partial(context.acts, quiet))
        known = self.to_fetch(number, voices)
        if known:
            outcomes += self._remembered(("fetch", number, known), partial(context.fetches, known))
        known = self.to_copy(position, number, voices)
        if known:
            outcomes += self._remembered(("copy", number, known), partial(context.copies, known))
        if self.scope.may_return(position):
            outcomes += self._remembered(("return", number), context.returns)
        return outcomes

    def context(self, position: int, number: int, voices: tuple[int, ...]) -> Context:
        """A member in this state, when the members said what is numbered in `voices`."""
        return Context(self, position, number, [(i, self.voices[v]) for i, v in _others(position, voices)])

    def minded(self, position: int, number: int, voices: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Words of others, by sender and number, on which this member may act although hearing them says nothing."""
        return tuple((i, m) for i, v in _others(position, voices) for m in self._minded_of(number, v))

    def to_fetch(self, number: int, voices: tuple[int, ...]) -> frozenset[tuple[bytes, bytes]]:
        """The finals of what is proposed that somebody has, if this member needs them for a vote."""
        plan = self._lacks(number)
        return frozenset(f for v in voices for f in self.voices[v].finals if f[0] == plan)

    def to_copy(self, position: int, number: int, voices: tuple[int, ...]) -> frozenset[tuple[bytes, bytes]]:
        """The finals of its reduction's lineage that others have, if some lack there."""
        reduction = self.states[number].reduction
        if reduction is None or not reduction._finals_wanted:
            return frozenset()
        found = (which for _, v in _others(position, voices) for which in self.voices[v].finals)
        return frozenset(which for which in found if self.finals[which].plan.lineage == reduction.lineage)

    def _stale(self, number: int, voice: int, which: int) -> bool:
        """True if a message is a plan that its maker forgot, and this member follows a later one of the same maker."""
        old, plan = self.voices[voice].old, self.states[number].machine.plan
        if self.scope.stale or plan is None or self.messages[which] not in old:
            return False
        return plan in self.voices[voice].said and plan not in old

    def _remembered(self, key: Hashable, find: Callable[[], Iterable[Outcome]]) -> list[Outcome]:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = list(dict.fromkeys(find()))
        return known

    def _done(
        self, key: Hashable, context: Context, wanted: tuple[int, ...], find: Callable[[], Iterable[Doing]]
    ) -> list[Outcome]:
        """List outcomes of doings; of those that interrupt a reduction also after any part of `wanted` arrived."""
        known = self._known.get(key)
        if known is None:
            self._interrupting[key] = []
            known = self._known[key] = list(dict.fromkeys(context.plainly(find(), self._interrupting[key])))
        interrupting = self._interrupting[key]
        if not (wanted and interrupting and self.scope.reduced):
            return known
        return known + self._remembered((key, wanted), partial(context.after_arrivals, interrupting, wanted))

    def _wanted_of(self, position: int, number: int, voice: int) -> tuple[int, ...]:
        """The numbers of the payloads in `voice` that this member has a use for."""
        known = self._wanted.get((number, voice))
        if known is None:
            parcels = [p for p in self.voices[voice].posted if p.to == position and self._wants(position, number, p)]
            ids = sorted(self._id(p) for p in parcels)
            self.parcels |= {self._id(p): p for p in parcels}
            known = self._wanted[number, voice] = tuple(ids)
        return known

    def _wants(self, position: int, number: int, parcel: Parcel) -> bool:
        """True if a payload makes a difference: it is of the reduction under way, and not of a later revision."""
        reduction = self.states[number].reduction
        if reduction is None or reduction.lineage != parcel.lineage:
            return False
        if parcel.plan_order > (reduction.plan.view, reduction.plan.attempt):
            return False
        run = Run(self.setup, self.components, position, self.states[number], {})
        run.deliver(parcel)
        return run.violation is not None or reduction_key(run.reduction) != reduction_key(reduction)

    def _minded_of(self, number: int, voice: int) -> tuple[int, ...]:
        """Messages in `voice` that a lead in this state may act on although it says nothing to anyone else."""
        known = self._minded.get((number, voice))
        if known is None:
            minded = [m for m in self._said[voice] if self._minds(number, self.messages[m])]
            known = self._minded[number, voice] = tuple(sorted(minded))
        return known

    def _minds(self, number: int, message: Message) -> bool:
        machine = self.states[number].machine
        agreement, plan, eviction = machine.agreement, machine.plan, machine._lead.eviction
        if isinstance(message, Prepare):
            mine = agreement._my_prepares.get(agreement.view)
            waits = mine is not None and agreement.view not in agreement._my_votes
            return waits and mine is not None and (message.view, message.value) == (mine.view, mine.value)
        if not agreement.leading or agreement.proposed:
            return False
        if isinstance(message, ViewChange):
            return message.view == agreement.view and not agreement.free_to_plan
        if not agreement.free_to_plan:
            return False
        if isinstance(message, Report):
            return plan is not None and message.plan == plan.hash and machine._facts.my_report() is not None
        return isinstance(message, Held) and eviction is not None and eviction.answered_by(message)

    def _lacks(self, number: int) -> bytes | None:
        """The plan whose finals this member needs for a vote and does not reduce itself."""
        if number not in self._lacking:
            member = self.states[number]
            effects = copy_of(member.machine.agreement).resume()
            plan = next((e.value.plan for e in effects if isinstance(e, NeedFinals)), None)
            under_way = member.reduction is not None and member.reduction.plan.hash == plan
            self._lacking[number] = None if under_way else plan
        return self._lacking[number]

    def ways_back(self, position: int, member: MemberState) -> tuple[WayBack, ...]:
        """List how a member may return: with its contribution, if it has one, or without."""
        has_one = position != self.scope.late and not member.lost
        return (WayBack.WITH, WayBack.WITHOUT) if has_one else (WayBack.AS_BEFORE,)

    # -- outcomes ------------------------------------------------------------------------------------------------

    def outcomes(self, step: Step, run: Run) -> Iterator[Outcome]:
        """The step whole, and each way in which the member is killed in it and returns."""
        if self.scope.may_return(step.position) and not step.crashes:
            for cut in run.cuts:
                for way in self.ways_back(step.position, cut):
                    killed = Run(self.setup, self.components, step.position, cut, {})
                    killed.restart(way)
                    text = f"{step.text}, is killed within it, and {way.value}"
                    yield from self.outcomes(replace(step, text=text, crashes=1), killed)
        for finals in run.computed:
            self.finals.setdefault((finals.plan.hash, _digest_in(run, finals)), finals)
        member = run.state()
        if self._out_of_scope(member, self.states[step.number]):
            return
        after = self._number(step.position, member)
        if after == step.number and run.violation is None:
            return
        yield Outcome(
            text=step.text,
            after=after,
            crashes=step.crashes,
            votes=tuple(run.votes),
            last_vote=self.scope.reduced and not step.crashes and self._only_voted(run, self.states[step.number]),
            computed=member.finals != self.states[step.number].finals,
            violation=run.violation,
        )

    def _only_voted(self, run: Run, before: MemberState) -> bool:
        """True if all that others see of a step is signed in the last view."""
        said = run.said - before.said
        votes = all(isinstance(m, Prepare | Vote) and m.view == self.scope.views - 1 for m in said)
        return bool(said) and votes and run.posted == before.posted

    def _out_of_scope(self, member: MemberState, before: MemberState) -> bool:
        if member.machine.agreement.view >= self.scope.views:
            return True
        fresh, plan = member.said - before.said, before.machine.plan
        if plan is not None and any(isinstance(m, Plan) and _only_later(plan, m) for m in fresh):
            return True
        return any(isinstance(m, Plan | Evict) and m.attempt >= self.scope.attempts for m in fresh)

    def told(self, message: Message) -> str:
        """Describe a message, for people."""
        name = self.setup.name
        if isinstance(message, Plan):
            kind = "plan" if message.origin == NO_HASH else "revision"
            return f"{kind} {message.view}.{message.attempt}"
        if isinstance(message, Evict):
            gone = ", ".join(name(p) for p in message.evicted)
            return f"evict {gone or 'nobody'} for {message.view}.{message.attempt}"
        if isinstance(message, Propose):
            return f"propose in view {message.view}"
        return type(message).__name__.lower()


def _others(position: int, voices: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(i, v) for i, v in enumerate(voices) if i != position]


def _only_later(plan: Plan, revision: Plan) -> bool:
    """True if a revision changes nothing but the deadline."""
    same = (plan.owners, plan.evicted, plan.standing) == (revision.owners, revision.evicted, revision.standing)
    return same and (plan.lineage, plan.view) == (revision.lineage, revision.view)


def _digest_in(run: Run, finals: Finals) -> bytes:
    return next(digest for plan, digest in run.finals if plan == finals.plan.hash)
