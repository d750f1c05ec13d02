"""Agreement on one value per round: single-decree Paxos over the fixed electorate of C(e-1), sans-IO.

Theory. A *view* is a ballot. Lead(e, v) alone proposes in view v, at most once. A member votes in v only if it has not
promised a higher view, and only for a value whose digest it computed itself. Moving to view v is a promise, durable
before it is announced, never to vote below v; it carries the member's highest vote. A lead of v > 0 proposes only after
a quorum moved to v, and then the value of the highest vote among them, unchanged, if there is one. Two quorums share a
member (certificate.is_quorum), so a value that may have been decided in a lower view is found and carried forward:
no two values of a round are ever both certified. Leaves shrink both kinds of quorum alike, and a leaver signs neither.

A rollback is a value like any other (terms.py says what it means). What a member computes itself for another value, it
holds for this one: the state that the swarm would go back to. And it wants to see that a quorum consented. So it does
where a result comes with an amendment (amending.py), of which it needs nothing more: the result it computed as ever.
For a result that bans somebody (bans.py) it needs the evidence besides, and fetches it.

What a member may do in its state, for view v of an incoming message and p = the view it promised:

    state      Propose(v ≥ p)       move to v > p        leave           certificate
    OPEN       vote, if computed    promise, announce    LEFT if unsigned   DECIDED
    LEFT       ignore               ignore               ignore          DECIDED
    ABSTAINING ignore               ignore               refused         DECIDED
    DECIDED    ignore               ignore               refused         ignore

Everything that binds the future is a `Persist` effect and stands before the message that depends on it; the caller must
have it on disk before it sends what follows.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shoal.protocol.amending import InForce, check_amended, may_amend
from shoal.protocol.bans import NeedEvidence, check_bans, may_ban, unproven
from shoal.protocol.certificate import check_certificate, follows, is_quorum, lead_order, verify_vote
from shoal.protocol.durable import ABSTAIN
from shoal.protocol.durable import DurableRecord as DurableRecord
from shoal.protocol.durable import Persist as Persist
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    VIEW_LIMIT,
    VOTE_DOMAIN,
    CastVote,
    Certificate,
    Leave,
    Message,
    Propose,
    Report,
    Target,
    Value,
    ViewChange,
    Vote,
    vote_preimage,
)
from shoal.protocol.terms import is_consented

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
    """The lead proposed another digest than this node computed from the same plan: no vote; one of them must heal.

    `report` is None for a rollback to a state that has another digest here.
    """

    value: Value
    report: Report | None


@dataclass(frozen=True, slots=True)
class FreeToPlan:
    """This node leads `view` and nothing binds it: it may plan. `reports` are finals that voters of the view hold."""

    view: int
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The round's value is certified."""

    certificate: Certificate


AgreementEffect = Persist | Broadcast | NeedFinals | NeedState | NeedEvidence | Mismatch | FreeToPlan | Decided


class Standing(enum.Enum):
    """State of the machine."""

    OPEN = "open"
    LEFT = "left"
    ABSTAINING = "abstaining"
    """It may have signed what it no longer knows, so it signs nothing, and waits for the certificate."""
    DECIDED = "decided"


