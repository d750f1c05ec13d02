"""An in-memory laboratory for agreement: members joined by a bag of messages, watched by a ledger that sees all.

A test says what of the bag is heard; members crash between any two effects of a step and return from their durable log.
The `Ledger` stands outside: it knows every message that ever left a node and raises `Violation` at the first that
breaks a promise, and as soon as the votes ever sent would certify two values, whether or not anyone assembled them.

Signing is by hash here (`PaperIdentity`), which takes a hundredth of the time; `paper_signatures` makes the code under
test accept it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import msgspec
import pytest
from blake3 import blake3

from shoal.lab.quorum_rule import outweighs
from shoal.lab.signed import leave_of, signed_report
from shoal.protocol import amending as amending_module
from shoal.protocol import certificate as certificate_module
from shoal.protocol import commitments as commitments_module
from shoal.protocol import terms as terms_module
from shoal.protocol import view_change as view_change_module
from shoal.protocol import voting as voting_module
from shoal.protocol.agreement import (
    Agreement,
    AgreementEffect,
    Broadcast,
    Decided,
    DurableRecord,
    Mismatch,
    NeedFinals,
    NeedState,
    Persist,
)
from shoal.protocol.certificate import check_certificate, genesis
from shoal.protocol.effects import Effect
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    Certificate,
    Leave,
    Message,
    Prepare,
    Propose,
    Report,
    RoundMessage,
    Value,
    ViewChange,
    Vote,
    domain_hash,
)
from tests.round_messages import value_with

MessageT = TypeVar("MessageT", bound=Message)

SWARM = bytes(range(32))


# -- keys on paper -------------------------------------------------------------------------------------------


def paper_signature(peer: PeerId, domain: bytes, message: bytes) -> bytes:
    """What stands for a signature of `peer`; anyone could make it, but nobody here does."""
    return blake3(domain_hash("paper", peer.encode(), domain, message)).digest(64)


class PaperIdentity(Identity):
    """An identity that signs with a hash, a hundred times faster than Ed25519."""

    def __init__(self, name: str) -> None:
        self.peer_id = PeerId(f"12D3Koo{name}".ljust(52, "1"))

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return paper_signature(self.peer_id, domain, message)


@pytest.fixture
def paper_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes votes verify against PaperIdentity's signatures, and remembers the hash of each value."""
    plain_hash = vars(Value)["hash"].func
    monkeypatch.setattr(Value, "hash", property(lru_cache(maxsize=1 << 14)(plain_hash)))
    for module in (certificate_module, terms_module, amending_module, commitments_module, view_change_module):
        monkeypatch.setattr(
            module,
            "verify",
            lambda peer, domain, message, signature: signature == paper_signature(peer, domain, message),
        )


def paper_identities(count: int) -> list[PaperIdentity]:
    """`count` identities whose PeerIds sort in the order of the list."""
    return [PaperIdentity(f"{number:02d}") for number in range(count)]


# -- making values -------------------------------------------------------------------------------------------


def plan_hash(name: str) -> bytes:
    """A stand-in for the hash of a plan called `name`."""
    return domain_hash("lab plan", name.encode())


def honest_report(previous: Value, plan: bytes) -> Report:
    """The report every member computes from the finals of `plan`."""
    return Report(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        plan=plan,
        digest=domain_hash("lab digest", plan),
        bitmaps=domain_hash("lab bitmaps", plan),
        tokens=previous.tokens + 1,
    )


def value_of(
    previous: Value,
    plan: bytes,
    planner: PeerId,
    members: Iterable[PeerId] | None = None,
    leaves: Iterable[PeerId] = (),
    signing: Iterable[Identity] = (),
) -> Value:
    """The value that `planner` would propose for `plan`. signing: whose proofs of leaves and joining are in it."""
    report = honest_report(previous, plan)
    value = value_with(previous, report, planner, members, leaves=tuple(sorted(leaves)))
    keys = {identity.peer_id: identity for identity in signing}
    new = [peer for peer in value.members if peer not in previous.members]
    return msgspec.structs.replace(
        value,
        leave_signatures=tuple(leave_of(keys[peer], previous).signature for peer in value.leaves if keys)
        or msgspec.UNSET,
        report_signatures=tuple(signed_report(keys[peer], report).signature for peer in new if keys) or msgspec.UNSET,
    )


