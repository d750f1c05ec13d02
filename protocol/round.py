"""The round machine: one node's part in one round, from ready to certificate, sans-IO.

Theory. A round passes through phases; each waits for one thing, under a deadline:

    phase      waits for                             ends with
    TRAIN      this node's own contribution          `ready(contributor)`
    PLAN       the lead's plan                       a Plan          -> StartReduce
    REDUCE     the finals of the plan's chunks       `reduced(...)`  -> Report
    CERTIFY    the lead's proposal, then votes       a quorum        -> Decided
    DECIDED    -

The lead of the view has the extra duties of `_lead_duties`: close the set, plan, plan again without the dead, and
propose once every living participant reported. A lead that dies or dawdles is replaced by moving to the next view;
safety never depends on who leads (see agreement.py). A member that is late is still a participant of weight zero: it
receives the finals, votes, and stays a member; its contribution counts in the next round.

Time enters only as the `now` of each call, in seconds of a monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.protocol import patience
from shoal.protocol.agreement import (
    VIEWS_AHEAD_LIMIT,
    Agreement,
    AgreementEffect,
    Broadcast,
    Decided,
    DurableRecord,
    FreeToPlan,
    Mismatch,
    NeedFinals,
    Persist,
)
from shoal.protocol.certificate import is_quorum, leave_needs_promise
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    Certificate,
    Leave,
    Message,
    Plan,
    Propose,
    Ready,
    Report,
    RoundMessage,
    Stalled,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.patience import Patience
from shoal.protocol.planning import (
    CONTRIBUTOR,
    OBSERVER,
    ROLES,
    TRAINING,
    Deal,
    PlanSeat,
    RoundSettings,
    check_plan,
    make_plan,
)

RESEND_S = 3.0
"""Own standing messages are sent again this often until the round is decided."""
REPLAN_SETTLE_S = 0.2
"""How long after a death the lead waits for reports that were already on their way."""
REPORT_GRACE_S = 5.0
"""How long a lead with a quorum of reports waits for the other living participants."""
READIES_LIMIT = 4 * MEMBER_LIMIT
"""Outsiders beyond this many are not listened to; members always are."""
PLANS_LIMIT = 64
"""Plans of one round that one peer may report on."""


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Close any reduction under way and start this one."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Evicted:
    """The lead planned without this node: stop reducing, wait for the certificate, then catch up."""

    plan: Plan


Effect = Persist | Broadcast | NeedFinals | Mismatch | Decided | StartReduce | Evicted


class Phase(enum.Enum):
    """Where the round stands for this node."""

    TRAIN = "train"
    PLAN = "plan"
    REDUCE = "reduce"
    CERTIFY = "certify"
    DECIDED = "decided"


class RoundMachine:
    """One node's part in round `previous.round + 1`.

    `state` is the digest of S(e-1) held here; `returners` those who were members lately, whose weight counts although
    they are not in the electorate.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        previous: Value,
        state: bytes,
        settings: RoundSettings,
        deal: Deal,
        returners: Iterable[PeerId] = (),
    ) -> None:
        self.me = identity.peer_id
        self.previous = previous
        self.round = previous.round + 1
        self.agreement = Agreement(identity=identity, previous=previous)
        self.plan: Plan | None = None
        self._state = state
        self._settings = settings
        self._deal = deal
        self._returners = frozenset(returners) | frozenset(previous.members)
        self._alive: frozenset[PeerId] = frozenset({self.me})
        self._dead_since: dict[PeerId, float] = {}
        self._readies: dict[PeerId, Ready] = {}
        self._reports: dict[bytes, dict[PeerId, Report]] = {}
        self._stalled: dict[bytes, dict[PeerId, frozenset[PeerId]]] = {}
        self._half_ready_at: float | None = None
        self._planned_at = 0.0
        self._planner_died = False
        self._quorum_reported_at: float | None = None
        self._patience = Patience(settings)
        self._resend_at: float | None = None

    # -- inputs of this node ---------------------------------------------------------------------------------

    def restore(self, records: Iterable[DurableRecord]) -> list[Effect]:
        """Take up what this node bound itself to before a restart, and what it still has to do about it."""
        self.agreement.restore(records)
        return self._of_agreement(self.agreement.resume())

    def ready(self, ready: Ready, now: float) -> list[Effect]:
        """Announce this node's role or its finished contribution."""
        self._take_ready(self.me, ready)
        return [Broadcast(ready), *self.tick(now)]

    def reduced(self, report: Report, now: float) -> list[Effect]:
        """All finals of a plan are here and lead to this digest."""
        effects: list[Effect] = [Broadcast(report)]
        self._reports.setdefault(report.plan, {})[self.me] = report
        effects += self._of_agreement(self.agreement.computed(report))
        return [*effects, *self.tick(now)]

    def stalled(self, peers: Iterable[PeerId], now: float) -> list[Effect]:
        """The reduction under way has had nothing from these peers for the stall deadline."""
        if self.plan is None:
            return []
        message = Stalled(
            term=self.previous.term,
            round=self.round,
            base=self.previous.hash,
            plan=self.plan.hash,
            peers=tuple(sorted(peers)),
        )
        self._stalled.setdefault(self.plan.hash, {})[self.me] = frozenset(message.peers)
        return [Broadcast(message), *self.tick(now)]

    def peers_alive(self, alive: Iterable[PeerId], now: float) -> list[Effect]:
        """The members believed alive changed."""
        before, self._alive = self._alive, frozenset(alive) | {self.me}
        for peer in before - self._alive:
            self._dead_since.setdefault(peer, now)
            self._planner_died |= self.plan is not None and peer == self.plan.planner
            self._readies.pop(peer, None)  # it may return without its contribution; if it has it, it says so again
        for peer in self._alive:
            self._dead_since.pop(peer, None)
        return self.tick(now)

    def leave(self, now: float) -> list[Effect]:
        """Promise to take no further part, if that is still possible in this round."""
        return [*self._of_agreement(self.agreement.leave()), *self.tick(now)]

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the round stands for this node."""
        if self.agreement.certificate is not None:
            return Phase.DECIDED
        if self.plan is not None and self.plan.number(self.me) is not None:
            return Phase.CERTIFY if self._my_report() else Phase.REDUCE
        mine = self._readies.get(self.me)
        return Phase.PLAN if mine is not None and mine.role != TRAINING else Phase.TRAIN

    def missing(self) -> tuple[PeerId, ...]:
        """The electorate's members that are not here."""
        return tuple(p for p in self.previous.members if p not in self._alive and p not in self.agreement.leaves)

    def has_quorum(self) -> bool:
        """Whether the living members could certify this round."""
        return is_quorum(self.previous, self._alive - self.agreement.leaves, self.agreement.leaves)

    def leave_needs_promise(self) -> bool:
        """Whether this node must promise its leave, or may simply go."""
        return leave_needs_promise(self.previous, self.me, self._alive, self.agreement.leaves)

    def nobody_trains(self) -> bool:
        """Whether no living member is making a contribution or has made one."""
        busy = (p for p, r in self._readies.items() if r.role in (CONTRIBUTOR, TRAINING) and p in self._alive)
        return not any(p in self._returners for p in busy)

    def current(self) -> list[Message]:
        """Everything a peer that just connected should hear from this node."""
        messages: list[Message] = []
        if self.agreement.certificate is None:
            if self.me in self._readies:
                messages.append(self._readies[self.me])
            if self.plan is not None and self.plan.planner == self.me:
                messages.append(self.plan)
            report = self._my_report()
            if report is not None:
                messages.append(report)
        return messages + self.agreement.current()

    def _my_report(self) -> Report | None:
        return None if self.plan is None else self._reports.get(self.plan.hash, {}).get(self.me)

    # -- what others say -------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Take a message of this round from `sender`, whose signature on it has been checked.

        Raises RemoteError when it breaks the protocol; the machine is unchanged then.
        """
        if self.agreement.certificate is not None:
            return []
        if isinstance(message, RoundMessage) and (message.round, message.base) != (self.round, self.previous.hash):
            return []
        effects: list[Effect] = []
        if isinstance(message, Ready):
            self._receive_ready(sender, message)
        elif isinstance(message, Plan):
            effects = self._receive_plan(sender, message, now)
        elif isinstance(message, Report):
            self._take_report(sender, message)
        elif isinstance(message, Stalled):
            if _room_for(self._stalled, sender):
                self._stalled.setdefault(message.plan, {})[sender] = frozenset(message.peers) - {sender}
        elif isinstance(message, Propose | Vote | ViewChange | Leave | Certificate):
            if isinstance(message, ViewChange) and message.report is not None:
                self._take_report(sender, message.report)
            effects = self._of_agreement(self.agreement.receive(sender, message))
        else:
            raise LocalError(f"{type(message).__name__} is no message of a round")
        return [*effects, *self.tick(now)]

    def _receive_ready(self, sender: PeerId, ready: Ready) -> None:
        if ready.role not in ROLES:
            raise RemoteError(f"unknown role {ready.role!r}", peer=sender)
        known = self._readies.get(sender)
        if known is not None and known.role == CONTRIBUTOR and ready.role == CONTRIBUTOR and known.root != ready.root:
            raise RemoteError("two contributions in one round", peer=sender)
        self._take_ready(sender, ready)

    def _take_ready(self, sender: PeerId, ready: Ready) -> None:
        # A contribution stands, except that a node that restarted and lost it withdraws it by becoming an observer.
        known = self._readies.get(sender)
        if known is None and len(self._readies) >= READIES_LIMIT and sender not in self.previous.members:
            return
        if known is None or known.role != CONTRIBUTOR or ready.role == OBSERVER:
            self._readies[sender] = ready

    def _take_report(self, sender: PeerId, report: Report) -> None:
        if (report.round, report.base) == (self.round, self.previous.hash) and _room_for(self._reports, sender):
            self._reports.setdefault(report.plan, {})[sender] = report

    def _receive_plan(self, sender: PeerId, plan: Plan, now: float) -> list[Effect]:
        ahead = plan.view - self.agreement.view
        if not 0 <= ahead <= VIEWS_AHEAD_LIMIT or not self._supersedes(plan):
            return []
        check_plan(plan, sender, self.previous, self._settings)
        effects = self._adopt(plan, now)
        # A lead plans in a later view only once a quorum moved there, whether or not this node heard them.
        return [*self._of_agreement(self.agreement.move_to(plan.view)), *effects]

    def _supersedes(self, plan: Plan) -> bool:
        """Whether `plan` comes after the one known here. A planner that died may have forgotten its attempts."""
        if self.plan is None or plan.view != self.plan.view:
            return self.plan is None or plan.view > self.plan.view
        return plan.attempt > self.plan.attempt or (self._planner_died and plan != self.plan)

    def _adopt(self, plan: Plan, now: float) -> list[Effect]:
        place = plan.number(self.me)
        mine = self._readies.get(self.me)
        seat = None if place is None else plan.participants[place]
        if seat is not None and seat.weight and (mine is None or mine.root != seat.root):
            raise RemoteError("a plan with a contribution this node did not announce", peer=plan.planner)
        self._planner_died &= self.plan is not None and self.plan.view == plan.view
        self.plan = plan
        self._planned_at = now
        self._quorum_reported_at = None
        return [Evicted(plan) if seat is None else StartReduce(plan)]

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Whatever is due: the lead's duties, patience with the lead, messages to be sent again."""
        effects: list[Effect] = []
        if self.agreement.certificate is None:
            self._note_half_ready(now)
            self._note_stage(now)
            effects += self._lead_duties(now)
            self._note_stage(now)
            effects += self._watch_lead(now)
        if self._resend_at is None:
            self._resend_at = now + RESEND_S
        elif now >= self._resend_at and self.agreement.certificate is None:
            self._resend_at = now + RESEND_S
            effects += [Broadcast(message) for message in self.current()]
        return effects

    def _of_agreement(self, effects: Iterable[AgreementEffect]) -> list[Effect]:
        # FreeToPlan needs no carrying out: `_lead_duties` asks the agreement itself whether it may plan.
        return [effect for effect in effects if not isinstance(effect, FreeToPlan)]

    # -- the lead --------------------------------------------------------------------------------------------

    def _candidates(self) -> dict[PeerId, Ready]:
        """Everyone who may be in a plan: alive, announced, on the same state, not on the way out."""
        return {
            peer: ready
            for peer, ready in self._readies.items()
            if peer in self._alive and peer not in self.agreement.leaves and ready.state == self._state
        }

    def _note_half_ready(self, now: float) -> None:
        if self._half_ready_at is None:
            trainers = self._awaited() | {p for p, r in self._readies.items() if r.role == CONTRIBUTOR}
            done = [p for p in trainers if p in self._readies and self._readies[p].role == CONTRIBUTOR]
            if done and 2 * len(done) >= len(trainers):
                self._half_ready_at = now

    def _awaited(self) -> set[PeerId]:
        """Living trainers that have not announced a contribution yet."""
        settled = {p for p, r in self._readies.items() if r.role != TRAINING}
        members = {p for p in self.previous.members if p in self._alive} - self.agreement.leaves
        training = {p for p, r in self._readies.items() if r.role == TRAINING and p in self._alive}
        return (members | (training & self._returners)) - settled

    def _lead_duties(self, now: float) -> list[Effect]:
        if not self.agreement.free_to_plan or not self.has_quorum():
            return []
        if self.plan is None:
            return self._close_set(now)
        reported = self._reported(self.plan)
        living = {p.peer for p in self.plan.participants if p.peer in self._alive} - self.agreement.leaves
        lost = self._lost(self.plan)
        if is_quorum(self.previous, reported, self.agreement.leaves):
            self._quorum_reported_at = now if self._quorum_reported_at is None else self._quorum_reported_at
            if living <= reported or now - self._quorum_reported_at >= REPORT_GRACE_S:
                return self._propose(self.plan, reported)
        elif self._must_plan_again(self.plan, lost, now):
            return self._plan_again(self.plan, lost, now)
        return []

    def _must_plan_again(self, plan: Plan, lost: set[PeerId], now: float) -> bool:
        """Someone was lost, the plan is of a lead that was replaced, or it has taken too long altogether."""
        since = [self._dead_since.get(p, self._planned_at) for p in lost]
        if plan.view < self.agreement.view:
            since.append(self._patience.since)
        return any(now - at >= REPLAN_SETTLE_S for at in since) or (
            now - self._planned_at >= self._patience.reduce_deadline_s(plan)
        )

    def _close_set(self, now: float) -> list[Effect]:
        overdue = self._half_ready_at is not None and now - self._half_ready_at >= self._settings.grace_s
        if self._awaited() and not overdue:
            return []
        return self._plan_over(self._candidates(), now, attempt=0, evicted=())

    def _plan_again(self, plan: Plan, lost: set[PeerId], now: float) -> list[Effect]:
        evicted = {*plan.evicted, *lost} - {self.me}
        candidates = self._candidates()
        kept = {p: r for p, r in candidates.items() if p not in evicted}
        if not is_quorum(self.previous, kept, self.agreement.leaves):
            # Too few without them: whoever is alive is tried again rather than nobody going on.
            kept, evicted = candidates, evicted - candidates.keys()
        attempt = plan.attempt + 1 if plan.view == self.agreement.view else 0
        return self._plan_over(kept, now, attempt=attempt, evicted=tuple(sorted(evicted)))

    def _plan_over(
        self, candidates: dict[PeerId, Ready], now: float, *, attempt: int, evicted: tuple[PeerId, ...]
    ) -> list[Effect]:
        contributors = [p for p, r in candidates.items() if r.role == CONTRIBUTOR and r.tokens and p in self._returners]
        if not contributors or not is_quorum(self.previous, candidates, self.agreement.leaves):
            return []
        by_standing = sorted(candidates, key=lambda p: (p not in self.previous.members, p not in self._returners, p))
        candidates = {p: candidates[p] for p in by_standing[:MEMBER_LIMIT]}
        seat = PlanSeat(view=self.agreement.view, attempt=attempt, planner=self.me, evicted=evicted)
        plan = make_plan(
            self.previous,
            seat,
            candidates,
            weightless=candidates.keys() - self._returners,
            settings=self._settings,
            deal=self._deal,
        )
        return [Broadcast(plan), *self._adopt(plan, now)]

    def _reported(self, plan: Plan) -> set[PeerId]:
        """Participants whose digest of this plan is the same as this node's."""
        reports = self._reports.get(plan.hash, {})
        mine = reports.get(self.me)
        if mine is None:
            return set()
        same = {p for p, r in reports.items() if (r.digest, r.bitmaps) == (mine.digest, mine.bitmaps)}
        return {p for p in same if plan.number(p) is not None} - self.agreement.leaves

    def _lost(self, plan: Plan) -> set[PeerId]:
        """Participants that died, left, or are accused by enough of the others."""
        peers = {p.peer for p in plan.participants}
        return ((peers - self._alive) | (peers & self.agreement.leaves) | self._accused(plan)) - {self.me}

    def _accused(self, plan: Plan) -> set[PeerId]:
        """Accused of stalling by two living participants, or by the only other one."""
        accusations = self._stalled.get(plan.hash, {})
        living = {p.peer for p in plan.participants if p.peer in self._alive}
        needed = 2 if len(living) > 2 else 1
        return {
            peer
            for peer in living
            if sum(peer in accused for accuser, accused in accusations.items() if accuser in living) >= needed
        }

    def _propose(self, plan: Plan, reported: set[PeerId]) -> list[Effect]:
        report = self._reports[plan.hash][self.me]
        value = Value(
            swarm=self.previous.swarm,
            term=self.previous.term,
            round=self.round,
            base=self.previous.hash,
            plan=plan.hash,
            planner=self.me,
            members=tuple(sorted(reported)),
            leaves=tuple(sorted(self.agreement.leaves.intersection(self.previous.members))),
            bitmaps=report.bitmaps,
            tokens=sum(p.tokens for p in plan.participants),
            digest=report.digest,
        )
        return self._of_agreement(self.agreement.propose(value))

    # -- patience with the lead ------------------------------------------------------------------------------

    def _note_stage(self, now: float) -> None:
        self._patience.note(self.agreement.view, self._stage(), self.plan, now)

    def _stage(self) -> str:
        if self.agreement.proposed:
            return patience.VOTE
        if self._my_report() is not None:
            return patience.PROPOSE
        if self.plan is not None:
            return patience.REDUCE
        return patience.TRAIN if self._half_ready_at is None else patience.PLAN

    def _watch_lead(self, now: float) -> list[Effect]:
        view = self.agreement.view
        if not self.agreement.member or not self.has_quorum():
            self._patience.renew(now)
            return []
        leader = self.agreement.lead(view)
        gone = leader not in self._alive or leader in self.agreement.leaves
        # What was said about a plan of an earlier view is no word against the lead of this one.
        accused = self.plan is not None and self.plan.view == view and leader in self._accused(self.plan) - {self.me}
        if not gone and not accused and not self._patience.over(now):
            return []
        return self._of_agreement(self.agreement.move_to(self._next_view(view)))

    def _next_view(self, view: int) -> int:
        """The next view whose lead is believed alive."""
        for ahead in range(view + 1, view + 1 + len(self.previous.members)):
            leader = self.agreement.lead(ahead)
            if leader in self._alive and leader not in self.agreement.leaves:
                return ahead
        return view + 1


def _room_for(table: Mapping[bytes, Mapping[PeerId, object]], sender: PeerId) -> bool:
    """Whether a sender may add to a table keyed by plan: nobody fills it with plans that do not exist."""
    return sum(sender in row for row in table.values()) < PLANS_LIMIT


def _seat(plan: Plan) -> tuple[int, int]:
    return plan.view, plan.attempt
