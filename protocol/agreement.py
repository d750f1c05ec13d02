"""Agreement on one value per round: prepare, then vote, over the fixed electorate of C(e-1), sans-IO.

Theory. Lead(e, v) alone proposes in view v, once. A member that accepts the proposal signs a *Prepare*; with a quorum
of Prepares of one view and value (the *prepare certificate*) it signs a *Vote*; a quorum of votes of one view decides.
Moving to view v is a promise, durable before it is announced, to sign nothing below v; it carries the mover's highest
prepare certificate. A lead of v > 0 shows the ViewChanges of one quorum (view_change.py). They compel the value of the
highest certificate among them, unchanged; only where there is none is the lead free. A value that may have been decided
has a quorum of certificates behind it, and two quorums share a member (certificate.py): so it is found and carried
forward, and no two values of a round are ever both certified. A certificate, not a member's word, is what binds.

A free proposal is compared with all that this member has heard: it signs none that leaves out, without leave or ban, a
member of B(e) whose matching Report it holds, and moves on with these Reports instead. A compelled one is judged by its
proofs and what this member computed alone. Leaves shrink all quorums alike; a leaver signs nothing else.

A rollback is a value like any other (terms.py says what it means). What a member computes itself for another value, it
holds for this one: the state that the swarm would go back to. And it wants to see that a quorum consented. So it does
where a result comes with an amendment (amending.py), of which it needs nothing more: the result it computed as ever.
For a result that bans somebody (bans.py) it needs the evidence besides, and fetches it.

What a member may do in its state, for view v of an incoming message and p = the view it promised:

    state      Propose(v >= p)        quorum of Prepares in p   move to v > p        leave           certificate
    OPEN       prepare, if accepted   vote, if it prepared      promise, announce    LEFT if unsigned   DECIDED
    LEFT       ignore                 ignore                    ignore               ignore          DECIDED
    ABSTAINING ignore                 ignore                    ignore               refused         DECIDED
    DECIDED    ignore                 ignore                    ignore               refused         ignore

Everything that binds the future is a `Persist` effect and stands before the message that depends on it; the caller must
have it on disk before it sends what follows. Source: docs/agreement.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shoal.protocol.accusations import make_room
from shoal.protocol.amending import InForce, check_amended, may_amend
from shoal.protocol.bans import NeedEvidence, check_bans, may_ban, named, unproven
from shoal.protocol.certificate import (
    check_certificate,
    follows,
    has_proofs,
    newcomers,
    verify_leave,
    verify_report,
    verify_step,
)
from shoal.protocol.durable import ABSTAIN
from shoal.protocol.durable import DurableRecord as DurableRecord
from shoal.protocol.durable import Persist as Persist
from shoal.protocol.enlisting import Outside, check_enlisted, enlisted_in
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    LEAVE_DOMAIN,
    MEMBER_LIMIT,
    PREPARE_DOMAIN,
    PROPOSE_DOMAIN,
    REPORT_DOMAIN,
    VIEW_LIMIT,
    VOTE_DOMAIN,
    Certificate,
    Leave,
    Message,
    Moves,
    Prepare,
    Prepared,
    PreparedValue,
    Propose,
    Report,
    Target,
    Value,
    ViewChange,
    Vote,
    report_preimage,
    step_preimage,
)
from shoal.protocol.seats import are_few, check_counted, may_count
from shoal.protocol.terms import is_consented
from shoal.protocol.view_change import check_change, check_proposed, highest_of, make_moves, sign_move
from shoal.protocol.voting import CONTRIBUTORS, Voting, is_quorum, lead_order

Signed = TypeVar("Signed", Prepare, Vote)

VIEWS_AHEAD_LIMIT = 256
"""Views further ahead than this are ignored: a bound on the tables, not on liveness (time-outs double)."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send to everyone in the swarm."""

    message: Message


@dataclass(frozen=True, slots=True)
class NeedFinals:
    """A value was proposed whose plan this node has not computed: fetch its finals, apply them, call `computed`."""

    value: Value


@dataclass(frozen=True, slots=True)
class NeedState:
    """A rollback was proposed to a state that this node has not shown to hold: get it, then call `holds`."""

    value: Value


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The lead proposed another digest than this node computed from the same plan: no vote; one of them must heal."""

    value: Value


@dataclass(frozen=True, slots=True)
class Decided:
    """The round's value is certified."""

    certificate: Certificate