def messages_in(effects: Collection[Effect | AgreementEffect], kind: type[MessageT]) -> list[MessageT]:
    """The messages of a kind that these effects send to everybody."""
    return [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, kind)]


# -- the ledger ----------------------------------------------------------------------------------------------


class Violation(AssertionError):
    """Something that must never happen has happened. `kind` says what."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass
class Ledger:
    """Everything that ever left a node. Raises Violation at the first thing that may not be.

    With `forks_only` the broken promise itself is let pass, to see whether it leads to two certified values.
    With `one_view` false, votes of all views are counted together: the arithmetic the protocol must not use.
    `prepared` has, by base and sender, what it prepared in each view.
    """

    forks_only: bool = False
    one_view: bool = True
    previous: dict[bytes, Value] = field(default_factory=dict)
    values: dict[bytes, Value] = field(default_factory=dict)
    votes: dict[tuple[bytes, int, bytes], set[PeerId]] = field(default_factory=dict)
    prepared: dict[tuple[bytes, PeerId], dict[int, bytes]] = field(default_factory=dict)
    prepares: dict[tuple[bytes, int, bytes], set[PeerId]] = field(default_factory=dict)
    cast: dict[tuple[bytes, PeerId], dict[int, bytes]] = field(default_factory=dict)
    promised: dict[tuple[bytes, PeerId], dict[int, int]] = field(default_factory=dict)
    before_moving: dict[tuple[bytes, PeerId], set[int]] = field(default_factory=dict)
    proposed: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    left: set[tuple[bytes, PeerId]] = field(default_factory=set)
    certified: dict[bytes, bytes] = field(default_factory=dict)

    def follow(self, previous: Value) -> None:
        """Know `previous`, so that votes of the round after it can be weighed."""
        self.previous[previous.hash] = previous

    def sent(self, sender: PeerId, message: Message) -> None:
        """`sender` let `message` out."""
        if isinstance(message, Propose):
            self._sent_propose(message)
        elif isinstance(message, Prepare):
            self._sent_prepare(sender, message)
        elif isinstance(message, Vote):
            self._sent_vote(sender, message)
        elif isinstance(message, ViewChange):
            self._sent_change(sender, message)
        elif isinstance(message, Leave):
            self.left.add((message.base, sender))
            if self._signed(message.base, sender):
                self._break("leave after signing", sender)

    def decided(self, certificate: Certificate) -> None:
        """A node holds `certificate` to be the round's outcome."""
        try:
            check_certificate(certificate, self.previous[certificate.value.base])
        except RemoteError as error:
            self._break("bad certificate", str(error))
        value, previous = certificate.value, self.previous[certificate.value.base]
        if self.one_view and not outweighs(previous, certificate.signers, value.leaves):
            self._break("certified by a minority", str(certificate.signers))
        self.values[value.hash] = value
        self._certify(value.base, value.hash)

    def _break(self, kind: str, detail: str) -> None:
        if not self.forks_only:
            raise Violation(kind, detail)

    def _signed(self, base: bytes, peer: PeerId) -> bool:
        signed = (self.prepared, self.cast, self.promised)
        return any(known.get((base, peer)) for known in signed)

    def _sent_propose(self, message: Propose) -> None:
        value_hash = message.value.hash
        self.values[value_hash] = message.value
        known = self.proposed.setdefault((message.base, message.view), value_hash)
        if known != value_hash:
            self._break("two values in one view", f"view {message.view}")

    def _sent_prepare(self, sender: PeerId, prepare: Prepare) -> None:
        prepared = self.prepared.setdefault((prepare.base, sender), {})
        if prepared.setdefault(prepare.view, prepare.value) != prepare.value:
            self._break("two prepares in one view", f"{sender} in view {prepare.view}")
        said = self.before_moving.setdefault((prepare.base, sender), set())
        is_below = any(prepare.view < view for view in self.promised.get((prepare.base, sender), {}))
        if is_below and prepare.view not in said:
            self._break("prepare below a promise", f"{sender} in view {prepare.view}")
        said.add(prepare.view)
        if (prepare.base, sender) in self.left:
            self._break("prepare after leaving", sender)
        self.prepares.setdefault((prepare.base, prepare.view, prepare.value), set()).add(sender)

    def _sent_vote(self, sender: PeerId, vote: Vote) -> None:
        prepares = self.prepares.get((vote.base, vote.view, vote.value), set())
        leaves = self.values[vote.value].leaves
        if not outweighs(self.previous[vote.base], prepares - set(leaves), leaves):
            self._break("vote without a prepare certificate", f"{sender} in view {vote.view}")
        cast = self.cast.setdefault((vote.base, sender), {})
        if cast.setdefault(vote.view, vote.value) != vote.value:
            self._break("two votes in one view", f"{sender} in view {vote.view}")
        for view, carried in self.promised.get((vote.base, sender), {}).items():
            if carried < vote.view < view:
                self._break("vote below a promise", f"{sender} voted in {vote.view}, promised {view}")
        if (vote.base, sender) in self.left:
            self._break("vote after leaving", sender)
        views = self.votes.setdefault((vote.base, vote.view if self.one_view else 0, vote.value), set())
        views.add(sender)
        value = self.values[vote.value]
        if outweighs(self.previous[vote.base], views - set(value.leaves), value.leaves):
            self._certify(vote.base, vote.value)

    def _sent_change(self, sender: PeerId, change: ViewChange) -> None:
        carried = -1 if change.prepared is None else change.prepared.prepared.view
        self.promised.setdefault((change.base, sender), {})[change.view] = carried
        if change.prepared is not None:
            self.values[change.prepared.value.hash] = change.prepared.value
        for view in self.cast.get((change.base, sender), {}):
            if carried < view < change.view:
                self._break("a vote that was not carried", f"{sender} voted in {view}, carried {carried}")
        if (change.base, sender) in self.left:
            self._break("view change after leaving", sender)

    def _certify(self, base: bytes, value_hash: bytes) -> None:
        if self.certified.setdefault(base, value_hash) != value_hash:
            raise Violation("fork", f"two values of round {self.values[value_hash].round}")


