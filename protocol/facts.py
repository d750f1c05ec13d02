"""Facts that one node knows of a round under way, and what follows, for the round machine and its lead's part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.accusations import Accusations
from shoal.protocol.agreement import Agreement
from shoal.protocol.amending import AmendConsent, InForce, stands_on, verify_amend_consent
from shoal.protocol.enlisting import Outside
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    Amendment,
    Consent,
    Held,
    Participant,
    Plan,
    Ready,
    Relayed,
    Report,
    Stalled,
    Target,
    Value,
    ViewChange,
)
from shoal.protocol.newcomers import Newcomers, patience_s
from shoal.protocol.planning import CONTRIBUTOR, OBSERVER, ROLES, TRAINING, RoundSettings
from shoal.protocol.probation import Probation
from shoal.protocol.seats import PassedOver, Seating
from shoal.protocol.terms import verify_consent
from shoal.protocol.timeouts import reduce_deadline_s
from shoal.protocol.voting import common_view

READIES_LIMIT = 4 * MEMBER_LIMIT
"""Outsiders beyond this many are not listened to; members always are."""


class Gathering:
    """The announcements of one round.

    members: whose weight counts, and who is waited for. returners: they, and those who were members lately, whose
    weight counts as theirs does. voters: listened to, members or not.
    state: the digest of S(e-1) held here; who holds another must heal before it takes part. banned: not listened to.
    shunned: proven here to have lied, and planned only where there is no quorum without. seating: who of those that
    train is waited for. admitted: who is listened to at all, where some have to wait outside.
    """

    def __init__(
        self,
        *,
        members: Iterable[PeerId],
        voters: Iterable[PeerId] = (),
        returners: Iterable[PeerId],
        state: bytes,
        banned: Iterable[PeerId] = (),
        seating: Seating | None = None,
        admitted: frozenset[PeerId] | None = None,
    ) -> None:
        self._admitted = admitted
        self.seating = seating or Seating()
        self._members = frozenset(members)
        self._voters = frozenset(voters)
        self._banned = frozenset(banned)
        self.returners = (self._members | frozenset(returners)) - self._banned
        self.shunned: set[PeerId] = set()
        self._state = state
        self._readies: dict[PeerId, Ready] = {}
        self.half_ready_at: float | None = None

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._readies

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._readies)

    def get(self, peer: PeerId) -> Ready | None:
        """Announcement of `peer`, if it made one."""
        return self._readies.get(peer)

    def squares(self, plan: Plan) -> dict[PeerId, tuple[float, ...]]:
        """Sums of squares per chunk that the contributors in `plan` with a weight announced, by peer.

        Without those of peers that are proven to lie.
        """
        readies = ((p, self._readies.get(p.peer)) for p in plan.participants if p.weight and p.peer not in self.shunned)
        return {
            p.peer: r.squares
            for p, r in readies
            if r is not None and r.role == CONTRIBUTOR and (r.root, r.life) == (p.root, p.life)
        }

    def receive(self, sender: PeerId, ready: Ready) -> None:
        """Take a peer's announcement. Raises RemoteError if it breaks the protocol."""
        if ready.role not in ROLES:
            raise RemoteError(f"unknown role {ready.role!r}", peer=sender)
        known = self._readies.get(sender)
        if known is not None and known.role == CONTRIBUTOR and ready.role == CONTRIBUTOR and known.root != ready.root:
            raise RemoteError("two contributions in one round", peer=sender)
        self.take(sender, ready)

    def take(self, sender: PeerId, ready: Ready) -> None:
        """A contribution stands, except that a node that restarted may have lost it: then it becomes an observer."""
        known = self._readies.get(sender)
        if sender in self._banned or (self._admitted is not None and sender not in self._admitted):
            return
        if known is None and len(self._readies) >= READIES_LIMIT and sender not in self._members | self._voters:
            return
        if known is None or known.role != CONTRIBUTOR or ready.role == OBSERVER or ready.life != known.life:
            self._readies[sender] = ready

    def forget(self, peer: PeerId) -> None:
        """It died. It may return without its contribution; if it has it still, it says so again."""
        self._readies.pop(peer, None)

    def withdrew(self, peer: PeerId) -> bool:
        """True if it announced that it has no contribution (any more)."""
        ready = self._readies.get(peer)
        return ready is not None and ready.role == OBSERVER

    def restarted(self, participant: Participant) -> bool:
        """True if it announced itself in another life than the one that is planned."""
        ready = self._readies.get(participant.peer)
        return ready is not None and ready.life != participant.life

    def candidates(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> dict[PeerId, Ready]:
        """Everyone who may be in a plan: alive, announced, on the same state, not on the way out."""
        return {
            peer: ready
            for peer, ready in self._readies.items()
            if peer in alive and peer not in leaves and ready.state == self._state
        }

    def awaited(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> set[PeerId]:
        """Living trainers that have not announced a contribution yet, and would have a seat."""
        found = self._training(alive, leaves)
        return found & self.seating.first(found | self._ready()) if found else found

    def _training(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> set[PeerId]:
        settled = {p for p, r in self._readies.items() if r.role != TRAINING}
        members = {p for p in self._members if p in alive} - set(leaves)
        training = {p for p, r in self._readies.items() if r.role == TRAINING and p in alive}
        return (members | (training & self.returners)) - settled - self.shunned

    def astray(self, alive: Collection[PeerId]) -> set[PeerId]:
        """Living members that announced themselves on another state than the one held here."""
        return {p for p, r in self._readies.items() if p in self._members and p in alive and r.state != self._state}

    def nobody_trains(self, alive: Collection[PeerId]) -> bool:
        """True if no living member, or late one, is making a contribution or has made one."""
        busy = (p for p, r in self._readies.items() if r.role in (CONTRIBUTOR, TRAINING) and p in alive)
        return not any(p in self.returners for p in busy)

    def weighty(self, candidates: Mapping[PeerId, Ready]) -> Collection[PeerId]:
        """Of these, or beside them, those whose contributions count.

        A newcomer's counts only where none of the returners trains: else no round would end before one of them does.
        """
        trains = any(p in self.returners and r.role in (CONTRIBUTOR, TRAINING) for p, r in candidates.items())
        return self.returners if trains else candidates.keys()

    def note_half_ready(self, alive: Collection[PeerId], leaves: Collection[PeerId], now: float) -> None:
        """Remember when at least half of those who train, and would have a seat, were done.

        Or of all who train, where they fill the seats: the few whose turn it is may never be.
        """
        if self.half_ready_at is None:
            done, seats = self._done(alive, leaves)
            ready, trainers = self._ready(), self._training(alive, leaves)
            of_all = len(ready) >= seats and 2 * len(ready) >= len(ready | trainers)
            if (done and 2 * done >= seats) or (ready and of_all):
                self.half_ready_at = now

    def most_ready(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> bool:
        """True if more than half of those who train for a seat are done: then the median weight is of one of them."""
        done, trainers = self._done(alive, leaves)
        return 2 * done > trainers

    def _done(self, alive: Collection[PeerId], leaves: Collection[PeerId]) -> tuple[int, int]:
        """How many are done, of how many who train and would have a seat."""
        done = self._ready()
        due = self.seating.first(self._training(alive, leaves) | done)
        return len(done & due), len(due)

    def _ready(self) -> set[PeerId]:
        return {p for p, r in self._readies.items() if r.role == CONTRIBUTOR and p in self.returners}


@dataclass(slots=True, kw_only=True)
class RoundFacts:
    """`planned_at` is when `plan` was adopted here, and `reducing_since` when the first of its lineage was.

    `closed_to` are, by lineage, those from whom this node takes nothing more.
    `suspected` are those of the living that this node's failure detector cannot reach any more. `banned` are so by
    certificates; `proven` has the accused by the digest of evidence that was verified here and no ban covers.
    `unfair` has the lineages that pass over who was passed over in the round before.
    `outside` says who takes part, where who has no seat waits outside.
    `gave_up` is a view that this node led, and in which it was the one to go, or could begin no other reduction.
    """

    me: PeerId
    previous: Value
    settings: RoundSettings
    agreement: Agreement
    gathering: Gathering
    in_force: InForce | None = None
    accusations: Accusations = field(default_factory=Accusations)
    alive: frozenset[PeerId]
    suspected: frozenset[PeerId] = frozenset()
    dead_since: dict[PeerId, float] = field(default_factory=dict)
    plan: Plan | None = None
    planned_at: float = 0.0
    reducing_since: float = 0.0
    held: dict[PeerId, Held] = field(default_factory=dict)
    closed_to: dict[bytes, frozenset[PeerId]] = field(default_factory=dict)
    consents: dict[PeerId, Consent] = field(default_factory=dict)
    amend_consents: dict[PeerId, AmendConsent] = field(default_factory=dict)
    banned: frozenset[PeerId] = frozenset()
    proven: dict[bytes, PeerId] = field(default_factory=dict)
    newcomers: Newcomers = field(default_factory=Newcomers)
    probation: Probation = field(default_factory=Probation)
    outside: Outside | None = None
    passed_over: PassedOver = field(default_factory=PassedOver)
    unfair: set[bytes] = field(default_factory=set)
    gave_up: int | None = None

    @property
    def seating(self) -> Seating:
        """The seats of the round, and the line for them."""
        return self.gathering.seating

    @property
    def leaves(self) -> Collection[PeerId]:
        """Peers that promised to take no further part."""
        return self.agreement.leaves

    @property
    def reports(self) -> dict[bytes, dict[PeerId, Report]]:
        """Reports of peers that hold all finals of a plan, by the plan's hash and the peer; each is signed."""
        return self.agreement.reports

    def is_decided(self) -> bool:
        """True if the certificate is here."""
        return self.agreement.certificate is not None

    def is_reduced(self) -> bool:
        """True if this node takes part in the plan that it follows, and reported what came of it."""
        return self.is_planned() and self.my_report() is not None

    def is_planned(self) -> bool:
        """True if this node takes part in the plan that it follows."""
        return self.plan is not None and self.me in self.plan.remaining

    def is_announced(self) -> bool:
        """True if this node announced its contribution, or that it makes none."""
        mine = self.gathering.get(self.me)
        return mine is not None and mine.role != TRAINING

    def is_quorum(self, peers: Collection[PeerId]) -> bool:
        """True if these peers could certify the round."""
        return self.agreement.is_quorum(peers)

    def has_quorum(self) -> bool:
        """True if the living members that may sign could certify this round."""
        mute = {self.me} if self.agreement.abstains else ()
        return self.is_quorum(self.alive.difference(self.leaves, mute))

    def others(self) -> frozenset[PeerId]:
        """Other peers that live, are not on the way out, and may take part."""
        return self.alive.difference(self.leaves, self.banned, {self.me})

    def holders(self) -> set[PeerId]:
        """Those of the others who have the state that the round begins from: they announced it, or they are members,
        who reported its digest before it was certified, and have announced nothing since.

        Members that a genesis, a rollback or a rebase names have reported nothing.
        """
        found = set(self.gathering.candidates(self.alive, self.leaves))
        if self.previous.plan != NO_HASH:
            found.update(peer for peer in self.previous.members if peer not in self.gathering)
        return found.intersection(self.others())

    def remaining(self, plan: Plan) -> set[PeerId]:
        """Participants that are alive, not evicted and not on the way out."""
        return {p for p in plan.remaining if p in self.alive} - frozenset(self.leaves)

    def is_overdue(self, plan: Plan, now: float) -> bool:
        """True if its reduction has had its time."""
        return now - self.planned_at >= reduce_deadline_s(self.settings, plan)

    def lost(self, plan: Plan) -> set[PeerId]:
        """Participants not evicted yet that died, left, were restarted, lost their contribution, are accused by enough
        others, or are proven to have lied where the rest are a quorum. Of who may not have heard of the plan, being
        ahead, one accuser is enough."""
        places = {p.peer: p for p in plan.participants}
        shunned = self.gathering.shunned.intersection(places)
        if shunned and not self.is_quorum(self.remaining(plan) - shunned):
            shunned = set()
        believed = self.blamed(plan)
        return {
            peer
            for peer in plan.remaining
            if peer not in self.alive
            or peer in self.leaves
            or peer in shunned
            or self.gathering.restarted(places[peer])
            or (places[peer].weight and self.gathering.withdrew(peer))
            or peer in believed
        } - {self.me}

    def blamed(self, plan: Plan, *, overdue: bool = False) -> set[PeerId]:
        """Participants that enough others speak against, as in `Accusations.believed`."""
        return self.accusations.believed(plan, self.alive, self.suspected | self.ahead(), overdue=overdue)

    def ahead(self) -> frozenset[PeerId]:
        """Members that promised a later view than this node's: they follow no plan of this one any more."""
        view = self.agreement.view
        return frozenset(peer for peer, promised in self.agreement.promised().items() if promised > view)

    def meeting_view(self, *, planned: bool) -> int:
        """The view in which this round can be decided, from this node's on (`common_view`)."""
        agreement = self.agreement
        view, promised, voting = agreement.view, agreement.promised(), agreement.voting
        return common_view(self.previous, view, promised, self.alive, self.leaves, voting=voting, planned=planned)

    def take_ready(self, sender: PeerId, ready: Ready) -> None:
        """Take the announcement of `sender`. Raises RemoteError if it breaks the protocol."""
        self.gathering.receive(sender, ready)

    def take_stalled(self, sender: PeerId, message: Stalled, now: float) -> None:
        """`sender` accuses."""
        self.accusations.take(sender, message, self.plan)
        self.accusations.note_late(message.plan, self.alive, now)

    def take_relayed(self, sender: PeerId, message: Relayed, now: float) -> None:
        """`sender` says what it passed on."""
        self.accusations.take_relayed(sender, message, self.plan)
        self.accusations.note_late(message.plan, self.alive, now)

    def look_at_excuses(self, now: float) -> None:
        """Note for how long owners have said that they wait for others."""
        if self.plan is not None:
            self.accusations.look(self.plan, self.alive, now, ran_s=now - self.reducing_since)

    def take_held(self, sender: PeerId, held: Held) -> None:
        """`sender` takes nothing more from the evicted, and says which finals it holds."""
        self.held[sender] = held

    def take_report(self, sender: PeerId, report: Report) -> None:
        """`sender` holds the finals of a plan. Raises RemoteError if it did not sign that."""
        ours = (report.round, report.base) == (self.previous.next_round, self.previous.hash)
        if ours:
            self.agreement.take_report(sender, report)

    def take_change(self, sender: PeerId, change: ViewChange) -> None:
        """Take the reports in a member's view change: its own, and those a proposal left out. Raises RemoteError."""
        if change.report is None:
            return
        self.take_report(sender, change.report)
        if len(change.left_out) != len(change.left_out_signatures):
            raise RemoteError("reports without signatures", peer=sender)
        for peer, signature in zip(change.left_out, change.left_out_signatures, strict=True):
            known = peer == self.me or peer in self.reports.get(change.report.plan, {})
            if peer in self.agreement.everyone and not known:  # of itself it goes by what it computed in this life
                self.take_report(peer, msgspec.structs.replace(change.report, signature=signature))

    def close_to(self, lineage: bytes, evicted: frozenset[PeerId]) -> tuple[PeerId, ...]:
        """This node takes nothing more from these in that reduction. All from whom it does not, in order.

        A reduction stays closed to whoever was evicted from it once, whatever another lead makes of it.
        """
        closed = self.closed_to.get(lineage, frozenset()) | evicted
        if self.plan is not None and self.plan.lineage == lineage:
            closed |= frozenset(self.plan.evicted)
        if len(closed) > MEMBER_LIMIT:  # more than take part in any reduction
            return tuple(sorted(evicted))
        if lineage in self.closed_to or len(self.closed_to) < MEMBER_LIMIT:
            self.closed_to[lineage] = closed
        return tuple(sorted(closed))

    def candidates(self) -> dict[PeerId, Ready]:
        """Everyone who may be in a plan of this view, without those that are proven to have lied, and those on
        probation, if the rest are a quorum."""
        found = self.gathering.candidates(self.alive - self.ahead(), self.leaves)
        kept = {peer: ready for peer, ready in found.items() if peer not in self.gathering.shunned}
        if not self.is_quorum(kept.keys()):
            return found
        out = self.left_out()
        return {peer: ready for peer, ready in kept.items() if peer not in out}

    def left_out(self) -> frozenset[PeerId]:
        """Those on probation, if others that may be planned are a quorum and train; never this node."""
        out = self.probation.left_out(self.previous) - {self.me}
        found = self.gathering.candidates(self.alive - self.ahead(), self.leaves) if out else {}
        rest = found.keys() - self.gathering.shunned - out
        train = any(found[peer].role in (CONTRIBUTOR, TRAINING) for peer in rest & self.gathering.returners)
        return out if train and self.is_quorum(rest) else frozenset()

    def counts_too_few(self, plan: Plan) -> bool:
        """Tell a plan that counts less than half of those who train, as far as is known here.

        A lead waits until half of them are ready: it misses no more, unless it hears of others than this node.
        """
        counted = [p for p in plan.participants if p.weight and p.peer not in plan.evicted]
        trainers = len(self._countable(plan.chunks)) + len(self.awaited() - plan.delegates.keys())
        return 2 * len(counted) < min(trainers, self.settings.seats)

    def _countable(self, chunks: int) -> list[PeerId]:
        """Those whose contribution a plan of this view may count, as far as is known here."""
        found = self.candidates()
        done = [(peer, found[peer]) for peer in found.keys() & self.gathering.returners]
        return [
            peer
            for peer, ready in done
            if ready.role == CONTRIBUTOR
            and ready.tokens
            and (len(ready.squares) == chunks or not self.settings.norm_clip)
        ]

    def is_unfair(self, plan: Plan, now: float) -> bool:
        """Tell another's plan, heard just now, that passes over a member which was passed over in the round before.

        So does one that comes long before the grace is over, and waits for no member that would have a seat.
        """
        if plan.origin == NO_HASH and plan.planner != self.me:
            since, early_s = self.gathering.half_ready_at, self.settings.grace_s / 2
            hasty = since is None or now - since < early_s
            due = {*self._countable(plan.chunks), *(self.awaited() if hasty else ())}
            passed_over = self.seating.passed_over(plan, due)
            if self.passed_over.note(self.previous, passed_over):
                self.unfair.add(plan.lineage)
        return plan.lineage in self.unfair

    def awaited(self) -> set[PeerId]:
        """Living trainers that have not announced a contribution yet, and could be in a plan of this view."""
        found = self.gathering.awaited(self.alive - self.ahead(), self.leaves) - self.left_out()
        # Who drew another S(0) is on its way to the first founder's, and contributes on that one.
        return found if self.previous.round else found | (self.gathering.astray(self.alive) - frozenset(self.leaves))

    def waits_for_newcomers(self, now: float) -> bool:
        """True if this lead, half of whose trainers are ready, waits for newcomers about to have the state."""
        known = (self.agreement.everyone, self.leaves, self.banned, self.candidates(), self.left_out())
        may_come = self.alive if self.outside is None else self.alive & self.outside.admitted
        outsiders = may_come.difference(*known)
        leads, since = len(self.agreement.electorate), self.gathering.half_ready_at
        timeout_s = patience_s(leads, self.settings.grace_s)
        if since is None or now - since >= timeout_s:
            return False
        return self.newcomers.hold_back(self.previous, outsiders, now, leads=leads, timeout_s=timeout_s)

    def my_report(self) -> Report | None:
        """This node's report of the plan it follows."""
        return None if self.plan is None else self.reports.get(self.plan.hash, {}).get(self.me)

    def reported(self, plan: Plan) -> set[PeerId]:
        """Participants, and members and voters that took no part, who came to the same result as this node."""
        reports = self.reports.get(plan.hash, {})
        mine = reports.get(self.me)
        if mine is None:
            return set()
        result = mine.digest, mine.bitmaps, mine.tokens
        same = {p for p, r in reports.items() if (r.digest, r.bitmaps, r.tokens) == result}
        return same.intersection({*plan.remaining, *self.agreement.everyone}).difference(self.leaves, self.banned)

    def take_consent(self, sender: PeerId, consent: Consent) -> None:
        """A member would go back. Raises RemoteError if it did not sign that."""
        if self.consents.get(sender) == consent:
            return
        if not verify_consent(sender, consent.base, consent.target, consent.signature):
            raise RemoteError("a consent whose signature does not hold", peer=sender)
        self.consents[sender] = consent

    def agreed_target(self) -> Target | None:
        """Round and certificate that a quorum would go back to, if there is such a round."""
        for target in {consent.target for consent in self.consents.values()}:
            if self.is_quorum([peer for peer, consent in self.consents.items() if consent.target == target]):
                return target
        return None

    def take_amend_consent(self, sender: PeerId, consent: AmendConsent) -> None:
        """A member would amend. Raises RemoteError if it did not sign that, or what it wants cannot be."""
        if self.amend_consents.get(sender) == consent:
            return
        if not verify_amend_consent(sender, consent.base, consent.amendment, consent.signature):
            raise RemoteError("a consent to amend whose signature does not hold", peer=sender)
        if not self.may_amend(consent.amendment):
            raise RemoteError("a consent to an amendment that cannot be", peer=sender)
        self.amend_consents[sender] = consent

    def may_amend(self, amendment: Amendment) -> bool:
        """True if the round could decide on it."""
        return self.in_force is not None and stands_on(amendment, self.in_force)

    def agreed_amendment(self) -> Amendment | None:
        """Amendment to which a quorum consented, if there is one."""
        for amendment in {consent.amendment for consent in self.amend_consents.values()}:
            if self.is_quorum([peer for peer, c in self.amend_consents.items() if c.amendment == amendment]):
                return amendment
        return None
