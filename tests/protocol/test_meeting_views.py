"""Members that came to different views meet again: nobody climbs past the others for as long as they climb past it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from shoal.protocol import chain as chains
from shoal.protocol.agreement import Broadcast
from shoal.protocol.durable import ABSTAIN, DurableRecord
from shoal.protocol.effects import MemberEffect
from shoal.protocol.following import ACT_S
from shoal.protocol.leading import REPORT_GRACE_S, Order
from shoal.protocol.messages import Evict, Plan, Prepare, Propose, Ready, Report, ViewChange, Vote
from shoal.protocol.planning import CONTRIBUTOR, PlanOrder, reroute_plan
from shoal.protocol.round import RoundMachine
from shoal.protocol.timeouts import HELD_TIMEOUT_S, PLAN_TIMEOUT_S, VOTE_TIMEOUT_S
from shoal.protocol.voting import FaultModel, Voting
from tests.protocol import round_lab, round_node
from tests.protocol.lab import paper_identities
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_node import SETTINGS

pytestmark = pytest.mark.usefixtures("paper_signatures")

SLOW_S = 100.0
TRAIN_S, REDUCED_S = 1.0, 2.0
STALL_S, AGAIN_S = 4.0, 6.0
GRACE_S, REDUCE_S = 10.0, 120.0
SOON_S = 60.0
REPLAN_LIMIT_S = 2 * (GRACE_S + PLAN_TIMEOUT_S + HELD_TIMEOUT_S)
"""In view 1."""


@pytest.fixture(autouse=True)
def _as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times that `shoal init` writes, and a slower clock."""
    monkeypatch.setattr(round_lab, "TICK_S", 0.5)
    monkeypatch.setattr(round_node, "SETTINGS", replace(SETTINGS, grace_s=GRACE_S, reduce_deadline_s=REDUCE_S))


def leads_of(lab: RoundLab) -> list[int]:
    lab.run_for(0.2)
    return [lab.lead(view) for view in range(len(lab.nodes))]


def beside_a_liar(monkeypatch: pytest.MonkeyPatch) -> tuple[RoundLab, list[int]]:
    """Four named voters of which one may lie, and in which order they lead."""
    voters = tuple(sorted(identity.peer_id for identity in paper_identities(4)))
    monkeypatch.setattr(chains, "CONTRIBUTORS", Voting(FaultModel.LYING, voters))
    lab = RoundLab(4, train_s=TRAIN_S, reduce_s=REDUCED_S, seed=1)
    return lab, leads_of(lab)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("down_s", [300.0, 900.0])
def test_who_was_alone_with_one_that_may_not_sign_goes_on_with_the_first_that_is_back(
    place: int, down_s: float
) -> None:
    """It counts for a quorum whoever lives, also who abstains after a torn log, and has climbed for all that time."""
    lab = RoundLab(3, reduce_s=2.0)
    torn = leads_of(lab)[place]
    down, alone = (number for number in leads_of(lab) if number != torn)
    node, head = lab.nodes[torn], lab.nodes[torn].chain.head
    lab.kill(torn)
    lab.run_for(0.2)
    node.log.append(DurableRecord(kind=ABSTAIN, term=head.next_term, round=head.next_round))
    lab.restart(torn)
    lab.kill(down)
    lab.run_for(down_s)
    assert node.running().agreement.abstains
    lab.restart(down)
    assert lab.run_until(lab.height_of([down, alone], 1), down_s) < SOON_S


