"""The round machine: one node's part in one round, from ready to certificate, sans-IO.

Theory. A round passes through phases; each waits for one thing, under a deadline:

    phase      waits for                             ends with
    TRAIN      this node's own contribution          `ready(contributor)`
    PLAN       the lead's plan                       a Plan          -> StartReduce
    REDUCE     the finals of the plan's chunks       `reduced(...)`  -> Report
    CERTIFY    the lead's proposal, then votes       a quorum        -> Decided
    DECIDED    -

`PHASES` says what has to be known here for each; a plan that evicts this node, or comes after the one that it reduced
by, takes it back to an earlier one. `RULES` says what each message leads to.

The lead of the view has the extra duties of `leading.Lead`: close the set, plan, repair the reduction when somebody is
lost, and propose once every living participant reported. A lead that dies or dawdles is replaced by moving to the next
view (following.py); safety never depends on who leads (agreement.py). A member that is late is still a participant of
weight zero: it receives the finals, votes, and stays a member; its contribution counts in the next round.

A repair (see planning.py) interrupts REDUCE or CERTIFY: `CloseOff` asks this node to take nothing more from the evicted
and to say, by `closed_off`, which finals it holds; the revised plan comes as `Repair`.

Time enters only as the `now` of each call, in seconds of a monotonic clock.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.protocol.agreement import (
    STEPS,
    VIEWS_AHEAD_LIMIT,
    Agreement,
    Broadcast,
    DurableRecord,
)
from shoal.protocol.amending import AmendConsent, InForce, make_amend_consent
from shoal.protocol.certificate import LeaveCost, leave_cost
from shoal.protocol.commitments import committed
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.enlisting import Outside
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.facts import Gathering, RoundFacts
from shoal.protocol.following import LeadWatch
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.leading import Lead
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    Amendment,
    Certificate,
    ChunkResults,
    Consent,
    Evict,
    Held,
    Leave,
    Message,
    Plan,
    Prepare,
    Propose,
    Ready,
    Relayed,
    RelayedWay,
    Report,
    RoundMessage,
    Stalled,
    Target,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.planning import CONTRIBUTOR, TRAINING, Deal, Eviction, RoundSettings, check_norms, check_plan
from shoal.protocol.probation import Probation
from shoal.protocol.seats import PassedOver, Seating
from shoal.protocol.terms import make_consent
from shoal.protocol.timeouts import SILENCE_S, in_crowd
from shoal.protocol.view_change import check_entered
from shoal.protocol.voting import CONTRIBUTORS, Voting

LINEAGES_LIMIT = 8
"""Reductions that a lead may begin in one view: it plans anew only where too few remain to go on."""
ORIGINS_LIMIT = 64
"""Plans of one round that begin a reduction and are remembered."""
RESEND_S, RESEND_LIMIT_S = 3.0, 12.0
"""Own standing messages are sent again so long after the newest of them was said, then after twice that, and so on up
to the limit, until the round is decided. Links lose nothing; but a message may come before it can be taken, or be
passed on by others, who lose some."""
WAITING_RESEND_S = 60.0
"""The same while this node trains, and from the second time on while others do: nobody waits for what was said."""


class Phase(enum.Enum):
    """Phase of a round for this node."""

    TRAIN = "train"
    PLAN = "plan"
    REDUCE = "reduce"
    CERTIFY = "certify"
    DECIDED = "decided"


class RoundMachine:
    """One node's part in the round after `previous`.

    `state` is the digest of S(e-1) held here; `life` 32 random bytes, drawn for this machine; `returners` those who
    were members lately, whose weight counts as theirs does. `voting` says who has a vote. `in_force` are the agreed
    settings of the round, for who would amend them; `banned` is who takes no part by what the chain decided; `line`
    the members in the order in which they come to the seats; `outside` who takes part where not all may; `leads_back`
    and `may_join` as in `Agreement`.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        previous: Value,
        state: bytes,
        life: bytes,
        settings: RoundSettings,
        deal: Deal,
        returners: Iterable[PeerId] = (),
        in_force: InForce | None = None,
        banned: Collection[PeerId] = (),
        leads_back: Callable[[Value], bool] | None = None,
        may_join: Callable[[PeerId], bool] | None = None,
        voting: Voting = CONTRIBUTORS,
        line: tuple[PeerId, ...] = (),
        outside: Outside | None = None,
    ) -> None:
        self.me = identity.peer_id
        self.life = life
        self._identity = identity
        self.previous = previous
        self.round = previous.next_round
        self.agreement = Agreement(
            identity=identity,
            previous=previous,
            in_force=in_force,
            banned=banned,
            leads_back=leads_back,
            may_join=may_join,
            voting=voting,
            seats=settings.seats,
            outside=outside,
        )
        self._gathering = Gathering(
            members=previous.members if outside is None else outside.admitted.intersection(previous.members),
            voters=self.agreement.electorate,
            returners=returners,
            state=state,
            banned=banned,
            seating=Seating(settings.seats, line),
            admitted=None if outside is None else outside.admitted,
        )
        self._facts = RoundFacts(
            me=self.me,
            previous=previous,
            settings=settings,
            agreement=self.agreement,
            gathering=self._gathering,
            in_force=in_force,
            banned=frozenset(banned),
            outside=outside,
            alive=frozenset({self.me}),
        )
        self._lead = Lead(self._facts, deal)
        self._planner_died = False
        self._begun: dict[int, frozenset[bytes]] = {}
        self._origins: dict[bytes, tuple[object, ...]] = {}
        self._asked: dict[int, frozenset[tuple[int, bytes, tuple[PeerId, ...]]]] = {}
        self._closed_off: Held | None = None
        self._relayed: Relayed | None = None
        self._watch = LeadWatch(self._facts)
        self._said: list[Message] = []
        self._said_at = float("-inf")
        self._resend_s = RESEND_S
        self._asked_at: float | None = None

    def remember(self, newcomers: Newcomers, probation: Probation, passed_over: PassedOver) -> None:
        """Take up what a node knows from round to round: whom a lead waits for, whom it leaves out, whom leads did."""
        self._facts.newcomers, self._facts.probation = newcomers, probation
        self._facts.passed_over = passed_over

    @property
    def plan(self) -> Plan | None:
        """The plan that this node follows."""
        return self._facts.plan

    # -- inputs of this node ---------------------------------------------------------------------------------

    def restore(self, records: Iterable[DurableRecord]) -> list[Effect]:
        """Take up what this node bound itself to before a restart; says it again, and does what follows from it."""
        self.agreement.restore(records)
        said = [Broadcast(message) for message in self.agreement.current()]
        return [*said, *self.agreement.resume()]

    def ready(self, ready: Ready, now: float) -> list[Effect]:
        """Announce this node's role or its finished contribution, in this machine's life."""
        ready = msgspec.structs.replace(ready, life=self.life)
        ready = committed(self._identity, ready, self._facts.settings)
        self._gathering.take(self.me, ready)
        return [Broadcast(ready), *self.tick(now)]

    def reduced(
        self,
        report: Report,
        now: float,
        *,
        participants: Iterable[PeerId] | None = None,
        counted: Iterable[PeerId] = (),
    ) -> list[Effect]:
        """All finals of a plan, with these participants, are here and lead to this digest.

        participants: left out, those of the plan that is followed here, if it is that one. counted: of them, whose
        contribution is in at least one chunk; of no account where seats are for all.
        """
        if participants is None:
            ours = self.plan is not None and self.plan.hash == report.plan
            participants = [p.peer for p in self.plan.participants] if ours and self.plan is not None else ()
        effects: list[Effect] = [Broadcast(self.agreement.sign_report(report))]
        effects += self.agreement.computed(report, participants, counted)
        return [*effects, *self.tick(now)]

    def stalled(self, peers: Iterable[PeerId], late: Iterable[PeerId], now: float) -> list[Effect]:
        """In the reduction under way these peers moved too little for the stall deadline; finals of `late` are late."""
        if self.plan is None:
            return []
        message = Stalled(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            plan=self.plan.hash,
            peers=tuple(sorted(peers)),
            late=tuple(sorted(late)),
        )
        self._facts.take_stalled(self.me, message, now)
        return [Broadcast(message), *self.tick(now)]

    def relayed(self, plan: bytes, ways: Collection[RelayedWay], now: float) -> list[Effect]:
        """Tell what this node, as a relay of `plan`, can say of `ways`.

        A way is told of once one end accuses the other, and kept up to date from then on.
        """
        facts, said = self._facts, () if self._relayed is None else self._relayed.ways
        if self.plan is None or self.plan.hash != plan:
            return []
        asked = facts.accusations.asked(self.plan, facts.alive, self.me) | {_ends(way) for way in said}
        told = tuple(way for way in ways if _ends(way) in asked)
        if told == said:
            return []
        self._relayed = Relayed(
            term=self.previous.next_term, round=self.round, base=self.previous.hash, plan=plan, ways=told
        )
        facts.take_relayed(self.me, self._relayed, now)
        return [Broadcast(self._relayed)]

    def closed_off(self, asked: CloseOff, chunks: tuple[ChunkResults, ...], now: float) -> list[Effect]:
        """Nothing more is taken from the evicted; `chunks` are the finals held here, by signer."""
        held = Held(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            lineage=asked.lineage,
            evicted=self._facts.close_to(asked.lineage, asked.evicted),
            chunks=chunks,
        )
        self._closed_off = self._facts.held[self.me] = held
        return [Broadcast(held), *self.tick(now)]

    def peers_alive(self, alive: Iterable[PeerId], now: float, *, suspected: Iterable[PeerId] = ()) -> list[Effect]:
        """Take note of who is believed alive, and whom of them the failure detector suspects."""
        before, facts = self._facts.alive, self._facts
        facts.suspected = frozenset(suspected)
        facts.alive = frozenset(alive) | {self.me}
        self._watch.look()
        for peer in before - facts.alive:
            facts.dead_since.setdefault(peer, now)
            self._planner_died |= self.plan is not None and peer == self.plan.planner
            self._gathering.forget(peer)
        for peer in facts.alive:
            facts.dead_since.pop(peer, None)
        return self.tick(now)

    def leave(self, now: float) -> list[Effect]:
        """Promise to take no further part, if that is still possible in this round."""
        return [*self.agreement.leave(), *self.tick(now)]

    def holds(self, target: Target, digest: bytes, now: float) -> list[Effect]:
        """The state of `target` is on disk here, and has this digest: this node may propose to go back, and vote so."""
        return [*self.agreement.holds(target, digest), *self.tick(now)]

    def proven(self, evidence: bytes, accused: PeerId, now: float) -> list[Effect]:
        """Evidence of that digest is verified here, and no ban covers it: the accused is planned no more but banned."""
        self._facts.proven[evidence] = accused
        self._gathering.shunned.add(accused)
        return [*self.agreement.proven(evidence, accused), *self.tick(now)]

    def consent(self, target: Target, *, asked: bool, now: float) -> list[Effect]:
        """Say that this voter would go back to `target`; `asked`: its own user wants that. No effect if it said so."""
        said = self._facts.consents.get(self.me)
        if not self.agreement.votes or (said is not None and (said.target, said.asked) == (target, asked)):
            return []
        consent = make_consent(self._identity, self.previous, target, asked=asked)
        self._facts.consents[self.me] = consent
        return [Broadcast(consent), *self.tick(now)]

    def amend(self, amendment: Amendment, *, asked: bool, now: float, authority: bytes = b"") -> list[Effect]:
        """Say that this voter would amend; as in `AmendConsent`. No effect if it said so, or it cannot be."""
        said = self._facts.amend_consents.get(self.me)
        again = said is not None and (said.amendment, said.asked, said.authority) == (amendment, asked, authority)
        if not self.agreement.votes or again or not self._facts.may_amend(amendment):
            return []
        consent = make_amend_consent(self._identity, self.previous, amendment, asked=asked, authority=authority)
        self._facts.amend_consents[self.me] = consent
        return [Broadcast(consent), *self.tick(now)]

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Phase that the round is in for this node."""
        return next(phase for phase, holds in PHASES if holds(self._facts))

    def weigh(self, plan: Plan) -> None:
        """Doubt another's plan that counts too few, before anything that came of it is signed here."""
        if plan.planner != self.me and self._facts.counts_too_few(plan):
            self.agreement.doubt(plan.hash)

    def is_overdue(self, now: float) -> bool:
        """True if the reduction under way has had its time."""
        return self.plan is not None and self.phase is Phase.REDUCE and self._facts.is_overdue(self.plan, now)

    def complete_at(self) -> tuple[PeerId, ...]:
        """Other participants that say they have all finals of the plan that this node is reducing by."""
        if self.plan is None or self.phase is not Phase.REDUCE:
            return ()
        return tuple(peer for peer in self._facts.reports.get(self.plan.hash, ()) if peer in self.plan.remaining)

    def awaited(self) -> frozenset[PeerId]:
        """Peers for which this node waits: the lead, once its own part is made; for a lead, who is yet to announce its
        contribution, or to report."""
        facts, plan = self._facts, self.plan
        if self.phase in (Phase.TRAIN, Phase.DECIDED):
            return frozenset()
        leader = self.agreement.lead(self.agreement.view)
        if leader != self.me:
            return frozenset((leader,))
        if plan is not None and facts.my_report() is None:
            return frozenset()
        return frozenset(facts.awaited() if plan is None else facts.remaining(plan) - facts.reported(plan))

    def unready(self) -> frozenset[PeerId]:
        """The others whose contributions the round waits for, once this node's own is made."""
        facts = self._facts
        mine = facts.candidates().get(self.me)
        waits = mine is not None and mine.role == CONTRIBUTOR and facts.plan is None and self.phase is not Phase.DECIDED
        return frozenset(facts.awaited()) if waits else frozenset()

    def training(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those of `peers` that say that they are still making a contribution, which is going to count."""
        facts = self._facts
        there = facts.alive - facts.left_out() - self._gathering.shunned
        readies = ((peer, self._gathering.get(peer)) for peer in peers if peer in there)
        return frozenset(peer for peer, ready in readies if ready is not None and ready.role == TRAINING)

    def trainers(self) -> frozenset[PeerId]:
        """The others that are expected to contribute to this round, or have done so."""
        facts = self._facts
        return frozenset({*facts.awaited(), *facts.candidates()} - {self.me})

    def missing(self) -> tuple[PeerId, ...]:
        """The voters that are not here."""
        here = self._facts.alive | self.agreement.leaves
        return tuple(p for p in self.agreement.voting.electorate(self.previous) if p not in here)

    def has_quorum(self) -> bool:
        """True if the living members could certify this round."""
        return self._facts.has_quorum()

    def leave_cost(self, leaving: Collection[PeerId]) -> LeaveCost:
        """Work out what this node's going means for those who stay, while those in `leaving` are about to go too."""
        agreement = self.agreement
        return leave_cost(self.previous, self.me, self._facts.alive, agreement.leaves, leaving, voting=agreement.voting)

    def votes_alone(self) -> bool:
        """True if no other voter is here."""
        return self._facts.others().isdisjoint(self.agreement.electorate)

    @property
    def rests(self) -> bool:
        """True if nothing is due but what messages lead to, or who lives: the members train, and a quorum is here."""
        facts = self._facts
        asked = facts.consents or facts.amend_consents
        trains = facts.plan is None and facts.gathering.half_ready_at is None and self.agreement.certificate is None
        return trains and not asked and self._watch.rests

    @property
    def half_ready_at(self) -> float | None:
        """When half of those who train had announced their contribution: from then on the grace goes by."""
        return self._gathering.half_ready_at

    def most_ready(self) -> bool:
        """True if more than half of those who train have announced their contribution."""
        return self._gathering.most_ready(self._facts.alive, self.agreement.leaves)

    def holds_alone(self) -> bool:
        """True if there are others, and none of them has the state from which this round begins."""
        return bool(self._facts.others()) and not self._facts.holders()

    def hands_over(self) -> bool:
        """True if this node alone can certify this round, by which others become voters who have its state."""
        may_leave = self.me in self.agreement.voting.may_leave(self.previous)
        return self.votes_alone() and may_leave and self.has_quorum() and bool(self._facts.holders())

    def nobody_trains(self) -> bool:
        """True if no living member is making a contribution or has made one."""
        return self._gathering.nobody_trains(self._facts.alive)

    def consents(self) -> dict[PeerId, Consent]:
        """Consents of voters that would go back in this round, each with the round to go back to."""
        return dict(self._facts.consents)

    def amend_consents(self) -> dict[PeerId, AmendConsent]:
        """Consents of voters that would amend the settings in this round, each with its amendment."""
        return dict(self._facts.amend_consents)

    def current(self) -> list[Message]:
        """Everything a peer that just connected should hear from this node."""
        messages: list[Message] = []
        if self.agreement.certificate is None:
            mine = self._gathering.get(self.me)
            if mine is not None:
                messages.append(mine)
            if self.me in self._facts.consents:
                messages.append(self._facts.consents[self.me])
            if self.me in self._facts.amend_consents:
                messages.append(self._facts.amend_consents[self.me])
            if self.plan is not None and self.plan.planner == self.me:
                messages.append(self.plan)
            if self._lead.eviction is not None:
                messages.append(self._announcement(self._lead.eviction))
            if self._closed_off is not None:
                messages.append(self._closed_off)
            if self._relayed is not None:
                messages.append(self._relayed)
            report = self._facts.my_report()
            if report is not None:
                messages.append(report)
        return messages + self.agreement.current()

    # -- what others say -------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Take a message of this round from `sender`, whose signature on it has been checked.

        Raises RemoteError when it breaks the protocol; the machine is unchanged then.
        """
        if self.agreement.certificate is not None:
            return []
        if isinstance(message, RoundMessage) and (message.round, message.base) != (self.round, self.previous.hash):
            return []
        rule = RULES.get(type(message))
        if rule is None:
            raise LocalError(f"{type(message).__name__} is no message of a round")
        if not self._is_heard(sender, rule.senders):
            return []
        return [*rule.take(self, sender, message, now), *self.tick(now)]

    def _is_heard(self, sender: PeerId, senders: Senders) -> bool:
        """True if `sender` is one of these; nothing is kept of a peer that takes no part."""
        announced = senders is Senders.PARTICIPANTS and sender in self._gathering
        known = self.agreement.electorate if senders is Senders.VOTERS else self.agreement.everyone
        return senders is Senders.ALL or announced or sender in known

    def _receive_change(self, sender: PeerId, change: ViewChange, _now: float) -> list[Effect]:
        self._facts.take_change(sender, change)
        return [*STEPS[ViewChange](self.agreement, sender, change)]

    def _receive_plan(self, sender: PeerId, plan: Plan, now: float) -> list[Effect]:
        if plan == self.plan and sender == plan.planner:
            self._watch.heard(now)
        self._note_origin(sender, plan)
        if not self._in_reach(plan.view) or not self._supersedes(plan):
            return []
        check_plan(plan, sender, self.previous, self._facts.settings, voting=self.agreement.voting)
        self._check_admitted(sender, plan)
        check_entered(sender, plan.view, plan.moves, self.previous, voting=self.agreement.voting)
        check_norms(plan, sender, self._gathering.squares(plan))
        if not self._may_begin(plan):
            raise RemoteError(f"begins one reduction after the other in view {plan.view}", peer=plan.planner)
        self._watch.planned(plan.view)
        follows = not self._is_of_earlier_life(plan) and self._knows_origin(plan)
        effects = self._adopt(plan, now) if follows else []
        # A lead plans in a later view only once a quorum moved there, as it shows, whether or not this node heard them.
        return [*self.agreement.move_to(plan.view), *effects]

    def _check_admitted(self, sender: PeerId, plan: Plan) -> None:
        outside = self._facts.outside
        if outside is not None and not outside.admitted.issuperset(p.peer for p in plan.participants):
            raise RemoteError("a plan with somebody who waits outside", peer=sender)

    def _note_origin(self, sender: PeerId, plan: Plan) -> None:
        """Remember what begins a reduction, whether it is followed or not: revisions are held against it."""
        if plan.origin != NO_HASH or plan.hash in self._origins or len(self._origins) >= ORIGINS_LIMIT:
            return
        with contextlib.suppress(RemoteError):
            check_plan(plan, sender, self.previous, self._facts.settings, voting=self.agreement.voting)
            self._origins[plan.hash] = _fixed(plan)

    def _knows_origin(self, plan: Plan) -> bool:
        """True if this node has seen the plan that began the reduction, by whose hash it signs what it sums.

        Who signed by that of a plan with other weights, or in an earlier life, would be convicted of a lie.
        """
        if plan.origin == NO_HASH:
            return True
        known = self._origins.get(plan.origin)
        if known is not None and known != _fixed(plan):
            raise RemoteError("a revised plan with other participants", peer=plan.planner)
        return known is not None

    def _may_begin(self, plan: Plan) -> bool:
        """Return False where the lead of a view begins more than it may; what came of each is kept."""
        begun = self._begun.get(plan.view, frozenset()) | {plan.lineage}
        if len(begun) > LINEAGES_LIMIT:
            return False
        self._begun = {plan.view: begun}
        return True

    def _receive_evict(self, sender: PeerId, message: Evict, _now: float) -> list[Effect]:
        if sender != self.agreement.lead(message.view):
            raise RemoteError(f"evicted in view {message.view}, which another leads", peer=sender)
        check_entered(sender, message.view, message.moves, self.previous, voting=self.agreement.voting)
        planned = self.plan is not None and (self.plan.view, self.plan.attempt) >= (message.view, message.attempt)
        if not self._in_reach(message.view) or planned:
            return []
        effects: list[Effect] = [*self.agreement.move_to(message.view)]
        # Who has not seen what began the reduction will not follow its revisions: its silence is waited for and ends.
        follows = self.me not in message.evicted and message.lineage in self._origins
        if follows and self._is_news(sender, message):
            effects.append(CloseOff(message.lineage, frozenset(message.evicted)))
        return effects

    def _is_news(self, sender: PeerId, message: Evict) -> bool:
        """True if this was not asked before; an answer is repeated without being asked again.

        Raises RemoteError for more questions in one view than there can be somebody else to evict in each.
        """
        question = message.attempt, message.lineage, message.evicted
        asked = self._asked.get(message.view, frozenset())
        if question not in asked and len(asked) >= MEMBER_LIMIT:
            raise RemoteError(f"evicts again and again in view {message.view}", peer=sender)
        self._asked = {message.view: asked | {question}}
        return question not in asked

    def _is_of_earlier_life(self, plan: Plan) -> bool:
        """True if `plan` counts on this node as it was before a restart: it may have signed under it what it forgot."""
        place = plan.number(self.me)
        return place is not None and self.me not in plan.evicted and plan.participants[place].life != self.life

    def _in_reach(self, view: int) -> bool:
        return 0 <= view - self.agreement.view <= VIEWS_AHEAD_LIMIT

    def _supersedes(self, plan: Plan) -> bool:
        """True if `plan` comes after the one known here. A planner that died may have forgotten its attempts."""
        if self.plan is None or plan.view != self.plan.view:
            return self.plan is None or plan.view > self.plan.view
        forgot = self._planner_died or any(
            p.peer == self.plan.planner and self._gathering.restarted(p) for p in self.plan.participants
        )
        return plan.attempt > self.plan.attempt or (forgot and plan != self.plan)

    def _adopt(self, plan: Plan, now: float) -> list[Effect]:
        facts, before = self._facts, self._facts.plan
        place, mine = plan.number(self.me), self._gathering.get(self.me)
        taking_part = place is not None and self.me not in plan.evicted
        counted = plan.participants[place] if place is not None and taking_part else None
        made = None if mine is None or mine.role != CONTRIBUTOR else mine.root
        if counted is not None and counted.weight and made != counted.root:
            raise RemoteError("a plan with a contribution this node did not announce", peer=plan.planner)
        delegate = plan.delegates.get(self.me) if taking_part else None
        if delegate is not None and (mine is None or mine.delegate != delegate):
            raise RemoteError("a plan with a delegate that this node did not name", peer=plan.planner)
        revised = before is not None and before.lineage == plan.lineage
        if plan.origin == NO_HASH:
            self._origins[plan.hash] = _fixed(plan)
        self._planner_died &= before is not None and before.view == plan.view
        if before is not None:
            losers = facts.accusations.losers(before, plan, facts.alive, facts.suspected, me=self.me)
            turn_rounds = len(self.agreement.electorate) if plan.planner == self.me else 1
            facts.probation.lost(losers, self.previous, turn_rounds=turn_rounds)
            facts.accusations.leave(before, facts.alive, now)
        self.weigh(plan)
        if facts.is_unfair(plan, now):
            self.agreement.doubt(plan.hash)
        facts.reducing_since = facts.reducing_since if revised else now
        facts.plan, facts.planned_at, self._relayed = plan, now, None
        self._lead.adopted(plan)
        held, self._closed_off, facts.held = tuple(facts.held.items()), None, {}
        if not taking_part:
            return [Evicted(plan)]
        return [Repair(plan, held) if revised else StartReduce(plan)]

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: the lead's duties, the timeout of the lead, messages to be sent again."""
        effects: list[Effect] = []
        if self.agreement.certificate is None:
            self._gathering.note_half_ready(self._facts.alive, self.agreement.leaves, now)
            self._facts.look_at_excuses(now)
            self._watch.note_stage(now)
            effects += self._lead_on(now)
            self._watch.note_stage(now)
            effects += self._watch_lead(now)
        return effects + self._say_again(now)

    def _say_again(self, now: float) -> list[Effect]:
        """Own standing messages, where they are due to be sent again; and what a vote lacks is asked for again."""
        said, again = self.current(), False
        if self.agreement.certificate is not None:
            return []
        if said != self._said:
            self._said, self._said_at = said, now
            self._resend_s = WAITING_RESEND_S if self.phase is Phase.TRAIN else RESEND_S
        elif now >= self._said_at + (SILENCE_S / 2 if self._is_waited_for() else self._rest_s()):
            again, waits = True, self.phase in (Phase.TRAIN, Phase.PLAN)
            self._said_at = now
            self._resend_s = WAITING_RESEND_S if waits else min(2 * self._resend_s, RESEND_LIMIT_S)
        effects: list[Effect] = [Broadcast(message) for message in said] if again else []
        if self._asked_at is None:
            self._asked_at = now
        elif now >= self._asked_at + RESEND_S:
            self._asked_at = now
            effects += self.agreement.resume()
        return effects

    def _rest_s(self) -> float:
        return in_crowd(self._resend_s, len(self._facts.alive))

    def _is_waited_for(self) -> bool:
        """True if all may have reported, as others see it, and this lead reduces still, or waits for one whose report
        came to others alone: its plan, again, tells that it lives.
        """
        plan, facts = self.plan, self._facts
        if plan is None or (plan.planner, plan.view) != (self.me, self.agreement.view) or facts.agreement.proposed:
            return False
        if facts.my_report() is not None:
            return facts.is_quorum(facts.reported(plan))
        return facts.remaining(plan) - {self.me} <= facts.reports.get(plan.hash, {}).keys()

    def _lead_on(self, now: float) -> list[Effect]:
        order = self._lead.next_order(now, view_since=self._watch.stage_since)
        if isinstance(order, Plan):
            order = msgspec.structs.replace(order, moves=self.agreement.moves)
            if not self._may_begin(order):  # nobody would follow: another may have more luck
                self._facts.gave_up = order.view
                return []
            return [Broadcast(order), *self._adopt(order, now)]
        if isinstance(order, Eviction):
            return [Broadcast(self._announcement(order)), CloseOff(order.lineage, order.evicted)]
        return [] if order is None else [*self.agreement.propose(order)]

    def _announcement(self, eviction: Eviction) -> Evict:
        return Evict(
            term=self.previous.next_term,
            round=self.round,
            base=self.previous.hash,
            view=eviction.view,
            attempt=eviction.attempt,
            lineage=eviction.lineage,
            evicted=tuple(sorted(eviction.evicted)),
            moves=self.agreement.moves,
        )

    def _watch_lead(self, now: float) -> list[Effect]:
        view = self._watch.wanted_view(now)
        return [] if view is None else [*self.agreement.move_to(view)]


def _ends(way: RelayedWay) -> frozenset[int]:
    return frozenset((way.sender, way.receiver))


def _fixed(plan: Plan) -> tuple[object, ...]:
    """Fields that all revisions of a plan have in common."""
    return plan.participants, plan.clips, plan.aggregate, plan.delegated, plan.codec, plan.numel, plan.chunk_values


# -- where the round stands ------------------------------------------------------------------------------------

PHASES: Sequence[tuple[Phase, Callable[[RoundFacts], bool]]] = (
    (Phase.DECIDED, RoundFacts.is_decided),
    (Phase.CERTIFY, RoundFacts.is_reduced),
    (Phase.REDUCE, RoundFacts.is_planned),
    (Phase.PLAN, RoundFacts.is_announced),
    (Phase.TRAIN, lambda _: True),
)
"""Condition of each phase; the first of them that holds is the one in which the round is."""


# -- what each message leads to --------------------------------------------------------------------------------


class Senders(enum.Enum):
    """Senders from whom a message is heard."""

    ALL = "all"
    PARTICIPANTS = "participants"
    """Members, voters, and whoever announced itself."""
    VOTERS = "voters"


Take = Callable[[RoundMachine, PeerId, Any, float], list[Effect]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Senders of whom a type of message is heard, and what takes it; what is due then is for `RoundMachine.tick`."""

    senders: Senders
    take: Take


def _noted(take: Callable[[RoundFacts, PeerId, Any], None], senders: Senders = Senders.PARTICIPANTS) -> Rule:
    """Note it among the facts of the round, and no more."""
    return _noted_at(lambda facts, sender, message, _now: take(facts, sender, message), senders)


def _noted_at(take: Callable[[RoundFacts, PeerId, Any, float], None], senders: Senders = Senders.PARTICIPANTS) -> Rule:
    """Note it among the facts of the round, with when it came, and no more."""

    def note(machine: RoundMachine, sender: PeerId, message: Any, now: float) -> list[Effect]:
        take(machine._facts, sender, message, now)
        return []

    return Rule(senders, note)


def _agreed(kind: type[Message], senders: Senders = Senders.VOTERS) -> Rule:
    """A step of the agreement."""
    step = STEPS[kind]

    def agree(machine: RoundMachine, sender: PeerId, message: Any, _now: float) -> list[Effect]:
        return [*step(machine.agreement, sender, message)]

    return Rule(senders, agree)


RULES: Mapping[type[Message], Rule] = {
    Ready: _noted(RoundFacts.take_ready, Senders.ALL),
    Plan: Rule(Senders.PARTICIPANTS, RoundMachine._receive_plan),
    Stalled: _noted_at(RoundFacts.take_stalled),
    Relayed: _noted_at(RoundFacts.take_relayed),
    Evict: Rule(Senders.PARTICIPANTS, RoundMachine._receive_evict),
    Held: _noted(RoundFacts.take_held),
    Report: _noted(RoundFacts.take_report),
    Propose: _agreed(Propose),
    Prepare: _agreed(Prepare),
    Vote: _agreed(Vote),
    ViewChange: Rule(Senders.VOTERS, RoundMachine._receive_change),
    Leave: _agreed(Leave),
    Certificate: _agreed(Certificate, Senders.ALL),
    Consent: _noted(RoundFacts.take_consent, Senders.VOTERS),
    AmendConsent: _noted(RoundFacts.take_amend_consent, Senders.VOTERS),
}
"""Messages that are heard of a round until it is decided. The steps are those of `agreement.STEPS`."""
