"""One member of an explored agreement, and its possible steps: the real machine, its log, and its messages.

A `Member` is one state of one member and never changes; `Members` numbers those that were met and remembers what each
did with what it met, so that whoever combines members deals in small integers and every step of the machine is run
once. The machine is the one that nodes run (`shoal.protocol.agreement`), with real keys.

What is said is checked here against what the same member said before, in this life or an earlier one: that it was
written first, and breaks no promise. What several members said together is for `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.lab.explore.proofs import Proofs
from shoal.lab.explore.scope import (
    Scope,
    Values,
    abandoned_log,
    changing_electorate,
    electorate,
    explored_digest,
)
from shoal.lab.explore.word import (
    Log,
    Said,
    broken_promise,
    carried_by,
    last_view,
    lead_stage,
    move_stage,
    prepare_stage,
    stage,
    still_binding,
    vote_stage,
)
from shoal.lab.quorum_rule import outweighs
from shoal.protocol.agreement import (
    Agreement,
    AgreementEffect,
    Broadcast,
    Decided,
    Mismatch,
    NeedFinals,
    NeedState,
    Persist,
    Standing,
)
from shoal.protocol.amending import InForce
from shoal.protocol.certificate import check_certificate
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    PREPARE_DOMAIN,
    Certificate,
    Leave,
    Message,
    Moves,
    Prepare,
    Prepared,
    PreparedValue,
    Propose,
    Value,
    ViewChange,
    Vote,
    step_preimage,
)
from shoal.protocol.view_change import sign_move
from shoal.protocol.voting import FaultModel, Voting

MakeAgreement = Callable[[Identity, Value, Voting], Agreement]

PASSED_OVER = NeedFinals | NeedState | Mismatch
"""Effects of an agreement that are asked of it when a member computes or proposes, and digests of a liar's own."""

# What a machine holds that is no part of its state: who it is, and what it can fetch or form again at any time.
_FETCHED = {"_computed", "_states", "reports", "_taking_part", "_counted"}
_FIXED = {"_identity", "_me", "previous", "round", "votes", "_order", "_in_force"} | _FETCHED
_FIXED |= {"voting", "electorate", "everyone"}
# Tables by view. The rows below the machine's own view are never read again.
_BY_VIEW = {"_proposed", "_proposals", "_my_prepares", "_my_votes", "_freed", "_mismatched", "_refused"}
# Of use only to who forms certificates or leads; reduced schedules fill them in the step that uses them.
_GATHERED = {"_prepares", "_votes", "_changes", "_values", "_leave_signatures"}


def plain_agreement(identity: Identity, previous: Value, voting: Voting) -> Agreement:
    """The machine as it is."""
    return Agreement(identity=identity, previous=previous, voting=voting)


