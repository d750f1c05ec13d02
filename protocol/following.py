"""A member's watch over the lead of its view: how long it waits, and when it moves to the next view.

    the living are no quorum                            ─► wait: nothing can be expected
    its view lacks the votes that it needs              ─► the next view, on the way to where all meet
    the lead's proposal leaves out who reported         ─► the next view, at once, with those Reports
    the lead left, or is accused by enough              ─► the next view, at once
    the lead is dead, and there is something to do for
    it: half of the contributions are there, or all that
    are waited for, or somebody would go back or amend  ─► the same; after `VIEW_SYNC_S` where it was dead before
    others are accused by enough, and it goes on
    with them although it need not                      ─► the same, after `ACT_S`
    the lead went on to another, and proposed nothing   ─► the same
    the lead has not been met, nor anybody moved on     ─► the same, after `VIEW_SYNC_S`
    the lead says nothing for too long (timeouts.py)    ─► the same

When a swarm starts, or a member is started again, links come up one by one, and a quorum is often there before the
lead's. So a lead that this member has not met yet is no dead one. A member that begins a later round with a quorum
has met everyone who lives: whoever is missing then is dead. But a lead that died while all train may be back by the
time that it is needed, and others see it back a moment sooner than this member: who moved on alone would be left out.

Where all meet. A member that moved ahead votes in no lower view. Where the others are a quorum without it they go on,
and it hears of the certificate. Where they are not, their view decides nothing: no plan of its lead, whatever the
attempt, is reported by everyone that is needed. It happens to whose link to the lead comes up late: for a while it sees
a quorum without a lead. Then others leave or die, and it is needed. So each member looks for the lowest view, from its
own on, in which those who live and have not promised more are a quorum (`voting.common_view`), and, as long as nothing
is planned, more than half of the living: half of a swarm that was stopped, and wakes in a view that the others left,
would else count nothing that they made. Every member that knows the same promises finds the same view; who stands
highest of those that are needed is in it already. Moving there is a promise like any other (agreement.py), so this is
about progress alone.

Who is in a view to which no quorum came has nothing to expect there, and waits, as in PBFT: its time begins when they
are there (Castro, Liskov, "Practical Byzantine Fault Tolerance", OSDI 1999, section 4.5.2). Else one that is ahead, and
has less to wait for, would pass all others again and again, and they it.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.protocol import timeouts
from shoal.protocol.facts import RoundFacts
from shoal.protocol.identity import PeerId
from shoal.protocol.leading import RELAY_SETTLE_S, settle_s
from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import HELD_TIMEOUT_S, SILENCE_S, Since, Timeouts, doubled, in_crowd

VIEW_SYNC_S = 2.0
"""So long a member that has a quorum waits for a lead that it has not met since it was started."""
ACT_S = 6.0
"""So much longer than those that remain may take to say what they hold (`HELD_TIMEOUT_S`) a lead has to go on without
whom enough accuse, and in a crowd so much more as it waits longer there for these."""
APART_S = 2.0
"""So long a view has been without the votes that it needs before a member moves: who was lost may be back at once."""


class AccusedFor:
    """For how long somebody has been accused by enough, be it under one plan of a view or under its next ones."""

    def __init__(self) -> None:
        self._since = Since()
        self._accused: frozenset[PeerId] = frozenset()
        self._under: Plan | None = None
        """The plan under which these were accused last."""

    def note(self, accused: Collection[PeerId], plan: Plan | None, now: float) -> float:
        """Return the seconds for which any of these, or of those before them, have been accused; `plan` is in force.

        Under another plan nobody is accused at first: it may be the answer, or none. Who is left in it, and is accused
        again, has been so all the time.
        """
        under = self._under
        if plan is None or (under is not None and under.view != plan.view):
            self._since.at = self._under = under = None
        if plan is not None and accused:
            self._accused, self._under = frozenset(accused), plan
        elif plan is None or under is None or under == plan:
            self._accused = frozenset()
        else:
            self._accused &= {*plan.remaining, plan.planner}
        return self._since.note(bool(self._accused), now)


class LeadWatch:
    """One member's watch over the lead of its view: whether to wait for it, or to want the next view."""

    def __init__(self, facts: RoundFacts) -> None:
        self._facts = facts
        self._timeouts = Timeouts(facts.settings)
        self._others_reported = Since()
        self._lead_accused = AccusedFor()
        self._others_accused = AccusedFor()
        self._apart = Since()
        self._together = Since()
        self._unmet: set[PeerId] | None = None
        self._heard_at = float("-inf")
        self._planned_in = 0
        """The last view in which a lead planned, whether this member follows the plan or not."""

    @property
    def stage_since(self) -> float:
        """Time at which the stage of the view began."""
        return self._timeouts.since

    def look(self) -> None:
        """Note who is alive: whoever was alive once and is not any more is gone."""
        facts = self._facts
        if self._unmet is None:
            begins = facts.previous.round == 0 or not facts.has_quorum()
            self._unmet = set(facts.agreement.electorate) if begins else set()
        self._unmet -= facts.alive

    def heard(self, now: float) -> None:
        """The lead said again what it planned."""
        self._heard_at = now

    def planned(self, view: int) -> None:
        """The lead of `view` planned."""
        self._planned_in = max(self._planned_in, view)

    def note_stage(self, now: float) -> None:
        """Note the stage that the round has come to for this member."""
        facts, plan = self._facts, self._facts.plan
        without_dead = plan is not None and not facts.dead_since.keys().isdisjoint(plan.evicted)
        self._timeouts.note(facts.agreement.view, self._stage(), plan, now, without_dead=without_dead)

    def wanted_view(self, now: float) -> int | None:
        """The view that this member should move to, if any."""
        facts = self._facts
        view = facts.agreement.view
        if not facts.agreement.votes or not facts.has_quorum():
            self._timeouts.renew(now)
            self._apart.at = self._together.at = self._others_reported.at = None
            for accused in (self._lead_accused, self._others_accused):  # who was not here could answer nothing
                accused.note((), None, now)
            return None
        together_s = self._together.note(True, now)
        promised = facts.agreement.promised()
        if view and not facts.is_quorum({facts.me, *(peer for peer, later in promised.items() if later >= view)}):
            self._timeouts.renew(now)
        meeting = facts.meeting_view(planned=self._stage() not in (timeouts.TRAIN, timeouts.PLAN))
        if self._apart.note(meeting > view, now) >= APART_S or facts.agreement.refuses:
            return view + 1  # by steps of its own: nobody's word alone takes a member further
        leader = facts.agreement.lead(view)
        moved_on = any(later > view and peer in facts.alive for peer, later in promised.items())
        may_come = leader in (self._unmet or ()) and together_s < VIEW_SYNC_S
        awaited = not moved_on and (may_come or self._may_be_back(leader, now))
        dead = leader not in facts.alive and not awaited and self._needs_lead()
        gone = dead or leader in facts.leaves or facts.gave_up == view
        gone |= promised.get(leader, 0) > view and not facts.agreement.proposed
        silent = self._is_silent(leader, now)
        idle = self._keeps_the_accused(leader, now)
        if gone or silent or idle or self._is_accused(leader, now) or self._timeouts.over(now):
            return self._next_view(view)
        return None

    @property
    def rests(self) -> bool:
        """True if a quorum is here, and nobody is in another view: nothing is waited for in seconds."""
        return self._apart.at is None and self._facts.has_quorum()

    def _needs_lead(self) -> bool:
        """True if there is something for a lead to do: until then one that is not here may be back in time."""
        facts = self._facts
        asked = facts.consents or facts.amend_consents
        return bool(self._stage() != timeouts.TRAIN or asked or not facts.awaited())

    def _may_be_back(self, leader: PeerId, now: float) -> bool:
        """True if the lead was not here as half of the contributions came, just now: others may see it back already."""
        facts = self._facts
        since = facts.gathering.half_ready_at
        if since is None or facts.plan is not None or facts.consents or facts.amend_consents:
            return False
        return facts.dead_since.get(leader, since) <= since and now - since < VIEW_SYNC_S

    def _stage(self) -> str:
        facts = self._facts
        if facts.agreement.proposed:
            return timeouts.VOTE
        if facts.my_report() is not None:
            return timeouts.PROPOSE
        if facts.plan is not None:
            has_planned = max(facts.plan.view, self._planned_in) >= facts.agreement.view
            return timeouts.REDUCE if has_planned else timeouts.REPLAN
        return timeouts.TRAIN if facts.gathering.half_ready_at is None else timeouts.PLAN

    def _is_accused(self, leader: PeerId, now: float) -> bool:
        """True if enough speak against it, and first did so a moment ago, be it under another plan of this view.

        What was said about a plan of an earlier view is no word against this lead.
        """
        facts, plan = self._facts, self._led_plan(leader)
        accused = plan is not None and facts.accusations.speak_against_lead(
            plan, facts.alive, facts.suspected, facts.ahead()
        )
        waited_s = self._lead_accused.note({leader} if accused else (), plan, now)
        return accused and plan is not None and waited_s >= settle_s(facts, plan, leader)

    def _keeps_the_accused(self, leader: PeerId, now: float) -> bool:
        """True if the lead had its time to go on without others that enough accuse, and plans with them still."""
        facts, plan = self._facts, self._led_plan(leader)
        if plan is None or facts.agreement.proposed:
            self._others_accused.note((), None, now)
            return False
        accused = facts.accusations.believed(plan, facts.alive) - {leader, facts.me}
        may_go = accused if facts.is_quorum(facts.remaining(plan) - accused) else frozenset()
        waited_s = self._others_accused.note(may_go, plan, now)
        patience_s = in_crowd(HELD_TIMEOUT_S + RELAY_SETTLE_S, len(plan.participants)) + ACT_S - RELAY_SETTLE_S
        return bool(may_go) and waited_s >= doubled(patience_s, plan.view)

    def _led_plan(self, leader: PeerId) -> Plan | None:
        """The plan of this view's lead, if that is another than this member and has planned."""
        facts, plan = self._facts, self._facts.plan
        return plan if plan is not None and plan.view == facts.agreement.view and leader != facts.me else None

    def _is_silent(self, leader: PeerId, now: float) -> bool:
        """True if the lead should have proposed, or planned, and either has had its time or cannot be reached."""
        facts, stage = self._facts, self._stage()
        view, plan = facts.agreement.view, facts.plan
        waits = stage == timeouts.PROPOSE and plan is not None and plan.view == view
        all_reported = waits and plan is not None and facts.remaining(plan) - {leader} <= facts.reported(plan)
        waited_s = self._others_reported.note(all_reported and leader != facts.me, now)
        if self._others_reported.at is not None:
            took_s = self._others_reported.at - facts.planned_at
            if min(waited_s, now - self._heard_at) >= doubled(max(SILENCE_S, took_s), view):
                return True
        return stage in (timeouts.PLAN, timeouts.REPLAN, timeouts.PROPOSE) and leader in facts.suspected

    def _next_view(self, view: int) -> int:
        """The next view whose lead is believed alive."""
        facts = self._facts
        for ahead in range(view + 1, view + 1 + len(facts.agreement.electorate)):
            leader = facts.agreement.lead(ahead)
            if leader in facts.alive and leader not in facts.leaves:
                return ahead
        return view + 1