AgreementEffect = Persist | Broadcast | NeedFinals | NeedState | NeedEvidence | Mismatch | Decided


class Standing(enum.Enum):
    """State of the machine."""

    OPEN = "open"
    LEFT = "left"
    ABSTAINING = "abstaining"
    """It may have signed what it no longer knows, so it signs nothing, and waits for the certificate."""
    DECIDED = "decided"


class Agreement:
    """One voter's part in deciding the round after `previous`. Who has no vote only listens for the certificate.

    voting: who has a vote, and how many votes decide. in_force: the settings of the round; without them no value may
    amend any. banned: who can be no member after it. leads_back: whether a rollback goes back to what was certified;
    left out, of none it is known that it does not. may_join: whether a peer is one whom the swarm lets in; left
    out, everybody is. seats: how many contributions may count. outside: who waits there, if anybody does. `reports`
    has by plan, for every peer, the Report of it that was heard and is signed.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        previous: Value,
        in_force: InForce | None = None,
        banned: Collection[PeerId] = (),
        leads_back: Callable[[Value], bool] | None = None,
        may_join: Callable[[PeerId], bool] | None = None,
        voting: Voting = CONTRIBUTORS,
        seats: int = MEMBER_LIMIT,
        outside: Outside | None = None,
    ) -> None:
        self._identity = identity
        self._me = identity.peer_id
        self.previous = previous
        self.voting = voting
        self.electorate = frozenset(voting.electorate(previous))
        everyone = voting.everyone(previous)
        self.everyone = everyone if outside is None else everyone & outside.admitted
        self._outside = outside
        self._in_force = in_force
        self._banned = frozenset(banned)
        self._leads_back = leads_back or _nothing_known
        self._may_join = may_join or _nothing_known
        self._seats = seats
        self._proven: dict[bytes, PeerId] = {}
        self.round = previous.next_round
        self.votes = self._me in self.electorate
        self._order = lead_order(previous, voting=voting)
        self.standing = Standing.OPEN
        self.view = 0
        self.leaves: set[PeerId] = set()
        self._leave_signatures: dict[PeerId, bytes] = {}
        self.certificate: Certificate | None = None
        self.reports: dict[bytes, dict[PeerId, Report]] = {}
        self._taking_part: dict[bytes, frozenset[PeerId]] = {}
        self._counted: dict[bytes, tuple[PeerId, ...]] = {}
        self._doubted: set[bytes] = set()
        self._highest: PreparedValue | None = None
        self._signed = False
        self._proposed: dict[int, Propose] = {}
        self._proposals: dict[int, Propose] = {}
        self._computed: dict[bytes, Report] = {}
        self._states: dict[Target, bytes] = {}
        self._values: dict[bytes, Value] = {}
        self._prepares: dict[tuple[int, bytes], dict[PeerId, bytes]] = {}
        self._votes: dict[tuple[int, bytes], dict[PeerId, bytes]] = {}
        self._my_prepares: dict[int, Prepare] = {}
        self._my_votes: dict[int, Vote] = {}
        self._changes: dict[int, dict[PeerId, ViewChange]] = {}
        self._freed: dict[int, Moves] = {}
        self._mismatched: set[int] = set()
        self._refused: dict[int, tuple[PeerId, ...]] = {}

    # -- what a restart brings back --------------------------------------------------------------------------

    def restore(self, records: Iterable[DurableRecord]) -> None:
        """Take up what this member bound itself to before a restart; records of other rounds are passed over."""
        for record in records:
            if record.round != self.round or record.term != self.previous.next_term:
                continue
            self.view = max(self.view, record.view)
            value, prepared = record.value, record.prepared
            if record.kind == "leave":
                self.standing = Standing.LEFT
                self._take_leave(self._me, self._leave_message())
            elif record.kind == ABSTAIN:
                self.standing = Standing.ABSTAINING
            elif record.kind == "promise":
                self._signed = True
                self._changes.setdefault(record.view, {})[self._me] = self._view_change(record.view)
            elif record.kind == "prepare" and value is not None:
                self._take_prepare(record.view, value)
            elif record.kind == "vote" and value is not None and not isinstance(prepared, msgspec.UnsetType):
                self._take_vote(value, prepared)
            elif record.kind == "propose" and value is not None:
                self._take_proposal(self._propose_message(record.view, value, record.moves, prepared))

    def resume(self) -> list[AgreementEffect]:
        """After `restore`, and from time to time: what was restored counts like what is heard, and what a proposal
        still lacks here is asked for."""
        effects = self._try_prepare()
        for view, value_hash in list(self._prepares):
            effects += self._try_vote(view, value_hash)
        for view, value_hash in list(self._votes):
            effects += self._tally(view, value_hash)
        return effects

    def _take_prepare(self, view: int, value: Value) -> Prepare:
        prepare = self._sign(Prepare, PREPARE_DOMAIN, view, value)
        self._my_prepares[view] = prepare
        self._prepares.setdefault((view, value.hash), {})[self._me] = prepare.signature
        return prepare

    def _take_vote(self, value: Value, prepared: Prepared) -> Vote:
        view = prepared.view
        vote = self._sign(Vote, VOTE_DOMAIN, view, value)
        self._my_votes[view] = vote
        if self._highest is None or view >= self._highest.prepared.view:
            self._highest = PreparedValue(value, prepared)
        self._votes.setdefault((view, value.hash), {})[self._me] = vote.signature
        return vote

    def _sign(self, kind: type[Signed], domain: bytes, view: int, value: Value) -> Signed:
        """Sign one of the two steps of a view for `value`."""
        self._signed = True
        self._values[value.hash] = value
        signature = self._identity.sign(domain, step_preimage(view, value.hash))
        return kind(
            term=value.term, round=value.round, base=value.base, view=view, value=value.hash, signature=signature
        )

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        """True if this node is the lead of the view it is in."""
        return self.votes and self.standing is Standing.OPEN and self.lead(self.view) == self._me

    def lead(self, view: int) -> PeerId:
        """Lead(e, v)."""
        return self._order[view % len(self._order)]

    @property
    def free_to_plan(self) -> bool:
        """True if this node may form a value of its own in the current view."""
        return self.leading and self.view not in self._proposed and (self.view == 0 or self.view in self._freed)

    @property
    def moves(self) -> Moves | msgspec.UnsetType:
        """Proof that the view was entered which this node leads; UNSET in the first one, which needs none."""
        return self._freed.get(self.view, msgspec.UNSET)

    @property
    def proposed(self) -> bool:
        """True if a proposal of the current view is known here."""
        return self.view in self._proposals

    @property
    def refuses(self) -> bool:
        """True if a proposal of this view or a later one is refused here, and the next view is wanted instead."""
        return max(self._refused, default=-1) >= self.view

    @property
    def abstains(self) -> bool:
        """True if this member signs nothing, for what it signed in this round may be lost."""
        return self.standing is Standing.ABSTAINING

    @property
    def is_prepared(self) -> bool:
        """True if a prepare certificate of this round is here: the next lead may have to propose its value again.

        Another's vote alone is no sign of it: who had the certificate may be gone, and a quorum have moved on without.
        """
        told = (change.prepared for row in self._changes.values() for change in row.values())
        return self._highest is not None or any(prepared is not None for prepared in told)

    def promised(self) -> dict[PeerId, int]:
        """Below which view each member signs no more, as far as it said so by a move, a prepare or a vote."""
        rows: list[tuple[int, Iterable[PeerId]]] = [*self._changes.items()]
        rows += [(view, row) for table in (self._prepares, self._votes) for (view, _), row in table.items()]
        promised: dict[PeerId, int] = {}
        for view, peers in sorted(rows, key=lambda one: one[0]):
            promised.update(dict.fromkeys(peers, view))
        return promised

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """True if these peers could decide the round, as far as the leaves heard here go."""
        return is_quorum(self.previous, peers, self.leaves, voting=self.voting)

    def current(self) -> list[Message]:
        """This node's standing messages, to be sent again to whoever may have missed them."""
        if self.certificate is not None:
            return [self.certificate]
        messages: list[Message] = []
        if self.standing is Standing.LEFT:
            return [self._leave_message()]
        change = self._changes.get(self.view, {}).get(self._me)
        if change is not None:
            messages.append(change)
        if self.view in self._proposed:
            messages.append(self._proposed[self.view])
        if self.view in self._my_prepares:
            messages.append(self._my_prepares[self.view])
        if self._my_votes:
            messages.append(self._my_votes[max(self._my_votes)])
        return messages

    # -- what this node decides ------------------------------------------------------------------------------

    def sign_report(self, report: Report) -> Report:
        """`report` with this node's signature, which shows to everyone that it holds this result."""
        preimage = report_preimage(report.base, report.plan, report.digest, report.bitmaps, report.tokens)
        return msgspec.structs.replace(report, signature=self._identity.sign(REPORT_DOMAIN, preimage))

    def computed(
        self, report: Report, participants: Iterable[PeerId] = (), counted: Iterable[PeerId] = ()
    ) -> list[AgreementEffect]:
        """This node holds the finals of a plan and computed the digest they lead to; it may now sign for it.

        participants: of the plan; of others than these, members and voters, none can become a member by it. counted:
        those whose contribution is in at least one chunk.
        """
        self._computed[report.plan] = report
        self._counted[report.plan] = tuple(sorted(counted))
        self._taking_part[report.plan] = frozenset(participants)
        self.reports.setdefault(report.plan, {})[self._me] = self.sign_report(report)
        return self._try_prepare()

    def counted_by(self, plan: bytes) -> tuple[PeerId, ...] | msgspec.UnsetType:
        """Those that a value says this plan counted, by what was computed here; UNSET where seats are for all."""
        return self._counted[plan] if are_few(self._seats) else msgspec.UNSET

    def counts_nobody(self, plan: bytes) -> bool:
        """True if seats are few, and nothing of those who had them came of this plan: no value can be about that."""
        return are_few(self._seats) and self._counted.get(plan) == ()

    def doubt(self, plan: bytes) -> None:
        """Refuse free proposals of what came of a plan that counts others than it should, in the first views."""
        self._doubted.add(plan)

    def doubts(self, plan: bytes) -> bool:
        """True if what came of that plan is refused in this view."""
        return self._is_doubted(plan, self.view)

    def _is_doubted(self, plan: bytes, view: int) -> bool:
        return plan in self._doubted and self._is_early(view)

    def _is_early(self, view: int) -> bool:
        """True for as many views as a minority can lead, and one."""
        return view <= (len(self.electorate) - 1) // 2

    def holds(self, target: Target, digest: bytes) -> list[AgreementEffect]:
        """This node has the state of `target` on disk, with this digest; it may now sign for going back to it."""
        self._states[target] = digest
        return self._try_prepare()

    def proven(self, evidence: bytes, accused: PeerId) -> list[AgreementEffect]:
        """This node holds evidence of that digest, and verified it; it may now sign for a ban on it."""
        self._proven[evidence] = accused
        return self._try_prepare()

    def digest_of(self, target: Target) -> bytes | None:
        """The digest of the state of `target`, if this node said that it holds it."""
        return self._states.get(target)

    def propose(self, value: Value) -> list[AgreementEffect]:
        """Propose a value of this node's own, to which the proofs of its names are added.

        Raises LocalError where it may not.
        """
        if not self.free_to_plan:
            raise LocalError(f"view {self.view} of round {self.round} is not this node's to fill")
        value = self._with_proofs(value)
        if not self._may_be(value):
            raise LocalError(f"the value does not follow round {self.previous.round}")
        return self._propose(value, self.moves)

    def _with_proofs(self, value: Value) -> Value:
        """`value` with the signature of each leave and of each new member, as far as they were heard."""
        reports, new = self.reports.get(value.plan, {}), newcomers(value, self.previous)
        leaves = tuple(self._leave_signatures.get(peer, b"") for peer in value.leaves)
        joined = tuple(reports[peer].signature if peer in reports else b"" for peer in new)
        return msgspec.structs.replace(
            value, leave_signatures=leaves or msgspec.UNSET, report_signatures=joined or msgspec.UNSET
        )

    def _take_proposal(self, proposal: Propose) -> None:
        self._proposed[proposal.view] = self._proposals[proposal.view] = proposal
        self._values[proposal.value.hash] = proposal.value

    def _propose(
        self,
        value: Value,
        moves: Moves | msgspec.UnsetType,
        prepared: Prepared | msgspec.UnsetType = msgspec.UNSET,
    ) -> list[AgreementEffect]:
        proposal = self._propose_message(self.view, value, moves, prepared)
        self._take_proposal(proposal)
        return [
            Persist(self._record("propose", self.view, value, moves=moves, prepared=prepared)),
            Broadcast(proposal),
            *self._try_prepare(),
        ]

    def move_to(self, view: int) -> list[AgreementEffect]:
        """Promise to sign nothing below `view`, and say so."""
        if not self.votes or self.standing is not Standing.OPEN or not self.view < view < VIEW_LIMIT:
            return []
        change = self._view_change(view)
        self.view = view
        self._signed = True
        self._changes.setdefault(view, {})[self._me] = change
        return [
            Persist(self._record("promise", view)),
            Broadcast(change),
            *self._try_lead(),
            *self._try_prepare(),
        ]

    def leave(self) -> list[AgreementEffect]:
        """Promise to sign nothing in this round and after it, if nothing was signed in it yet.

        Returns no effect when it is too late: the node then stays for this round and leaves in the next.
        """
        may_leave = self._me in self.voting.may_leave(self.previous)
        if self.standing is not Standing.OPEN or self._signed or not may_leave:
            return []
        self.standing = Standing.LEFT
        message = self._leave_message()
        self._take_leave(self._me, message)
        return [Persist(self._record("leave", 0)), Broadcast(message)]

    # -- what others say -------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        """Take one agreement message from `sender`, whose envelope has been checked.

        Raises RemoteError when the message breaks the protocol.
        """
        if self.standing is Standing.DECIDED or (sender not in self.electorate and type(message) is not Certificate):
            return []
        step = STEPS.get(type(message))
        if step is None:
            raise LocalError(f"{type(message).__name__} is no agreement message")
        return step(self, sender, message)

    def take_report(self, sender: PeerId, report: Report) -> None:
        """`sender` holds the finals of a plan. Raises RemoteError if it did not sign that."""
        if not verify_report(sender, report):
            raise RemoteError("a report whose signature does not hold", peer=sender)
        make_room(self.reports, report.plan, sender)
        self.reports.setdefault(report.plan, {})[sender] = report

    def _receive_propose(self, sender: PeerId, message: Propose) -> list[AgreementEffect]:
        view, value = message.view, message.value
        if sender != self.lead(view):
            raise RemoteError(f"proposed in view {view}, which another leads", peer=sender)
        if not verify_step(PROPOSE_DOMAIN, sender, view, value.hash, message.signature):
            raise RemoteError("a proposal whose signature does not hold", peer=sender)
        self._check_proposed(sender, value)
        if not self._in_reach(view):
            return []
        known = self._proposals.get(view, message)
        if known.value.hash != value.hash:
            raise RemoteError(f"two values in view {view}", peer=sender)
        is_compelled = check_proposed(
            sender, view, value, message.moves, message.prepared, self.previous, voting=self.voting
        )
        if not is_compelled and value.planner != sender:
            raise RemoteError("proposed a result as that of another planner", peer=sender)
        self._proposals[view] = known
        self._values[value.hash] = value
        effects = self._try_prepare()
        return [*effects, *self._try_vote(view, value.hash), *self._tally(view, value.hash)]

    def _check_proposed(self, sender: PeerId, value: Value) -> None:
        if not follows(value, self.previous, voting=self.voting):
            raise RemoteError("proposed a value that does not follow the last certificate", peer=sender)
        if not has_proofs(value, self.previous, voting=self.voting):
            raise RemoteError("proposed leaves or members without their proofs, or no quorum of members", peer=sender)
        if not self._may_go_back(value):
            raise RemoteError("proposed a rollback to nowhere, or without the consent of a quorum", peer=sender)
        if not may_amend(value, self.previous, self._in_force, voting=self.voting):
            raise RemoteError("proposed an amendment that no quorum consented to, or that cannot be", peer=sender)
        if not may_ban(value, self._banned):
            raise RemoteError("proposed bans that cannot be, or a banned member", peer=sender)
        check_enlisted(value, self._may_enlist)
        if not may_count(value, self._seats):
            raise RemoteError(
                "proposed a result that does not say whom it counted, or more than the seats", peer=sender
            )

    def _receive_prepare(self, sender: PeerId, message: Prepare) -> list[AgreementEffect]:
        if self._take_step(PREPARE_DOMAIN, self._prepares, sender, message):
            return self._try_vote(message.view, message.value)
        return []

    def _receive_vote(self, sender: PeerId, message: Vote) -> list[AgreementEffect]:
        if self._take_step(VOTE_DOMAIN, self._votes, sender, message):
            return self._tally(message.view, message.value)
        return []

    def _take_step(
        self,
        domain: bytes,
        steps: dict[tuple[int, bytes], dict[PeerId, bytes]],
        sender: PeerId,
        message: Prepare | Vote,
    ) -> bool:
        """Note a Prepare or a Vote; whether it counts."""
        if message.view > self.view + VIEWS_AHEAD_LIMIT or sender in self.leaves:
            return False
        if not verify_step(domain, sender, message.view, message.value, message.signature):
            raise RemoteError(f"a {type(message).__name__.lower()} whose signature does not hold", peer=sender)
        for (view, value_hash), row in steps.items():
            if view == message.view and value_hash != message.value and sender in row:
                raise RemoteError(f"two {type(message).__name__.lower()}s in view {view}", peer=sender)
        steps.setdefault((message.view, message.value), {})[sender] = message.signature
        return True

    def _receive_change(self, sender: PeerId, message: ViewChange) -> list[AgreementEffect]:
        if not 0 < message.view <= self.view + VIEWS_AHEAD_LIMIT or sender in self.leaves:
            return []
        if sender not in self._changes.get(message.view, {}):
            check_change(sender, message, self.previous, voting=self.voting)
            if message.prepared is not None:
                self._check_proposed(sender, message.prepared.value)
                self._values[message.prepared.value.hash] = message.prepared.value
            self._changes.setdefault(message.view, {})[sender] = message
        return [*self._try_follow(), *self._try_lead()]

    def _receive_leave(self, sender: PeerId, message: Leave) -> list[AgreementEffect]:
        if sender in self.leaves:
            return self._try_lead()
        if not verify_leave(sender, self.previous.hash, message.signature):
            raise RemoteError("a leave whose signature does not hold", peer=sender)
        if sender in self.promised() or sender not in self.voting.may_leave(self.previous):
            raise RemoteError("leaves a round in which it signed, or of which it stays a voter", peer=sender)
        self._take_leave(sender, message)
        return self._try_lead()

    def _take_leave(self, peer: PeerId, message: Leave) -> None:
        self.leaves.add(peer)
        self._leave_signatures[peer] = message.signature

    def _receive_certificate(self, _: PeerId, certificate: Certificate) -> list[AgreementEffect]:
        if (certificate.value.term, certificate.value.round) != (self.previous.next_term, self.round):
            return []
        check_certificate(certificate, self.previous, voting=self.voting)
        if not self._may_go_back(certificate.value):
            raise RemoteError("a certificate of a rollback to nowhere, or without the consent of a quorum")
        check_amended(certificate.value, self.previous, self._in_force, voting=self.voting)
        check_bans(certificate.value, self._banned)
        check_counted(certificate.value, self._seats)
        check_enlisted(certificate.value, self._may_enlist)
        return self._decide(certificate)

    def _may_enlist(self, peer: PeerId, since: bytes) -> bool:
        return self._outside is not None and self._outside.may_enlist(peer, since)

    def _may_go_back(self, value: Value) -> bool:
        """Check that a rollback is to what was certified, and a quorum consented. Other values need neither."""
        return is_consented(value, self.previous, voting=self.voting) and (
            not value.rollback or self._leads_back(value)
        )

    def _may_be(self, value: Value) -> bool:
        """True if `value` can be decided in this round, as far as can be told from the value alone."""
        try:
            self._check_proposed(self._me, value)
        except RemoteError:
            return False
        return True

    def _in_reach(self, view: int) -> bool:
        return self.view <= view <= self.view + VIEWS_AHEAD_LIMIT

    # -- rules -----------------------------------------------------------------------------------------------

    def _try_prepare(self) -> list[AgreementEffect]:
        """Accept the newest proposal that this member has promised nothing against, once it computed the same."""
        if not self.votes or self.standing is not Standing.OPEN:
            return []
        open_views = [v for v in self._proposals if v >= self.view and v not in self._my_prepares]
        if not open_views:
            return []
        view = max(open_views)
        proposal = self._proposals[view]
        lacking = self._lacking(view, proposal.value)
        if lacking is not None:
            return lacking
        if isinstance(proposal.prepared, msgspec.UnsetType) and self._refuse(view, proposal.value):
            return []
        self.view = max(self.view, view)
        prepare = self._take_prepare(view, proposal.value)
        return [
            Persist(self._record("prepare", view, proposal.value)),
            Broadcast(prepare),
            *self._try_vote(view, proposal.value.hash),
        ]

    def _lacking(self, view: int, value: Value) -> list[AgreementEffect] | None:
        """Return what is to be done before this member can sign for `value`; None if it can."""
        report = None
        if unproven(value, self._proven):
            return [NeedEvidence(value)]
        if value.rollback:
            digest = self._states.get(value.rollback.target)
            if digest is None:
                return [NeedState(value)]
            same = digest == value.digest
        else:
            report = self._computed.get(value.plan)
            if report is None:
                return [NeedFinals(value)]
            same = _matches(report, value) and value.counted == self.counted_by(value.plan)
        if same:
            return None
        # Not an exception: one would take along the promise or proposal that led here, unwritten.
        told = view in self._mismatched
        self._mismatched.add(view)
        return [] if told else [Mismatch(value)]

    def _refuse(self, view: int, value: Value) -> bool:
        """Refuse a free proposal whose members are not who they have to be, as far as was heard here, or whose plan
        counts too little, or that forgets who waits outside, or names there who is not admitted. The latter three hold
        for as many views as a minority can lead, and one: links may be such that no lead hears enough."""
        if value.rollback:
            return False
        excused = {*value.members, *value.leaves, *(ban.peer for ban in named(value)), *self._banned}
        reported = (peer for peer, one in self.reports.get(value.plan, {}).items() if _matches(one, value))
        full = len(value.members) == MEMBER_LIMIT
        left_out = sorted(peer for peer in reported if peer in self.everyone and peer not in excused and not full)
        possible = self._taking_part.get(value.plan, frozenset()) | self.electorate
        strangers = [p for p in newcomers(value, self.previous) if p not in possible or not self._may_join(p)]
        forgets = self._outside is not None and bool(self._outside.forgotten(value))
        makes_up = any(not self._may_join(one.peer) for one in enlisted_in(value))
        doubted = self._is_doubted(value.plan, view) or ((forgets or makes_up) and self._is_early(view))
        if left_out or strangers or doubted:
            self._refused[view] = tuple(left_out)
        return view in self._refused

    def _try_vote(self, view: int, value_hash: bytes) -> list[AgreementEffect]:
        """Vote for what this member prepared in its view, once a quorum did."""
        value, mine = self._values.get(value_hash), self._my_prepares.get(view)
        if value is None or mine is None or mine.value != value_hash or view != self.view or view in self._my_votes:
            return []
        if self.standing is not Standing.OPEN:
            return []
        prepared = self._certified(self._prepares, view, value)
        if prepared is None:
            return []
        vote = self._take_vote(value, prepared)
        return [
            Persist(self._record("vote", view, value, prepared=prepared)),
            Broadcast(vote),
            *self._tally(view, value_hash),
        ]

    def _certified(
        self, steps: dict[tuple[int, bytes], dict[PeerId, bytes]], view: int, value: Value
    ) -> Prepared | None:
        """The Prepares, or the votes, of a view for a value, if they are a quorum."""
        row = steps.get((view, value.hash), {})
        signers = sorted(peer for peer in row if peer not in value.leaves)
        if not is_quorum(self.previous, signers, value.leaves, voting=self.voting):
            return None
        return Prepared(view, tuple(signers), tuple(row[peer] for peer in signers))

    def _try_follow(self) -> list[AgreementEffect]:
        """Move to the highest view which others that are a quorum without this node have reached.

        Fewer take nobody along: one of three who says that it moved would lead the two others from view to view. Whose
        own view can decide nothing any more goes on by itself (following.py).
        """
        ahead = sorted((v for v in self._changes if v > self.view), reverse=True)
        for view in ahead:
            movers = {p for v in ahead if v >= view for p in self._changes[v]}
            if self.is_quorum(movers - {self._me}):
                return self.move_to(view)
        return []

    def _try_lead(self) -> list[AgreementEffect]:
        """As lead of this view with a quorum in it: carry the highest certificate forward, or be free to plan.

        Who is free carries one forward that it hears of before it has proposed: where all were restarted and lost their
        contributions, nobody makes another while that value may be decided.
        """
        changes = {p: c for p, c in self._changes.get(self.view, {}).items() if p not in self.leaves}
        if not self.leading or self.view == 0 or self.view in self._proposed or not self.is_quorum(changes):
            return []
        moves, highest = make_moves(changes, self._leave_signatures), highest_of(changes.values())
        if highest is not None:
            return self._propose(highest.value, moves, highest.prepared)
        self._freed.setdefault(self.view, moves)
        return []

    def _tally(self, view: int, value_hash: bytes) -> list[AgreementEffect]:
        """Form the certificate when the votes of one view for one value are a quorum."""
        value = self._values.get(value_hash)
        if value is None or self.standing is Standing.DECIDED:
            return []
        votes = self._certified(self._votes, view, value)
        if votes is None:
            return []
        return self._decide(Certificate(value=value, view=view, signers=votes.signers, signatures=votes.signatures))

    def _decide(self, certificate: Certificate) -> list[AgreementEffect]:
        self.standing = Standing.DECIDED
        self.certificate = certificate
        return [Decided(certificate)]

    # -- messages and records of this node -------------------------------------------------------------------

    def _record(
        self,
        kind: str,
        view: int,
        value: Value | None = None,
        *,
        moves: Moves | msgspec.UnsetType = msgspec.UNSET,
        prepared: Prepared | msgspec.UnsetType = msgspec.UNSET,
    ) -> DurableRecord:
        return DurableRecord(
            kind=kind,
            term=self.previous.next_term,
            round=self.round,
            view=view,
            value=value,
            moves=moves,
            prepared=prepared,
        )

    def _propose_message(
        self,
        view: int,
        value: Value,
        moves: Moves | msgspec.UnsetType,
        prepared: Prepared | msgspec.UnsetType,
    ) -> Propose:
        return Propose(
            term=value.term,
            round=self.round,
            base=value.base,
            view=view,
            value=value,
            signature=self._identity.sign(PROPOSE_DOMAIN, step_preimage(view, value.hash)),
            moves=moves,
            prepared=prepared,
        )

    def _view_change(self, view: int) -> ViewChange:
        report = next(reversed(self._computed.values()), None)
        heard = {} if report is None else self.reports.get(report.plan, {})
        named = {peer for peers in self._refused.values() for peer in peers if peer != self._me}
        left_out = sorted(peer for peer in named if peer in heard and _same(heard[peer], report))
        return ViewChange(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            view=view,
            prepared=self._highest,
            signature=sign_move(self._identity, self.previous.hash, view, self._highest),
            report=None if report is None else heard[self._me],
            left_out=tuple(left_out),
            left_out_signatures=tuple(heard[peer].signature for peer in left_out),
        )

    def _leave_message(self) -> Leave:
        return Leave(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            signature=self._identity.sign(LEAVE_DOMAIN, self.previous.hash),
        )


def _nothing_known(about: object) -> bool:
    """Nothing is known against it."""
    return True


def _matches(report: Report, value: Value) -> bool:
    """True if the sender of this report computed the result that `value` names."""
    result = (report.plan, report.digest, report.bitmaps, report.tokens)
    return result == (value.plan, value.digest, value.bitmaps, value.tokens)


def _same(one: Report, other: Report | None) -> bool:
    return other is not None and msgspec.structs.replace(one, signature=other.signature) == other


Step = Callable[[Agreement, PeerId, Any], list[AgreementEffect]]

STEPS: Mapping[type[Message], Step] = {
    Propose: lambda agreement, sender, message: agreement._receive_propose(sender, message),
    Prepare: lambda agreement, sender, message: agreement._receive_prepare(sender, message),
    Vote: lambda agreement, sender, message: agreement._receive_vote(sender, message),
    ViewChange: lambda agreement, sender, message: agreement._receive_change(sender, message),
    Leave: lambda agreement, sender, message: agreement._receive_leave(sender, message),
    Certificate: lambda agreement, sender, message: agreement._receive_certificate(sender, message),
}
"""Handler of each message while nothing is decided: a certificate from whomever, all else from voters."""