# -- members and the bag -------------------------------------------------------------------------------------


@dataclass
class Member:
    """A node: its machine, and what survives a crash (`log`, `chain`, `certificates`)."""

    identity: PaperIdentity
    chain: list[Value]
    agreement: Agreement | None = None
    log: list[DurableRecord] = field(default_factory=list)
    certificates: dict[bytes, Certificate] = field(default_factory=dict)
    needs: list[Value] = field(default_factory=list)
    seen_view: int = 0

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id


class Lab:
    """Members of one swarm and the messages between them; each method is one step of a schedule."""

    def __init__(
        self,
        members: int,
        *,
        founders: Sequence[int] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        identities = paper_identities(members)
        self.start = genesis(SWARM, [identities[i].peer_id for i in (founders or range(members))])
        self.members = [Member(identity, [self.start]) for identity in identities]
        self.ledger = ledger or Ledger()
        self.ledger.follow(self.start)
        self.bag: list[tuple[int, PeerId, Message]] = []
        for number in range(members):
            self.restart(number)

    # -- one step ----------------------------------------------------------------------------------------

    def machine(self, number: int) -> Agreement:
        """The running machine of a member that is up."""
        agreement = self.members[number].agreement
        assert agreement is not None
        return agreement

    def number(self, peer: PeerId) -> int:
        """Which member `peer` is."""
        return next(i for i, member in enumerate(self.members) if member.peer == peer)

    def lead(self, view: int, base: Value | None = None) -> int:
        """The number of the lead of `view` in the round after `base` (the first round by default)."""
        return self.number(voting_module.lead(base or self.start, view))

    def restart(self, number: int) -> None:
        """Bring a member up from what it has on disk, and let it say what it stands by."""
        member = self.members[number]
        member.needs.clear()
        member.agreement = Agreement(identity=member.identity, previous=member.chain[-1])
        member.agreement.restore(member.log)
        member.seen_view = member.agreement.view
        self.resend(number)
        self.carry_out(number, member.agreement.resume())

    def crash(self, number: int) -> None:
        """Lose everything that is not on disk."""
        self.members[number].agreement = None

    def resend(self, number: int) -> None:
        """Say everything current again."""
        self.carry_out(number, [Broadcast(message) for message in self.machine(number).current()])

    def carry_out(self, number: int, effects: Iterable[AgreementEffect], *, stop_after: int | None = None) -> None:
        """Carry out effects in order; with `stop_after`, crash after that many of them."""
        member = self.members[number]
        for count, effect in enumerate(effects):
            if count == stop_after:
                self.crash(number)
                return
            if isinstance(effect, Persist):
                member.log.append(effect.record)
            elif isinstance(effect, Broadcast):
                self.ledger.sent(member.peer, effect.message)
                self.post(member.peer, effect.message)
            elif isinstance(effect, NeedFinals):
                member.needs.append(effect.value)
            elif isinstance(effect, Decided):
                self._decided(number, effect.certificate)
            else:
                assert isinstance(effect, Mismatch | NeedState), effect
        if member.agreement is not None:
            if member.agreement.view < member.seen_view:
                raise Violation("a view went back", f"{member.seen_view} to {member.agreement.view}")
            member.seen_view = member.agreement.view

    def post(self, sender: PeerId, message: Message) -> None:
        """Put a message for everyone else into the bag."""
        self.bag += [(i, sender, message) for i, m in enumerate(self.members) if m.peer != sender]

    def deliver(self, number: int, sender: PeerId, message: Message) -> list[AgreementEffect]:
        """Hand one message to one member, as its shell would; returns the effects, not yet carried out."""
        member = self.members[number]
        if member.agreement is None:
            return []
        base = message.value.base if isinstance(message, Certificate) else None
        if isinstance(message, RoundMessage):
            base = message.base
        if base != member.agreement.previous.hash:
            if base in member.certificates and not isinstance(message, Certificate):
                self.bag.append((self.number(sender), member.peer, member.certificates[base]))
            return []
        return member.agreement.receive(sender, message)

    def compute(self, number: int, plan: bytes) -> list[AgreementEffect]:
        """The member finishes reducing `plan`."""
        machine = self.machine(number)
        report = honest_report(machine.previous, plan)
        everyone = [member.peer for member in self.members]
        return machine.computed(report, everyone)

    def report_newcomers(self, number: int, plan: bytes, members: Iterable[PeerId]) -> None:
        """The member hears the Reports of those of `members` who are none yet."""
        machine = self.machine(number)
        for peer in members:
            if peer not in machine.previous.members:
                identity = self.members[self.number(peer)].identity
                machine.take_report(peer, signed_report(identity, honest_report(machine.previous, plan)))

    def _decided(self, number: int, certificate: Certificate) -> None:
        member = self.members[number]
        self.ledger.decided(certificate)
        member.certificates[certificate.value.base] = certificate
        member.chain.append(certificate.value)
        self.ledger.follow(certificate.value)
        self.restart(number)

    # -- whole schedules ---------------------------------------------------------------------------------

    def settle(self, among: Collection[int] | None = None) -> None:
        """Deliver everything in the bag among these members, in order, until nothing more is said; drop the rest."""
        here = set(range(len(self.members)) if among is None else among)
        while self.bag:
            number, sender, message = self.bag.pop(0)
            if number in here and self.number(sender) in here:
                self.carry_out(number, self.deliver(number, sender, message))

    def hear(self, numbers: Collection[int], *kinds: type[Message]) -> None:
        """These members hear what lies in the bag of these kinds; the rest stays there."""
        bag, self.bag = self.bag, []
        for number, sender, message in bag:
            if number in numbers and isinstance(message, kinds):
                self.carry_out(number, self.deliver(number, sender, message))
            else:
                self.bag.append((number, sender, message))

    def propose(self, number: int, name: str, members: Iterable[PeerId] | None = None) -> Value:
        """The member computes the plan `name` and proposes what came out; returns the value."""
        machine = self.machine(number)
        leaves = machine.leaves
        staying = [peer for peer in (members or machine.previous.members) if peer not in leaves]
        value = value_of(machine.previous, plan_hash(name), machine.lead(machine.view), staying, leaves)
        self.carry_out(number, self.compute(number, value.plan))
        self.report_newcomers(number, value.plan, value.members)
        effects = machine.propose(value)
        self.carry_out(number, effects)
        (proposal,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Propose)]
        return proposal.value

    def move(self, number: int, view: int) -> None:
        """The member gives up on its view."""
        self.carry_out(number, self.machine(number).move_to(view))