class Agreement:
    """One member's part in deciding the round after `previous`. A non-member only listens for the certificate.

    in_force: the settings of the round; without them no value may amend any. banned: who can be no member after it.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        previous: Value,
        in_force: InForce | None = None,
        banned: Collection[PeerId] = (),
    ) -> None:
        self._identity = identity
        self._me = identity.peer_id
        self.previous = previous
        self._in_force = in_force
        self._banned = frozenset(banned)
        self._proven: dict[bytes, PeerId] = {}
        self.round = previous.next_round
        self.member = self._me in previous.members
        self._order = lead_order(previous)
        self.standing = Standing.OPEN
        self.view = 0
        self.leaves: set[PeerId] = set()
        self.certificate: Certificate | None = None
        self._highest: CastVote | None = None
        self._signed = False
        self._proposed: dict[int, Value] = {}
        self._proposals: dict[int, Value] = {}
        self._computed: dict[bytes, Report] = {}
        self._states: dict[bytes, bytes] = {}
        self._values: dict[bytes, Value] = {}
        self._votes: dict[tuple[int, bytes], dict[PeerId, bytes]] = {}
        self._my_votes: dict[int, Vote] = {}
        self._changes: dict[int, dict[PeerId, ViewChange]] = {}
        self._freed: set[int] = set()
        self._mismatched: set[int] = set()

    # -- what a restart brings back --------------------------------------------------------------------------

    def restore(self, records: Iterable[DurableRecord]) -> None:
        """Take up what this member bound itself to before a restart; records of other rounds are passed over."""
        for record in records:
            if record.round != self.round or record.term != self.previous.next_term:
                continue
            self.view = max(self.view, record.view)
            if record.kind == "leave":
                self.standing = Standing.LEFT
                self.leaves.add(self._me)
            elif record.kind == ABSTAIN:
                self.standing = Standing.ABSTAINING
            elif record.kind == "promise":
                self._signed = True
                self._changes.setdefault(record.view, {})[self._me] = self._view_change()
            elif record.kind == "vote" and record.value is not None:
                self._take_vote(record.view, record.value)
            elif record.kind == "propose" and record.value is not None:
                self._take_proposal(record.view, record.value)

    def resume(self) -> list[AgreementEffect]:
        """After `restore`, and from time to time: the votes may be enough; a proposal may want this member's own."""
        return [*(effect for vote in list(self._votes) for effect in self._tally(*vote)), *self._try_vote()]

    def _take_vote(self, view: int, value: Value) -> Vote:
        value_hash = value.hash
        signature = self._identity.sign(VOTE_DOMAIN, vote_preimage(view, value_hash))
        vote = Vote(
            term=value.term,
            round=value.round,
            base=value.base,
            view=view,
            value=value_hash,
            signature=signature,
        )
        self._signed = True
        self._values[value_hash] = value
        self._my_votes[view] = vote
        if self._highest is None or view >= self._highest.view:
            self._highest = CastVote(view, value)
        self._votes.setdefault((view, value_hash), {})[self._me] = signature
        return vote

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        """Whether this node is the lead of the view it is in."""
        return self.member and self.standing is Standing.OPEN and self.lead(self.view) == self._me

    def lead(self, view: int) -> PeerId:
        """Lead(e, v)."""
        return self._order[view % len(self._order)]

    @property
    def free_to_plan(self) -> bool:
        """Whether this node may form a value of its own in the current view."""
        return self.leading and self.view not in self._proposed and (self.view == 0 or self.view in self._freed)

    @property
    def proposed(self) -> bool:
        """Whether a proposal of the current view is known here."""
        return self.view in self._proposals

    @property
    def abstains(self) -> bool:
        """Whether this member signs nothing, for what it signed in this round may be lost."""
        return self.standing is Standing.ABSTAINING

    @property
    def something_binds(self) -> bool:
        """Whether a value was proposed or voted for in this round, by anybody, as far as is known here; or may be."""
        return bool(self._values or self._votes) or self.abstains

    def promised(self) -> dict[PeerId, int]:
        """Below which view each member votes no more, as far as it said so by a move or a vote."""
        voted = [(view, peer) for (view, _), row in self._votes.items() for peer in row]
        moved = [(view, peer) for view, row in self._changes.items() for peer in row]
        return {peer: view for view, peer in sorted(voted + moved)}

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
            messages.append(self._propose_message(self.view))
        if self._my_votes:
            messages.append(self._my_votes[max(self._my_votes)])
        return messages

    # -- what this node decides ------------------------------------------------------------------------------

    def computed(self, report: Report) -> list[AgreementEffect]:
        """This node holds the finals of a plan and computed the digest they lead to; it may now vote for it."""
        self._computed[report.plan] = report
        return self._try_vote()

    def holds(self, target: Target, digest: bytes) -> list[AgreementEffect]:
        """This node has the state of `target` on disk, with this digest; it may now vote for going back to it."""
        self._states[target.certificate] = digest
        return self._try_vote()

    def proven(self, evidence: bytes, accused: PeerId) -> list[AgreementEffect]:
        """This node holds evidence of that digest, and verified it; it may now vote for a ban on it."""
        self._proven[evidence] = accused
        return self._try_vote()

    def digest_of(self, target: Target) -> bytes | None:
        """The digest of the state of `target`, if this node said that it holds it."""
        return self._states.get(target.certificate)

    def propose(self, value: Value) -> list[AgreementEffect]:
        """Propose a value of this node's own. Raises LocalError where it may not."""
        if not self.free_to_plan:
            raise LocalError(f"view {self.view} of round {self.round} is not this node's to fill")
        if not self._may_be(value):
            raise LocalError(f"the value does not follow round {self.previous.round}")
        return self._propose(value)

    def _take_proposal(self, view: int, value: Value) -> None:
        self._proposed[view] = value
        self._proposals[view] = value
        self._values[value.hash] = value

    def _propose(self, value: Value) -> list[AgreementEffect]:
        self._take_proposal(self.view, value)
        return [
            Persist(self._record("propose", self.view, value)),
            Broadcast(self._propose_message(self.view)),
            *self._try_vote(),
        ]

    def move_to(self, view: int) -> list[AgreementEffect]:
        """Promise never to vote below `view`, and say so."""
        if not self.member or self.standing is not Standing.OPEN or not self.view < view < VIEW_LIMIT:
            return []
        self.view = view
        self._signed = True
        change = self._view_change()
        self._changes.setdefault(view, {})[self._me] = change
        return [
            Persist(self._record("promise", view)),
            Broadcast(change),
            *self._try_lead(),
            *self._try_vote(),
        ]

    def leave(self) -> list[AgreementEffect]:
        """Promise to sign nothing in this round and after it, if nothing was signed in it yet.

        Returns no effect when it is too late: the node then stays for this round and leaves in the next.
        """
        if self.standing is not Standing.OPEN or self._signed:
            return []
        self.standing = Standing.LEFT
        self.leaves.add(self._me)
        return [Persist(self._record("leave", 0)), Broadcast(self._leave_message())]

    # -- what others say -------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message) -> list[AgreementEffect]:
        """Take one agreement message from `sender`, whose signature on it has been checked.

        Raises RemoteError when the message breaks the protocol.
        """
        if self.standing is Standing.DECIDED:
            return []
        if isinstance(message, Certificate):
            return self._receive_certificate(message)
        if sender not in self.previous.members:
            return []
        if isinstance(message, Propose):
            return self._receive_propose(sender, message)
        if isinstance(message, Vote):
            return self._receive_vote(sender, message)
        if isinstance(message, ViewChange):
            return self._receive_change(sender, message)
        if isinstance(message, Leave):
            if message.round == self.round:
                self.leaves.add(sender)
            return self._try_lead()
        raise LocalError(f"{type(message).__name__} is no agreement message")

    def _receive_propose(self, sender: PeerId, message: Propose) -> list[AgreementEffect]:
        if sender != self.lead(message.view):
            raise RemoteError(f"proposed in view {message.view}, which another leads", peer=sender)
        if not follows(message.value, self.previous):
            raise RemoteError("proposed a value that does not follow the last certificate", peer=sender)
        if not is_consented(message.value, self.previous):
            raise RemoteError("proposed a rollback without the consent of a quorum", peer=sender)
        if not may_amend(message.value, self.previous, self._in_force):
            raise RemoteError("proposed an amendment that no quorum consented to, or that cannot be", peer=sender)
        if not may_ban(message.value, self._banned):
            raise RemoteError("proposed bans that cannot be, or a banned member", peer=sender)
        if message.view < self.view or message.view > self.view + VIEWS_AHEAD_LIMIT:
            return []
        known = self._proposals.setdefault(message.view, message.value)
        if known.hash != message.value.hash:
            raise RemoteError(f"two values in view {message.view}", peer=sender)
        value_hash = message.value.hash
        self._values[value_hash] = message.value
        return [*self._tally(message.view, value_hash), *self._try_vote()]

    def _receive_vote(self, sender: PeerId, message: Vote) -> list[AgreementEffect]:
        if message.view > self.view + VIEWS_AHEAD_LIMIT:
            return []
        if not verify_vote(sender, message.view, message.value, message.signature):
            raise RemoteError("a vote whose signature does not hold", peer=sender)
        for (view, value_hash), votes in self._votes.items():
            if view == message.view and value_hash != message.value and sender in votes:
                raise RemoteError(f"two votes in view {view}", peer=sender)
        self._votes.setdefault((message.view, message.value), {})[sender] = message.signature
        return self._tally(message.view, message.value)

    def _receive_change(self, sender: PeerId, message: ViewChange) -> list[AgreementEffect]:
        if not 0 < message.view <= self.view + VIEWS_AHEAD_LIMIT:
            return []
        if sender in self._changes.get(message.view, {}):
            return [*self._try_follow(), *self._try_lead()]
        if message.highest is not None:
            value = message.highest.value
            if message.highest.view >= message.view or not self._may_be(value):
                raise RemoteError("a view change with an impossible vote", peer=sender)
            self._values[value.hash] = value
        self._changes.setdefault(message.view, {}).setdefault(sender, message)
        return [*self._try_follow(), *self._try_lead()]

    def _receive_certificate(self, certificate: Certificate) -> list[AgreementEffect]:
        if (certificate.value.term, certificate.value.round) != (self.previous.next_term, self.round):
            return []
        check_certificate(certificate, self.previous)
        check_amended(certificate.value, self.previous, self._in_force)
        check_bans(certificate.value, self._banned)
        return self._decide(certificate)

    def _may_be(self, value: Value) -> bool:
        """Whether `value` can be decided in this round, as far as it tells itself."""
        return (
            follows(value, self.previous)
            and is_consented(value, self.previous)
            and may_amend(value, self.previous, self._in_force)
            and may_ban(value, self._banned)
        )

    # -- rules -----------------------------------------------------------------------------------------------

    def _try_vote(self) -> list[AgreementEffect]:
        """Vote on the newest proposal this member has promised nothing against, once it computed the same."""
        if not self.member or self.standing is not Standing.OPEN:
            return []
        open_views = [v for v in self._proposals if v >= self.view and v not in self._my_votes]
        if not open_views:
            return []
        view = max(open_views)
        value = self._proposals[view]
        lacking = self._lacking(view, value)
        if lacking is not None:
            return lacking
        self.view = max(self.view, view)
        vote = self._take_vote(view, value)
        return [
            Persist(self._record("vote", view, value)),
            Broadcast(vote),
            *self._tally(view, value.hash),
        ]

    def _lacking(self, view: int, value: Value) -> list[AgreementEffect] | None:
        """What is to be done before this member can vote for `value`; None if it can."""
        report = None
        if unproven(value, self._proven):
            return [NeedEvidence(value)]
        if value.rollback:
            digest = self._states.get(value.rollback.target.certificate)
            if digest is None:
                return [NeedState(value)]
            same = digest == value.digest
        else:
            report = self._computed.get(value.plan)
            if report is None:
                return [NeedFinals(value)]
            same = (report.digest, report.bitmaps) == (value.digest, value.bitmaps)
        if same:
            return None
        # Not an exception: one would take along the promise or proposal that led here, unwritten.
        told = view in self._mismatched
        self._mismatched.add(view)
        return [] if told else [Mismatch(value, report)]

    def _try_follow(self) -> list[AgreementEffect]:
        """Move to the highest view for which those at or above it would, with this node, make a quorum."""
        for view in sorted((v for v in self._changes if v > self.view), reverse=True):
            movers = {p for v, changes in self._changes.items() if v >= view for p in changes}
            if is_quorum(self.previous, movers | {self._me}, self.leaves):
                return self.move_to(view)
        return []

    def _try_lead(self) -> list[AgreementEffect]:
        """As lead of this view with a quorum in it: carry the highest vote forward, or be free to plan."""
        changes = self._changes.get(self.view, {})
        if not self.leading or self.view == 0 or self.view in self._proposed or self.view in self._freed:
            return []
        if not is_quorum(self.previous, changes, self.leaves):
            return []
        cast = [c.highest for c in changes.values() if c.highest is not None]
        if cast:
            return self._propose(max(cast, key=lambda vote: vote.view).value)
        self._freed.add(self.view)
        return [FreeToPlan(self.view, tuple(c.report for c in changes.values() if c.report is not None))]

    def _tally(self, view: int, value_hash: bytes) -> list[AgreementEffect]:
        """Form the certificate when the votes of one view for one value are a quorum."""
        value = self._values.get(value_hash)
        votes = self._votes.get((view, value_hash), {})
        if value is None or self.standing is Standing.DECIDED:
            return []
        valid = sorted(p for p in votes if p not in value.leaves)
        if not is_quorum(self.previous, valid, value.leaves):
            return []
        signatures = tuple(votes[p] for p in valid)
        return self._decide(Certificate(value=value, view=view, signers=tuple(valid), signatures=signatures))

    def _decide(self, certificate: Certificate) -> list[AgreementEffect]:
        self.standing = Standing.DECIDED
        self.certificate = certificate
        return [Decided(certificate)]

    # -- messages and records of this node -------------------------------------------------------------------

    def _record(self, kind: str, view: int, value: Value | None = None) -> DurableRecord:
        return DurableRecord(kind=kind, term=self.previous.next_term, round=self.round, view=view, value=value)

    def _propose_message(self, view: int) -> Propose:
        value = self._proposed[view]
        return Propose(term=value.term, round=self.round, base=value.base, view=view, value=value)

    def _view_change(self) -> ViewChange:
        return ViewChange(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            view=self.view,
            highest=self._highest,
            report=next(reversed(self._computed.values()), None),
        )

    def _leave_message(self) -> Leave:
        return Leave(term=self.previous.next_term, round=self.round, base=self.previous.hash)