@dataclass(frozen=True, slots=True)
class Member:
    """One member in one state. `said` is what may still bind it; `rank` that of its last step (see `agreement.py`)."""

    machine: Agreement
    log: Log
    said: Said
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a step.

    `votes` are (view, value hash) said for the first time; `in_last_view` if it signs something in a view after which
    there is none. A `violation` ends the search.
    """

    text: str
    after: int
    rank: int
    crashes: int
    leaves: int
    votes: tuple[tuple[int, bytes], ...]
    in_last_view: bool
    certificate: Certificate | None
    violation: str | None


@dataclass(frozen=True, slots=True)
class _Step:
    """Step of a member from a state, in words and with its rank, and how often it is killed or leaves in it."""

    position: int
    number: int
    text: str
    rank: int
    crashes: int = 0
    leaves: int = 0


class Members:
    """All states of members that were met, by number, and what follows from each."""

    def __init__(self, scope: Scope, make: MakeAgreement = plain_agreement, *, forks_only: bool = False) -> None:
        self.scope = scope
        self.states: list[Member] = []
        self._in_force: InForce | None = None
        if scope.changing:
            self.identities, chain = changing_electorate(scope)
            self.previous, self.voting, self._in_force = chain.head, chain.voting, chain.in_force
        else:
            self.identities, self.previous = electorate(scope.members, scope.planner, scope.rollbacks, scope.strangers)
        self.peers = [identity.peer_id for identity in self.identities]
        self.voters = self.peers[: scope.members]
        if not scope.changing:
            self.voting = Voting(scope.faults, tuple(sorted(self.voters)) if scope.strangers else ())
        self.values = Values(self.previous, self.peers, self.identities[: scope.members], self.voting, self._in_force)
        self._make = make
        self._forks_only = forks_only
        self._numbers: dict[object, int] = {}
        self._machines: dict[tuple[int, Log], tuple[Agreement, object]] = {}
        self._signed: dict[tuple[int, Message], Message] = {}
        self._proofs = Proofs(self.previous, self.voting)
        log, everyone = abandoned_log(self.previous), range(scope.everyone)
        self.start = tuple(self._number(i, Member(self._restored(i, log)[0], log, frozenset(), 0)) for i in everyone)

    # -- states ------------------------------------------------------------------------------------------------

    def _restored(self, position: int, log: Log) -> tuple[Agreement, object]:
        """The machine of a member that comes back to `log`, not to be changed, and its key."""
        known = self._machines.get((position, log))
        if known is None:
            machine = self._make(self.identities[position], self.previous, self.voting)
            machine._in_force = self._in_force
            machine.restore(log)
            known = self._machines[position, log] = machine, self._key(machine)
        return known

    def _key(self, machine: Agreement) -> object:
        """Key of a machine: those of one member with equal keys behave alike from here on."""
        if machine.standing is Standing.DECIDED:
            assert machine.certificate is not None
            return machine.certificate.value.hash
        left_out = _FIXED | _GATHERED if self.scope.reduced else _FIXED
        lowest = machine.view if self.scope.reduced else 0
        return tuple(
            (name, _frozen(held, lowest if name in _BY_VIEW else None))
            for name, held in vars(machine).items()
            if name not in left_out
        )

    def _number(self, position: int, member: Member) -> int:
        role = min(position, self.scope.first_alike)
        # Restoring takes records one after the other, so logs that restore to the same stay equal as they grow.
        restored = self._restored(position, member.log)[1]
        key = (role, self._key(member.machine), restored, member.said, member.rank)
        number = self._numbers.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(member)
        return number

    # -- steps -------------------------------------------------------------------------------------------------

    def own_steps(self, position: int, number: int) -> list[Outcome]:
        """All that a member may do by itself."""
        kinds = (self.moves, self.proposes, self.computes, self.leaves, self.returns)
        return [outcome for kind in kinds for outcome in kind(position, number)]

    def moves(self, position: int, number: int) -> list[Outcome]:
        """Give up on a member's view, for any higher one."""
        outcomes: list[Outcome] = []
        for view in range(self.states[number].machine.view + 1, self.scope.views):
            machine = copy_of(self.states[number].machine)
            step = _Step(position, number, f"moves to view {view}", move_stage(view))
            outcomes += self._carried_out(step, machine, machine.move_to(view))
        return outcomes

    def proposes(self, position: int, number: int) -> list[Outcome]:
        """Propose, as a lead that nothing binds, the outcome of one of its plans, or to go back."""
        before, me = self.states[number].machine, self.peers[position]
        if not before.free_to_plan:
            return []
        outcomes: list[Outcome] = []
        values = [self.values.fresh(me, plan, before.leaves) for plan in range(self.scope.plans)]
        values += [self.values.back(me, round, before.leaves) for round in range(1, self.scope.rollbacks + 1)]
        for value in values:
            machine = copy_of(before)
            text = f"proposes {self.values.name(value.hash)} in view {machine.view}"
            step = _Step(position, number, text, lead_stage(before.view))
            outcomes += self._carried_out(step, machine, machine.propose(value))
        return outcomes

    def leaves(self, position: int, number: int) -> list[Outcome]:
        """Have a member promise to sign nothing, if it may."""
        if not self.scope.leaves:
            return []
        machine = copy_of(self.states[number].machine)
        step = _Step(position, number, "leaves", 1, leaves=1)
        return self._carried_out(step, machine, machine.leave())

    def returns(self, position: int, number: int) -> list[Outcome]:
        """Kill a member, so that it loses what is not on disk, and have it return."""
        member = self.states[number]
        if not self.scope.crashes:
            return []
        step = _Step(position, number, "is killed and returns", member.rank)
        return [
            outcome
            for outcome in self._returned(step, member.log, member.said)
            if outcome.after != number or outcome.violation
        ]

    def computes(self, position: int, number: int) -> list[Outcome]:
        """Give a member the finals, or the state, of a proposal that it waits to vote on."""
        machine = copy_of(self.states[number].machine)
        for effect in machine.resume():
            if isinstance(effect, NeedFinals | NeedState):
                effects = self._has(machine, effect)
                text = f"computes {self.values.name(effect.value.hash)}"
                step = _Step(position, number, text, prepare_stage(machine.view))
                return self._carried_out(step, machine, effects)
        return []

    def hears(self, position: int, number: int, sender: int, message: Message) -> list[Outcome]:
        """Let a member hear one message. In reduced schedules it has the finals of whatever it hears proposed."""
        machine = copy_of(self.states[number].machine)
        step = _Step(position, number, f"hears member {sender} {self.values.told(message)}", stage(message) + 1)
        try:
            effects = machine.receive(self.peers[sender], message)
        except RemoteError as error:
            return self._blamed(step, sender, error)
        if self.scope.reduced:
            for effect in list(effects):
                if isinstance(effect, NeedFinals | NeedState):
                    effects += self._has(machine, effect)
        return self._carried_out(step, machine, effects)

    def _has(self, machine: Agreement, wanted: NeedFinals | NeedState) -> list[AgreementEffect]:
        rollback = wanted.value.rollback
        if rollback:
            return machine.holds(rollback.target, explored_digest(rollback.target.round))
        return machine.computed(self.values.report(wanted.value))

    def may_vote(self, member: Member) -> bool:
        """True if others' Prepares can make this member vote: it accepted the proposal of its view, and waits."""
        machine = member.machine
        return (
            machine.standing is not Standing.DECIDED
            and machine.view in machine._my_prepares
            and machine.view not in machine._my_votes
        )

    def votes(self, position: int, number: int, said: list[tuple[int, Message]]) -> list[Outcome]:
        """Let a member hear Prepares of what it accepted until they are a quorum; which ones changes nothing after."""
        machine = copy_of(self.states[number].machine)
        view, mine = machine.view, machine._my_prepares[machine.view]
        names: list[str] = []
        for sender, message in said:
            if isinstance(message, Prepare) and (message.view, message.value) == (view, mine.value):
                names.append(str(sender))
                text = f"votes in view {view} with the word of {' and '.join(names)}"
                step = _Step(position, number, text, vote_stage(view))
                try:
                    effects = machine.receive(*self._as_said_by(machine, position, sender, message))
                except RemoteError as error:
                    return self._blamed(step, sender, error)
                if effects:
                    return self._carried_out(step, machine, effects)
        return []

    def may_lead(self, member: Member) -> bool:
        """True if others' ViewChanges and leaves can make this member lead: it waits, or needs nobody."""
        machine = member.machine
        alone = self.scope.members - self.scope.leaves <= 2
        return machine.standing is Standing.OPEN and (alone or (machine.leading and not machine.proposed))

    def leads(self, position: int, number: int, said: list[tuple[int, Message]]) -> list[Outcome]:
        """Let a member hear view changes and leaves, in any order, until it acts as a lead; or moves there after it.

        The latter makes a difference only where a member is a quorum by itself, and leads as soon as it has moved.
        """
        machine = self.states[number].machine
        outcomes: list[Outcome] = []
        for view in range(machine.view, self.scope.views):
            if view % self.scope.members == position and (view == machine.view or self.may_lead(self.states[number])):
                heard = [(i, m) for i, m in said if isinstance(m, Leave) or _changes_to(view, m)]
                outcomes += self._leads(position, number, view, heard)
        return outcomes

    def _leads(self, position: int, number: int, view: int, heard: list[tuple[int, Message]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        met: set[frozenset[int]] = set()
        waiting = [(frozenset[int](), self.states[number].machine)]
        while waiting:
            taken, before = waiting.pop()
            for at, (sender, message) in enumerate(heard):
                now = taken | {at}
                if at in taken or now in met:
                    continue
                names = " and ".join(str(heard[i][0]) for i in sorted(now))
                step = _Step(position, number, f"leads view {view} with word from {names}", lead_stage(view))
                machine = copy_of(before)
                try:
                    effects = machine.receive(*self._as_said_by(machine, position, sender, message))
                except RemoteError as error:
                    outcomes += self._blamed(step, sender, error)
                    continue
                if machine.view == view and (effects or machine.free_to_plan):
                    outcomes += self._carried_out(step, machine, effects)
                if not effects:
                    met.add(now)
                    waiting.append((now, machine))
                if not effects and machine.view < view:
                    machine = copy_of(machine)
                    outcomes += self._carried_out(step, machine, machine.move_to(view))
        return outcomes

    def _as_said_by(self, machine: Agreement, position: int, sender: int, message: Message) -> tuple[PeerId, Message]:
        """Sign a message with its sender's own key: where members were exchanged it may carry another's signature."""
        if not self.scope.reduced:
            return self.peers[sender], message
        who = position if self.peers[sender] == machine._me else sender
        signed = self._signed.get((who, message))
        if signed is None:
            signed = self._signed[who, message] = _signed_by(self.identities[who], message)
        return self.peers[who], signed

    def _blamed(self, step: _Step, sender: int, error: RemoteError) -> list[Outcome]:
        """Return the violation of blaming an honest member; none if `sender` lies, as then it may be blamed."""
        if self._forks_only or sender in self.scope.lying:
            return []
        step = replace(step, text=f"{step.text}, and blames it: {error}")
        outcome = next(self._carry_out(step, self.states[step.number].machine, (), (), frozenset()))
        return [replace(outcome, violation="an honest member was blamed")]

    def _returned(self, step: _Step, log: Log, said: Said) -> list[Outcome]:
        machine = copy_of(self._restored(step.position, log)[0])
        again = [Broadcast(message) for message in machine.current()]
        effects = [*again, *machine.resume()]
        return list(self._carry_out(replace(step, crashes=1, leaves=0), machine, effects, log, said))

    def _carried_out(self, step: _Step, machine: Agreement, effects: list[AgreementEffect]) -> list[Outcome]:
        """The step whole, and each way in which the member is killed in it and returns with less on disk."""
        member = self.states[step.number]
        if not effects and self._key(machine) == self._key(member.machine):
            return []
        step = replace(step, rank=max(step.rank, member.rank) if self.scope.reduced else 0)
        return list(self._carry_out(step, machine, effects, member.log, member.said))

    def _carry_out(
        self, step: _Step, machine: Agreement, effects: Iterable[AgreementEffect], log: Log, said: Said
    ) -> Iterator[Outcome]:
        started = log, said
        votes: list[tuple[int, bytes]] = []
        certificate: Certificate | None = None
        violation: str | None = None
        for effect in effects:
            if isinstance(effect, Persist):
                if self.scope.crashes and not step.crashes and (log, said) != started:
                    text = f"{step.text}, is killed before it writes its {effect.record.kind}, and returns"
                    yield from self._returned(replace(step, text=text), log, said)
                log += (self._proofs.record(effect.record),)
            elif isinstance(effect, Broadcast):
                message = self._plain(effect.message)
                if message in said:
                    continue
                violation = violation or self._wrong_to_say(step, log, said, message)
                said |= {message}
                if isinstance(message, Vote):
                    votes.append((message.view, message.value))
            elif isinstance(effect, Decided):
                certificate = effect.certificate
                violation = violation or self._unfounded(certificate)
                said |= frozenset() if self.scope.reduced else {certificate}
            elif not isinstance(effect, PASSED_OVER):
                raise LocalError(f"nothing here does {type(effect).__name__}")
        if machine.view < last_view(said) and not self._forks_only:
            violation = violation or "a view went back"
        if self.scope.reduced and not self._forks_only:
            said = still_binding(said)
        if self.scope.reduced:
            machine = _without_others(machine)
        yield Outcome(
            text=step.text,
            after=self._number(step.position, Member(machine, log, said, step.rank)),
            rank=step.rank,
            crashes=step.crashes,
            leaves=step.leaves,
            votes=tuple(votes),
            in_last_view=self.scope.reduced and not step.crashes and self._ends(said - started[1]),
            certificate=certificate,
            violation=violation,
        )

    def _ends(self, said: Iterable[Message]) -> bool:
        """True if something was signed in the last view: nothing that it binds to comes after it.

        Where a liar leads that view it may be for the one value or the other.
        """
        last = self.scope.views - 1
        if last % self.scope.members in self.scope.lying:
            return False
        return any(isinstance(m, Prepare | Vote) and m.view == last for m in said)

    # -- what is said -------------------------------------------------------------------------------------------

    def _wrong_to_say(self, step: _Step, log: Log, said: Said, message: Message) -> str | None:
        if self._forks_only:
            return None
        if step.position >= self.scope.members and isinstance(message, Propose | Prepare | Vote | ViewChange):
            return "a word of who has no vote"
        broken = broken_promise(log, said, message) or self._unrightful(message)
        # A lead's move to its own view is for itself only, so it may come as late as the lead does.
        own = isinstance(message, ViewChange) and message.view % self.scope.members == step.position
        if not broken and not own and step.rank > stage(message):
            raise LocalError(f"{step.text}: not in the order that reduced schedules rely on; explore without reducing")
        return broken

    def _unrightful(self, message: Message) -> str | None:
        """A rollback opens a term with the electorate that decided it, of that same position in the chain."""
        if not isinstance(message, Propose) or not message.value.rollback:
            return None
        value, before = message.value, self.previous
        if sorted([*value.members, *value.leaves]) != sorted(before.members):
            return "a rollback with another electorate"
        return None if value.base == before.hash else "a rollback of another round"

    def outweigh(self, supporters: Collection[PeerId], leaves: Collection[PeerId]) -> bool:
        """True if these are a quorum of the voters, in other words than the protocol's."""
        return outweighs(
            self.previous, supporters, leaves, voters=self.voters, lying=self.scope.faults is FaultModel.LYING
        )

    def _unfounded(self, certificate: Certificate) -> str | None:
        if self._forks_only:
            return None
        if not self.outweigh(certificate.signers, certificate.value.leaves):
            return "certified by a minority"
        try:
            check_certificate(certificate, self.previous, voting=self.voting)
        except RemoteError:
            return "a certificate that does not hold"
        return None

    def _plain(self, message: Message) -> Message:
        """Strip a message of what saves work only, and, where votes are counted and not heard, of its signature."""
        if isinstance(message, Propose):
            self.values.by_hash[message.value.hash] = message.value
        message = self._proofs.message(message)
        if isinstance(message, Prepare | Vote | ViewChange) and self.scope.reduced:
            return msgspec.structs.replace(message, signature=b"")
        return message


def _signed_by(identity: Identity, message: Message) -> Message:
    if isinstance(message, ViewChange):
        signature = sign_move(identity, message.base, message.view, message.prepared)
        return msgspec.structs.replace(message, signature=signature)
    if isinstance(message, Prepare):
        signature = identity.sign(PREPARE_DOMAIN, step_preimage(message.view, message.value))
        return msgspec.structs.replace(message, signature=signature)
    return message


def _changes_to(view: int, message: Message) -> bool:
    return isinstance(message, ViewChange) and message.view == view


def _frozen(held: object, lowest: int | None = None) -> object:
    """`held` as something hashable; of a table by view only the rows from `lowest` on."""
    freeze = _FREEZE.get(type(held))
    return held if freeze is None else freeze(held, lowest)


def _frozen_table(table: dict[Any, object], lowest: int | None) -> object:
    return frozenset((k, _frozen(v)) for k, v in table.items() if lowest is None or k >= lowest)


def _frozen_set(held: set[Any], lowest: int | None) -> object:
    return frozenset(held if lowest is None else (view for view in held if view >= lowest))


_FREEZE: dict[type, Callable[[Any, int | None], object]] = {
    dict: _frozen_table,
    set: _frozen_set,
    Prepare: lambda held, _: (held.view, held.value),
    Vote: lambda held, _: (held.view, held.value),
    Propose: lambda held, _: (held.view, held.value.hash, isinstance(held.prepared, Prepared)),
    PreparedValue: lambda held, _: (held.prepared.view, held.value.hash),
    ViewChange: lambda held, _: (held.view, None if held.prepared is None else carried_by(held)),
    Moves: lambda *_: None,
}
"""How what a machine holds is frozen, by its type: all else is hashable as it is, and means what it says."""


def _without_others(machine: Agreement) -> Agreement:
    """Copy a machine without others' signatures: they are gathered anew where used, as not all were said everywhere."""
    copy = copy_of(machine)
    for name in ("_prepares", "_votes", "_changes"):
        rows = vars(machine)[name]
        setattr(
            copy, name, {key: {p: said for p, said in row.items() if p == machine._me} for key, row in rows.items()}
        )
    return copy


def copy_of(machine: Agreement) -> Agreement:
    """An independent copy that holds no finals; what the tables hold is immutable, so two levels are enough."""
    copy = object.__new__(type(machine))
    copied = vars(copy)
    copied.update(vars(machine))
    for name, held in vars(machine).items():
        kind = type(held)
        if kind is dict:
            fetched = name in _FETCHED
            copied[name] = {} if fetched else {k: dict(v) if type(v) is dict else v for k, v in held.items()}
        elif kind is set:
            copied[name] = set(held)
    return copy
