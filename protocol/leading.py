"""The lead's part in a round: close the set, plan, repair the reduction when somebody is lost, propose.

    a quorum would go back, and the state is here                     ─► Value (a rollback)
    no plan yet        most are in this view, all who have seats ready, no newcomer coming,
                       or half ready and the grace is over            ─► Plan
    another's plan     which nobody signs for in this view            ─► the same
    few seats          and nothing counts of those who have them      ─► a new Plan, with the next in the line
    reducing           somebody lost                                  ─► Eviction, then the revised Plan
                       one accuses another, alone                     ─► the Plan with a relay (below)
                       too few of the participants left, or some that
                       a dead lead did not tell of its plan           ─► a new Plan over everyone there is
    a quorum reported  everyone else too, or their grace is over      ─► Value (with what a quorum would amend, and
                                                                          bans of those proven to have lied)

Safety never depends on any of it (see agreement.py).

Lone accusations. The two are given another path, and another, until it shows who is at fault:

    a lone accusation stands for RELAY_SETTLE_S, and   ─► the pair is led through a third
    longer in a crowd
    it is repeated there, and the third has spoken,
    or has not for that and RELAY_LATE_S               ─► through the next third
    no third is left, or enough were tried             ─► one of the two goes (`Accusations.loser`)

Where enough thirds agree before, `Accusations.believed` says so. Whom the lead listens to is limited too: who is the
accuser in THIRDS_LIMIT of such plans has its accusation settled as if no third were left. So a liar that accuses one
after the other comes to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from shoal.protocol.accusations import THIRDS_LIMIT, Dispute, Pair, RelayChoice, pair_of
from shoal.protocol.amending import with_amendment
from shoal.protocol.bans import with_bans
from shoal.protocol.facts import RoundFacts
from shoal.protocol.identity import PeerId
from shoal.protocol.lateness import LATE_LIMIT_S, WAITED_TIMES
from shoal.protocol.messages import MEMBER_LIMIT, Plan, Ready, Relay, Value
from shoal.protocol.planning import (
    CONTRIBUTOR,
    Deal,
    Eviction,
    PlanOrder,
    make_plan,
    reroute_plan,
    revise_plan,
    separated,
)
from shoal.protocol.seats import first_by_group
from shoal.protocol.terms import make_rollback
from shoal.protocol.timeouts import HELD_TIMEOUT_S, OVERDUE_SETTLE_S, Accrued, Since, in_crowd
from shoal.protocol.voting import holds_state

RELAY_SETTLE_S = 3.0
"""Time that a lone accusation stands before the lead believes that the fault lies between the two, longer in a crowd:
enough for the failure detector to suspect who is silent altogether."""
PAUSE_S = 1.0
"""Who accuses somebody again after no longer has done so all the while. In a longer one others are heard."""
RELAY_LATE_S = WAITED_TIMES * LATE_LIMIT_S
"""By so much more a relay may run late than who accuses: until then its silence says nothing."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The `losers` go; if there are none, the reduction goes on with these `relays`."""

    losers: frozenset[PeerId]
    relays: tuple[Relay, ...]