@pytest.mark.parametrize("place", [1, 2, 3])
def test_who_left_the_view_of_those_that_train_longer_does_not_pass_them_for_ever(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A liar says to the quick one alone that it contributes, and later to all, and nothing more ever."""
    lab, order = beside_a_liar(monkeypatch)
    liar = order[place]
    quick, *slow = (number for number in order[1:] + order[:1] if number != liar)
    for node in lab.nodes:
        node.train_s = SLOW_S if node.number in slow else 1.0
        node.trained_at = lab.now + node.train_s
    says_to = [{quick}]

    def lies(number: int, effect: MemberEffect) -> Collection[int] | None:
        if number != liar or not isinstance(effect, Broadcast):
            return None
        if isinstance(effect.message, ViewChange | Prepare | Vote | Report | Propose | Plan):
            return set()
        contributes = isinstance(effect.message, Ready) and effect.message.role == CONTRIBUTOR
        return says_to[0] if contributes else None

    def tell_all() -> None:
        says_to[0] = {number for number in order if number != liar}
        for message in lab.nodes[liar].running().current():
            if isinstance(message, Ready):
                lab.broadcast(liar, message)

    lab.intercept = lies
    takes_part = lab._takes_part
    monkeypatch.setattr(lab, "_takes_part", lambda number, *seen: number != liar and takes_part(number, *seen))
    lab.after(SLOW_S - 0.5, tell_all)
    honest = [number for number in order if number != liar]
    took_s = lab.run_until(lab.height_of(honest, 1), 3000)
    assert took_s < SLOW_S + SOON_S + (REPLAN_LIMIT_S if place == 1 else 0.0)


def test_lead_of_a_later_view_that_orders_nothing_has_no_time_for_a_whole_reduction() -> None:
    """It was killed, and its log is torn: it signs nothing, and so it leads nothing."""
    lab = RoundLab(5, reduce_s=REDUCED_S)
    first, second, *rest = leads_of(lab)
    node, head = lab.nodes[second], lab.nodes[second].chain.head
    lab.kill(second)
    lab.run_for(0.2)
    node.log.append(DurableRecord(kind=ABSTAIN, term=head.next_term, round=head.next_round))
    lab.restart(second)
    lab.run_until(lab.reducing(first), 20)
    lab.run_for(0.5)
    lab.kill(first)
    assert lab.run_until(lab.height_of(rest, 1), 10 * REDUCE_S) < REPLAN_LIMIT_S + 3 * REDUCED_S


@pytest.mark.parametrize("heard_by", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [2, 3])
def test_report_that_came_to_one_alone_makes_nobody_leave_a_lead_that_waits_for_it(
    heard_by: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead waits for who has not reported to it; one that heard that report waits for the lead."""
    lab, order = beside_a_liar(monkeypatch)
    liar, only = order[place], order[heard_by]

    def lies(number: int, effect: MemberEffect) -> Collection[int] | None:
        if number != liar or not isinstance(effect, Broadcast):
            return None
        if isinstance(effect.message, Report):
            return {only} - {liar}
        return set() if isinstance(effect.message, ViewChange | Prepare | Vote | Propose) else None

    lab.intercept = lies
    honest = [number for number in order if number != liar]
    assert lab.run_until(lab.height_of(honest, 1), 600) < TRAIN_S + REDUCED_S + REPORT_GRACE_S + VOTE_TIMEOUT_S + 2.0


@pytest.mark.parametrize("untold", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_lead_that_goes_on_with_whom_enough_accuse_is_left(
    untold: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plans with one that it does not tell of it, and may plan so again and again, or say nothing more."""
    lab, order = beside_a_liar(monkeypatch)
    liar, out = order[0], order[untold]
    first: list[Plan] = []

    def lies(number: int, effect: MemberEffect) -> Collection[int] | None:
        if number != liar or not isinstance(effect, Broadcast):
            return None
        message = effect.message
        if isinstance(message, Plan) and not message.view:
            first.append(message)
            return set(order) - {liar, out} if again or message == first[0] else set()
        return set() if isinstance(message, ViewChange | Prepare | Vote | Propose | Evict | Plan) else None

    lab.intercept = lies
    if again:
        liars = lab.nodes[liar].running()
        monkeypatch.setattr(liars._lead, "next_order", replanning(liars, liars._lead.next_order))
    honest = [number for number in order if number != liar]
    left_after_s = 2 * STALL_S + HELD_TIMEOUT_S + ACT_S
    views_s = TRAIN_S + left_after_s + VOTE_TIMEOUT_S * 2 + 4 * REDUCED_S + 2 * REPORT_GRACE_S
    assert lab.run_until(lab.height_of(honest, 1), 600) < views_s


def replanning(machine: RoundMachine, honest: Callable[..., Order | None]) -> Callable[..., Order | None]:
    """Another plan with the same participants every few seconds, in place of what an honest lead would do."""
    last = [0.0]

    def order(now: float, *, view_since: float) -> Order | None:
        plan = machine.plan
        if plan is None or plan.planner != machine.me:
            return honest(now, view_since=view_since)
        if now - last[0] < AGAIN_S:
            return None
        last[0] = now
        return reroute_plan(
            plan, PlanOrder(view=0, attempt=plan.attempt + 1, planner=machine.me, evicted=plan.evicted), plan.relays
        )

    return order
