"""Every schedule of a small agreement: a depth-first walk over all states that members and messages can be in.

Messages once sent stay: each may reach each member at any later time, any number of times, or never, which is loss,
delay, reordering and repetition at once. Every member may give up on its view, crash and return, or leave, at any
moment. Votes are only counted, not delivered: receiving one changes nothing but whether its receiver knows the
outcome, and the count sees every outcome that anyone could know. Finals are taken to be at hand: who needs a plan's
digest has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from shoal.protocol.agreement import Agreement, AgreementEffect, Broadcast, DurableRecord, NeedFinals, Persist
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Leave, Message, Propose, Value, ViewChange, Vote
from tests.protocol.lab import (
    SWARM,
    MakeAgreement,
    PaperIdentity,
    honest_report,
    outweighs,
    paper_identities,
    plain_agreement,
    plan_hash,
    value_of,
)


@dataclass(frozen=True)
class Member:
    """One member in one state; `machine` is never changed once it is in a state. Equal `key`: will behave alike."""

    machine: Agreement
    log: tuple[DurableRecord, ...]
    heard: frozenset[int]
    key: object

    @staticmethod
    def of(machine: Agreement, log: tuple[DurableRecord, ...], heard: frozenset[int]) -> Member:
        changes = frozenset(
            (view, peer, change.highest) for view, row in machine._changes.items() for peer, change in row.items()
        )
        key = (
            machine.view, machine.standing, machine._signed, machine._highest, frozenset(machine._my_votes),
            frozenset(machine._proposed.items()), frozenset(machine._proposals.items()), frozenset(machine._freed),
            frozenset(machine.leaves), changes, log,
        )  # fmt: skip
        return Member(machine, log, heard, key)


@dataclass(frozen=True)
class State:
    """All members, all messages ever sent (by number), and how often crashes and leaves may still happen."""

    members: tuple[Member, ...]
    posted: frozenset[int]
    crashes: int
    leaves: int

    def key(self) -> object:
        return tuple(member.key for member in self.members), self.posted, self.crashes, self.leaves


@dataclass(frozen=True)
class Outcome:
    """How many states there were, and the values certified in the worst of them."""

    states: int
    certified: frozenset[bytes]

    @property
    def forked(self) -> bool:
        return len(self.certified) > 1


class Explorer:
    """Walks every schedule of `members` members through views up to `views`."""

    def __init__(
        self,
        members: int,
        *,
        views: int,
        crashes: int = 0,
        leaves: int = 0,
        make: MakeAgreement = plain_agreement,
        keeps_log: bool = True,
    ) -> None:
        self._identities: list[PaperIdentity] = paper_identities(members)
        self._previous = genesis(SWARM, [identity.peer_id for identity in self._identities])
        self._views = views
        self._make = make
        self._keeps_log = keeps_log
        self._numbers: dict[tuple[int, Message], int] = {}
        self._messages: list[tuple[int, Message]] = []
        machines = (make(identity, self._previous) for identity in self._identities)
        started = tuple(Member.of(machine, (), frozenset()) for machine in machines)
        self._start = State(started, frozenset(), crashes, leaves)

    def run(self, limit: int) -> Outcome:
        """Visit at most `limit` states; stops at the first fork."""
        seen = {self._start.key()}
        open_states = [self._start]
        decided: frozenset[bytes] = frozenset()
        while open_states and len(seen) < limit:
            for state in self._next(open_states.pop()):
                key = state.key()
                if key in seen:
                    continue
                seen.add(key)
                certified = self._certified(state)
                decided = max(decided, certified, key=len)
                if len(certified) > 1:
                    return Outcome(len(seen), certified)
                open_states.append(state)
        return Outcome(len(seen), decided)

    def _certified(self, state: State) -> frozenset[bytes]:
        posted = [self._messages[number] for number in state.posted]
        values = {m.value.hash: m.value for _, m in posted if isinstance(m, Propose)}
        votes: dict[tuple[int, bytes], set[PeerId]] = {}
        for sender, message in posted:
            if isinstance(message, Vote):
                votes.setdefault((message.view, message.value), set()).add(self._identities[sender].peer_id)
        return frozenset(
            value
            for (_, value), voters in votes.items()
            if outweighs(self._previous, voters - set(values[value].leaves), values[value].leaves)
        )

    # -- the steps that are possible -------------------------------------------------------------------------

    def _next(self, state: State) -> Iterator[State]:
        for number, member in enumerate(state.members):
            for at in state.posted - member.heard:
                sender, message = self._messages[at]
                if sender != number and isinstance(message, Propose | ViewChange | Leave):
                    machine = copy_of(member.machine)
                    effects = machine.receive(self._identities[sender].peer_id, message)
                    yield self._after(state, number, machine, effects, heard=member.heard | {at})
            yield from self._own_steps(state, number, member)

    def _own_steps(self, state: State, number: int, member: Member) -> Iterator[State]:
        view = member.machine.view
        if view < self._views:
            machine = copy_of(member.machine)
            yield self._after(state, number, machine, machine.move_to(view + 1))
        if member.machine.free_to_plan:
            machine = copy_of(member.machine)
            value = self._fresh_value(machine, number)
            effects = machine.computed(honest_report(self._previous, value.plan))
            yield self._after(state, number, machine, [*effects, *machine.propose(value)])
        if state.crashes:
            machine = self._make(self._identities[number], self._previous)
            machine.restore(member.log if self._keeps_log else ())
            again: list[AgreementEffect] = [Broadcast(message) for message in machine.current()]
            after = self._after(state, number, machine, again, heard=frozenset())
            yield replace(after, crashes=state.crashes - 1)
        if state.leaves:
            machine = copy_of(member.machine)
            yield replace(self._after(state, number, machine, machine.leave()), leaves=state.leaves - 1)

    def _fresh_value(self, machine: Agreement, number: int) -> Value:
        plan = plan_hash(f"{number} in {machine.view}")
        return value_of(self._previous, plan, self._identities[number].peer_id, leaves=machine.leaves)

    def _after(
        self,
        state: State,
        number: int,
        machine: Agreement,
        effects: list[AgreementEffect],
        heard: frozenset[int] | None = None,
    ) -> State:
        before = state.members[number]
        log, posted = list(before.log), set(state.posted)
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Persist):
                log.append(effect.record)
            elif isinstance(effect, Broadcast):
                posted.add(self._number_of(number, effect.message))
            elif isinstance(effect, NeedFinals):
                effects += machine.computed(honest_report(self._previous, effect.value.plan))
        members = list(state.members)
        members[number] = Member.of(machine, tuple(log), before.heard if heard is None else heard)
        return replace(state, members=tuple(members), posted=frozenset(posted))

    def _number_of(self, sender: int, message: Message) -> int:
        if isinstance(message, ViewChange):
            message = msgspec.structs.replace(message, report=None)  # saves work only; would double the states
        number = self._numbers.setdefault((sender, message), len(self._messages))
        if number == len(self._messages):
            self._messages.append((sender, message))
        return number


def copy_of(machine: Agreement) -> Agreement:
    """An independent copy; what the tables hold is immutable, so two levels are enough."""
    copy = object.__new__(type(machine))
    for name, held in vars(machine).items():
        if isinstance(held, dict):
            held = {k: dict(v) if isinstance(v, dict) else v for k, v in held.items()}
        setattr(copy, name, set(held) if isinstance(held, set) else held)
    return copy
