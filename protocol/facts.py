"""What one node knows of a round under way, and what follows from it, for the round machine and its lead's part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.accusations import Accusations
from shoal.protocol.agreement import Agreement
from shoal.protocol.amending import AmendConsent, InForce, stands_on, verify_amend_consent
from shoal.protocol.errors import RemoteError
from shoal.protocol.gathering import Gathering
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    Amendment,
    Consent,
    Held,
    Plan,
    Ready,
    Relayed,
    Report,
    Stalled,
    Target,
    Value,
    ViewChange,
)
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.planning import CONTRIBUTOR, TRAINING, RoundSettings
from shoal.protocol.probation import Probation
from shoal.protocol.terms import verify_consent


@dataclass(slots=True, kw_only=True)
class RoundFacts:
    """`planned_at` is when `plan` was adopted here.

    `closed_to` are, by lineage, those from whom this node takes nothing more.
    `suspected` are those of the living that this node's failure detector cannot reach any more. `banned` are so by
    certificates; `proven` has the accused by the digest of evidence that was verified here and no ban covers.
    `gave_up` is a view that this node led, and in which it was the one to go.
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
    held: dict[PeerId, Held] = field(default_factory=dict)
    closed_to: dict[bytes, frozenset[PeerId]] = field(default_factory=dict)
    consents: dict[PeerId, Consent] = field(default_factory=dict)
    amend_consents: dict[PeerId, AmendConsent] = field(default_factory=dict)
    banned: frozenset[PeerId] = frozenset()
    proven: dict[bytes, PeerId] = field(default_factory=dict)
    newcomers: Newcomers = field(default_factory=Newcomers)
    probation: Probation = field(default_factory=Probation)
    gave_up: int | None = None

    @property
    def leaves(self) -> Collection[PeerId]:
        """Who promised to take no further part."""
        return self.agreement.leaves

    @property
    def reports(self) -> dict[bytes, dict[PeerId, Report]]:
        """Who said that it holds the finals of which plan, by its hash; each is signed."""
        return self.agreement.reports

    def is_quorum(self, peers: Collection[PeerId]) -> bool:
        """Whether these could certify the round."""
        return self.agreement.is_quorum(peers)

    def has_quorum(self) -> bool:
        """Whether the living members that may sign could certify this round."""
        mute = {self.me} if self.agreement.abstains else ()
        return self.is_quorum(self.alive.difference(self.leaves, mute))

    def others(self) -> frozenset[PeerId]:
        """Who else lives, is not on the way out, and may take part."""
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
        return {p for p in plan.remaining() if p in self.alive} - frozenset(self.leaves)

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
            for peer in plan.remaining()
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

    def take_ready(self, sender: PeerId, ready: Ready) -> None:
        """What `sender` announces. Raises RemoteError if it breaks the protocol."""
        self.gathering.receive(sender, ready)

    def take_stalled(self, sender: PeerId, message: Stalled) -> None:
        """`sender` accuses."""
        self.accusations.take(sender, message)

    def take_relayed(self, sender: PeerId, message: Relayed) -> None:
        """`sender` says what it passed on."""
        self.accusations.take_relayed(sender, message)

    def take_held(self, sender: PeerId, held: Held) -> None:
        """`sender` takes nothing more from the evicted, and says which finals it holds."""
        self.held[sender] = held

    def take_report(self, sender: PeerId, report: Report) -> None:
        """`sender` holds the finals of a plan. Raises RemoteError if it did not sign that."""
        ours = (report.round, report.base) == (self.previous.next_round, self.previous.hash)
        if ours:
            self.agreement.take_report(sender, report)

    def take_change(self, sender: PeerId, change: ViewChange) -> None:
        """What a member that moved on tells of finals: its own, and of whom a proposal left out. Raises RemoteError."""
        if change.report is None:
            return
        self.take_report(sender, change.report)
        if len(change.left_out) != len(change.left_out_signatures):
            raise RemoteError("reports without signatures", peer=sender)
        for peer, signature in zip(change.left_out, change.left_out_signatures, strict=True):
            if peer in self.previous.members and peer not in self.reports.get(change.report.plan, {}):
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
        found = self.candidates()
        done = [found[peer] for peer in found.keys() & self.gathering.returners]
        done = [r for r in done if r.role == CONTRIBUTOR and r.tokens]
        if self.settings.norm_clip:
            done = [r for r in done if len(r.squares) == plan.chunks]
        counted = [p for p in plan.participants if p.weight and p.peer not in plan.evicted]
        return 2 * len(counted) < len(done) + len(self.awaited())

    def awaited(self) -> set[PeerId]:
        """Living trainers that have not announced a contribution yet, and could be in a plan of this view."""
        found = self.gathering.awaited(self.alive - self.ahead(), self.leaves) - self.left_out()
        # Who drew another S(0) is on its way to the first founder's, and contributes on that one.
        return found if self.previous.round else found | (self.gathering.astray(self.alive) - frozenset(self.leaves))

    def waits_for_newcomers(self, now: float) -> bool:
        """Whether this lead, which has all its trainers, holds its plan back for who is on the way to the state."""
        known = (self.previous.members, self.leaves, self.banned, self.candidates(), self.left_out())
        outsiders = self.alive.difference(*known)
        return self.newcomers.hold_back(self.previous, outsiders, now, timeout_s=self.settings.grace_s)

    def my_report(self) -> Report | None:
        """This node's report of the plan it follows."""
        return None if self.plan is None else self.reports.get(self.plan.hash, {}).get(self.me)

    def reported(self, plan: Plan) -> set[PeerId]:
        """Participants, and members that took no part or were evicted, who came to the same result as this node."""
        reports = self.reports.get(plan.hash, {})
        mine = reports.get(self.me)
        if mine is None:
            return set()
        result = mine.digest, mine.bitmaps, mine.tokens
        same = {p for p, r in reports.items() if (r.digest, r.bitmaps, r.tokens) == result}
        return same.intersection({*plan.remaining(), *self.previous.members}).difference(self.leaves, self.banned)

    def take_consent(self, sender: PeerId, consent: Consent) -> None:
        """A member would go back. Raises RemoteError if it did not sign that."""
        if self.consents.get(sender) == consent:
            return
        if not verify_consent(sender, consent.base, consent.target, consent.signature):
            raise RemoteError("a consent whose signature does not hold", peer=sender)
        self.consents[sender] = consent

    def agreed_target(self) -> Target | None:
        """Where a quorum would go back to, if there is such a round."""
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
        """Whether the round could decide on it."""
        return self.in_force is not None and stands_on(amendment, self.in_force)

    def agreed_amendment(self) -> Amendment | None:
        """What a quorum would amend, if there is such a thing."""
        for amendment in {consent.amendment for consent in self.amend_consents.values()}:
            if self.is_quorum([peer for peer, c in self.amend_consents.items() if c.amendment == amendment]):
                return amendment
        return None