class Disputes:
    """One lead's handling of the lone accusations of a round."""

    def __init__(self, facts: RoundFacts) -> None:
        self.relay_choice = RelayChoice(facts.me)
        self._facts = facts
        self._stood: Accrued[PeerId] = Accrued(pause_s=PAUSE_S)
        """By accuser, for how long it has accused somebody alone, be it one after the other."""
        self._heeded: dict[PeerId, int] = {}
        """By accuser, the plans that were made on its word."""

    def adopted(self, plan: Plan) -> None:
        """All that stood was about another plan."""
        self._stood = Accrued(pause_s=PAUSE_S)
        self.relay_choice.note(plan)

    def rule(self, plan: Plan, now: float, *, overdue: bool) -> Ruling | None:
        """Return the ruling that is due, if any. overdue: the reduction has had its time; nothing is waited for."""
        facts = self._facts
        disputes = facts.accusations.disputes(plan, facts.alive)
        self._stood.look({accuser for accuser, _ in disputes}, now)
        due = {one for one in disputes if overdue or self._is_due(plan, one)}
        if not due:
            return None
        relayed = plan.relayed.keys()
        pairs = {pair_of(*one) for one in disputes if one in due or pair_of(*one) not in relayed}
        relays, without = self.relay_choice.around(plan, pairs, facts.alive)
        losers = self._losers(plan, [one for one in due if self._is_spent(one, without)], disputes)
        if not losers and relays == plan.relays:
            return None
        if not losers:
            for accuser in {one[0] for one in disputes if pair_of(*one) in pairs - without}:
                self._heeded[accuser] = self._heeded.get(accuser, 0) + 1
        return Ruling(losers, relays)

    def _is_due(self, plan: Plan, dispute: Dispute) -> bool:
        facts, stood_s = self._facts, self._stood.seconds(dispute[0])
        spoken = facts.accusations.spoken_of(plan, dispute, facts.alive)
        late_s = RELAY_LATE_S if pair_of(*dispute) in plan.relayed else 0.0
        return spoken or stood_s >= in_crowd(RELAY_SETTLE_S, len(plan.participants)) + late_s

    def _is_spent(self, dispute: Dispute, without: Collection[Pair]) -> bool:
        """True if nothing more is tried about it."""
        return pair_of(*dispute) in without or self._heeded.get(dispute[0], 0) >= THIRDS_LIMIT

    def _losers(self, plan: Plan, spent: Collection[Dispute], disputes: Collection[Dispute]) -> frozenset[PeerId]:
        """Choose peers to evict so that none of the disputes that are `spent` is left.

        Of each it takes the one that is in more of all disputes, since a liar is in all of its own; else as relays say.
        Never this node, which gives up the lead instead.
        """
        facts, losers = self._facts, set[PeerId]()
        left = sorted(spent, key=lambda one: (-self._stood.seconds(one[0]), one))
        while left:
            pairs = {pair_of(*one) for one in disputes if losers.isdisjoint(one)}
            if not self.relay_choice.has_tried(pair_of(*left[0])):  # all thirds were taken: by whom?
                pairs |= {pair for pair in plan.relayed if losers.isdisjoint(pair)}
            counts = Counter(peer for pair in pairs for peer in pair)
            one, other = sorted(left[0], key=lambda peer: -counts[peer])
            loser = one if counts[one] > counts[other] else facts.accusations.loser(plan, left[0], facts.alive)
            if loser == facts.me and left[0][::-1] in left:
                loser = next(peer for peer in left[0] if peer != facts.me)
            losers.add(loser)
            left = [one for one in left if loser not in one]
        if facts.me in losers:
            facts.gave_up = facts.agreement.view
        return frozenset(losers) - {facts.me}


REPLAN_SETTLE_S = 0.2
"""Time that the lead waits after a death, or the second word against somebody, for what was already on its way:
reports, other deaths, the word of the accused."""
TRY_AGAIN_S = 1.0
"""Before those that are too few without whom they lost are tried once more, as they are, after they were; then twice as
long, and so on: who would help may be on its way, and in one view a lead may begin only so many reductions."""
REPORT_GRACE_S = 3.0
REPORT_GRACE_LIMIT_S = 30.0
"""A lead with a quorum of reports waits for the other living participants half as long again as the reduction took,
but no less and no more than this."""

Order = Plan | Value | Eviction


def settle_s(facts: RoundFacts, plan: Plan, peer: PeerId) -> float:
    """Time that is waited after `peer` was lost, or accused by enough: where a few accuse it, longer for its own word.

    It may miss them too, and hear of the plan, or be heard, later than others.
    """
    if peer in facts.alive - facts.suspected - facts.ahead() and facts.accusations.may_answer(plan, peer, facts.alive):
        return in_crowd(RELAY_SETTLE_S, len(plan.participants))
    return REPLAN_SETTLE_S


@dataclass(slots=True)
class _Tried:
    """Those that a lead tried once more although it had lost some of them, when, and how long it rests before the next
    time with the same.
    """

    view: int = -1
    peers: frozenset[PeerId] = frozenset()
    at: float = 0.0
    rest_s: float = 0.0

    def rests(self, view: int, peers: Collection[PeerId], now: float) -> bool:
        """True if the same were tried just now."""
        return self.has(view, peers) and now - self.at < self.rest_s

    def note(self, view: int, peers: Collection[PeerId], now: float) -> None:
        """They are tried."""
        self.rest_s = 2 * self.rest_s if self.has(view, peers) else TRY_AGAIN_S
        self.view, self.peers, self.at = view, frozenset(peers), now

    def has(self, view: int, peers: Collection[PeerId]) -> bool:
        """True if it was these, in this view, that were tried last."""
        return (self.view, self.peers) == (view, frozenset(peers))


class Lead:
    """The lead's part of a round: what it has to do next. Asked of every node: of one that does not lead, nothing."""

    def __init__(self, facts: RoundFacts, deal: Deal) -> None:
        self._facts = facts
        self._deal = deal
        self._disputes = Disputes(facts)
        self._blamed: dict[PeerId, float] = {}
        self._quorum_reported = Since()
        self._tried = _Tried()
        self.eviction: Eviction | None = None

    def adopted(self, plan: Plan) -> None:
        """Everything else was about another plan."""
        self._quorum_reported.at = None
        self.eviction = None
        self._blamed = {}
        self._disputes.adopted(plan)

    def next_order(self, now: float, *, view_since: float) -> Order | None:
        """Return the order that is due now, if any; `view_since` is when the stage of the view began."""
        facts = self._facts
        if not facts.agreement.free_to_plan or not facts.has_quorum():
            self.eviction = None
            return None
        plan, rollback = facts.plan, self._rollback()
        if rollback is not None:
            return rollback
        if plan is None or facts.agreement.doubts(plan.hash):
            return self._close_set(now)
        if facts.agreement.counts_nobody(plan.hash):
            return self._begin_another(plan, frozenset(plan.evicted), now)
        reported, lost = facts.reported(plan), facts.lost(plan)
        self._blamed = {peer: self._blamed.get(peer, now) for peer in facts.blamed(plan)}
        lost -= {peer for peer in lost if self._may_answer(plan, peer, now)}
        waited_s = self._quorum_reported.note(facts.is_quorum(reported), now)
        if self._quorum_reported.at is not None:
            took_s = self._quorum_reported.at - facts.planned_at
            grace_s = min(max(took_s / 2, REPORT_GRACE_S), REPORT_GRACE_LIMIT_S)
            if facts.remaining(plan) - lost <= reported or waited_s >= grace_s:
                return self._value(plan, reported)
        overdue = self._overdue(plan, now)
        if self.eviction is not None and self.eviction.view == facts.agreement.view:
            return self._repair(plan, self.eviction, lost, now)
        if overdue:
            lost |= facts.blamed(plan, overdue=True) - {facts.me}
        if (overdue and lost) or self._settled(plan, lost, now, view_since):
            return self._go_on_without(plan, lost, now)
        return self._settle(plan, now, overdue=overdue)

    # -- planning ---------------------------------------------------------------------------------------------

    def _close_set(self, now: float) -> Plan | None:
        facts = self._facts
        half_ready_at = facts.gathering.half_ready_at
        overdue = half_ready_at is not None and now - half_ready_at >= facts.settings.grace_s
        most_are_elsewhere = facts.meeting_view(planned=False) > facts.agreement.view
        if most_are_elsewhere or (facts.awaited() and not overdue) or facts.waits_for_newcomers(now):
            return None
        facts.newcomers.planned(facts.previous, now)
        return self._plan_over(facts.candidates(), attempt=0, evicted=())

    def _plan_over(self, candidates: dict[PeerId, Ready], *, attempt: int, evicted: tuple[PeerId, ...]) -> Plan | None:
        facts, returners = self._facts, self._facts.gathering.returners
        weighty = facts.gathering.weighty(candidates)
        contributors = [p for p, r in candidates.items() if r.role == CONTRIBUTOR and r.tokens and p in weighty]
        if not contributors or not facts.is_quorum(candidates.keys()):
            return None
        groups = facts.agreement.electorate, facts.seating.first(candidates), facts.previous.members, returners
        candidates = {p: candidates[p] for p in first_by_group(candidates, groups, MEMBER_LIMIT)}
        plan = make_plan(
            facts.previous,
            self._plan_order(attempt, evicted),
            candidates,
            weightless=candidates.keys() - weighty,
            settings=facts.settings,
            deal=self._deal,
            line=facts.seating.line,
        )
        return self._relayed(plan)

    def _plan_order(self, attempt: int, evicted: tuple[PeerId, ...]) -> PlanOrder:
        facts = self._facts
        return PlanOrder(view=facts.agreement.view, attempt=attempt, planner=facts.me, evicted=evicted)

    def _next_attempt(self, plan: Plan) -> int:
        return plan.attempt + 1 if plan.view == self._facts.agreement.view else 0

    # -- repairing --------------------------------------------------------------------------------------------

    def _overdue(self, plan: Plan, now: float) -> bool:
        """True if the reduction took too long altogether."""
        return self._facts.is_overdue(plan, now - OVERDUE_SETTLE_S)

    def _settled(self, plan: Plan, lost: set[PeerId], now: float, view_since: float) -> bool:
        """True if somebody was lost, or the plan is of a lead that was replaced, and a moment passed since."""
        since = [self._facts.dead_since.get(p, self._blamed.get(p, self._facts.planned_at)) for p in lost]
        if plan.view < self._facts.agreement.view:
            since.append(view_since)
        return any(now - at >= REPLAN_SETTLE_S for at in since)

    def _may_answer(self, plan: Plan, peer: PeerId, now: float) -> bool:
        """True if it is accused by enough, and its own word is waited for still."""
        patience_s = settle_s(self._facts, plan, peer)
        return patience_s > REPLAN_SETTLE_S and now - self._blamed.get(peer, float("-inf")) < patience_s

    def _go_on_without(
        self, plan: Plan, lost: set[PeerId], now: float, *, parted: Collection[PeerId] = ()
    ) -> Order | None:
        """Repair the reduction if those who remain are enough; else begin another with everyone there is.

        `parted` cannot go on with others in this reduction; nothing keeps them out of another.
        """
        facts = self._facts
        evicted = frozenset({*plan.evicted, *lost, *parted})
        remaining = facts.remaining(plan) - evicted
        if facts.me in remaining and facts.is_quorum(remaining):
            attempt = self._next_attempt(plan)
            if evicted == set(plan.evicted) and attempt:
                return reroute_plan(
                    plan, self._plan_order(attempt, plan.evicted), plan.relays
                )  # only its deadline doubles
            self.eviction = Eviction(facts.agreement.view, attempt, plan.lineage, evicted, now)
            return self.eviction
        return self._begin_another(plan, evicted - frozenset(parted), now)

    def _begin_another(self, plan: Plan, evicted: frozenset[PeerId], now: float) -> Plan | None:
        """Begin another reduction with everyone there is but these."""
        facts, candidates = self._facts, self._facts.candidates()
        self.eviction = None
        kept = {p: r for p, r in candidates.items() if p not in evicted - {facts.me}}
        if not facts.is_quorum(kept.keys()):
            # Too few without them: whoever is alive is tried again rather than nobody going on.
            view, again = facts.agreement.view, self._tried.has(facts.agreement.view, candidates)
            if again and facts.is_quorum(kept.keys() | (facts.ahead() & facts.alive)):
                facts.gave_up = view  # with those in a later view they are enough, and go on there
            if facts.gave_up == view or self._tried.rests(view, candidates, now):
                return None
            kept = candidates
        gone = tuple(sorted(evicted - kept.keys()))
        another = self._plan_over(kept, attempt=self._next_attempt(plan), evicted=gone)
        if another is not None and kept is candidates:
            self._tried.note(facts.agreement.view, candidates, now)
        return another

    def _repair(self, plan: Plan, eviction: Eviction, lost: set[PeerId], now: float) -> Order | None:
        """Collect what everyone holds; then say what stands and who does the rest."""
        facts = self._facts
        remaining = facts.remaining(plan) - eviction.evicted - lost
        silent = {p for p in remaining if not eviction.answered_by(facts.held.get(p))}
        held_s = in_crowd(HELD_TIMEOUT_S, len(plan.participants))
        late = silent - {facts.me} if now - eviction.since >= held_s else set()
        gone = {*lost, *late} - eviction.evicted
        unaware = self._unaware(plan, eviction, gone)
        if unaware:
            return self._begin_another(plan, eviction.evicted | (gone - unaware), now)
        if gone:
            return self._go_on_without(plan, {*eviction.evicted, *gone}, now)
        if silent:
            return None
        helds = {p: facts.held[p] for p in remaining}
        parted = eviction.parted(helds, facts.me)
        if parted:
            order = self._go_on_without(plan, {*eviction.evicted, *lost}, now, parted=parted)
            self.eviction = self.eviction or eviction  # it is not asked for again while too few are here to plan
            return order
        plan_order = self._plan_order(eviction.attempt, tuple(sorted(eviction.evicted)))
        revised = revise_plan(plan, plan_order, helds, self._deal)
        return revised if plan.view == facts.agreement.view else self._relayed(revised)

    def _relayed(self, plan: Plan) -> Plan:
        """The plan with relays between those that do not reach each other, and no others.

        Another lead, whose plan it may have been, may have led whom it likes through itself, and dropped it all.
        """
        bare = msgspec.structs.replace(plan, relays=())
        there = {peer: ready for peer, ready in self._facts.candidates().items() if peer in plan.remaining}
        relays, _ = self._disputes.relay_choice.around(bare, separated(there), self._facts.alive)
        return msgspec.structs.replace(bare, relays=relays)

    def _unaware(self, plan: Plan, eviction: Eviction, gone: Collection[PeerId]) -> set[PeerId]:
        """Find those of `gone` who say and send nothing because they never saw the plan: its lead died telling it.

        They came to the view in which they are asked, so they hear. While nobody holds a final, another reduction with
        them takes no longer than this one without them.
        """
        facts = self._facts
        view, answers = facts.agreement.view, {p for p, held in facts.held.items() if eviction.answered_by(held)}
        if plan.view == view or any(facts.held[peer].chunks for peer in answers):
            return set()
        promised = facts.agreement.promised()
        return {p for p in facts.candidates().keys() & set(gone) - answers if promised.get(p) == view}

    def _settle(self, plan: Plan, now: float, *, overdue: bool) -> Order | None:
        """Do what is due about lone accusations; without any, give a reduction that is overdue more time."""
        ruling = self._disputes.rule(plan, now, overdue=overdue)
        if ruling is None:
            return self._go_on_without(plan, set(), now) if overdue else None
        if ruling.losers:
            return self._go_on_without(plan, set(ruling.losers), now)
        return reroute_plan(plan, self._plan_order(self._next_attempt(plan), plan.evicted), ruling.relays)

    # -- proposing --------------------------------------------------------------------------------------------

    def _value(self, plan: Plan, reported: set[PeerId]) -> Value:
        facts = self._facts
        report, previous = facts.reports[plan.hash][facts.me], facts.previous
        voters = facts.agreement.electorate
        value = Value(
            swarm=previous.swarm,
            term=previous.next_term,
            round=previous.next_round,
            base=previous.hash,
            plan=plan.hash,
            planner=facts.me,
            members=tuple(sorted(sorted(reported, key=lambda p: (p not in voters, p))[:MEMBER_LIMIT])),
            leaves=tuple(sorted(set(facts.leaves).intersection(facts.agreement.voting.may_leave(previous)))),
            bitmaps=report.bitmaps,
            tokens=report.tokens,
            digest=report.digest,
            counted=facts.agreement.counted_by(plan.hash),
            enlisted=msgspec.UNSET if facts.outside is None else facts.outside.due(),
        )
        returners = sorted(facts.gathering.returners)
        lately = (*sorted(voters), *previous.members, *returners, *(p.peer for p in plan.participants))
        value = with_bans(value, facts.proven, facts.banned, lately)
        amendment = facts.agreed_amendment()
        if amendment is None:
            return value
        consents = [one for one in facts.amend_consents.items() if one[1].amendment == amendment]
        amended = with_amendment(value, consents)
        return amended if holds_state(amended, voting=facts.agreement.voting) else value

    def _rollback(self) -> Value | None:
        facts = self._facts
        target = facts.agreed_target()
        digest = None if target is None else facts.agreement.digest_of(target)
        if target is None or digest is None:
            return None
        consents = {peer: consent for peer, consent in facts.consents.items() if consent.target == target}
        voting = facts.agreement.voting
        return make_rollback(
            facts.previous, facts.me, target, consents, digest=digest, leaves=facts.leaves, voting=voting
        )
