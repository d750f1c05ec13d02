"""The round machine with members that hang, crawl or accuse each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import CloseOff, Effect, Repair
from shoal.protocol.leading import RELAY_LATE_S, RELAY_SETTLE_S, REPLAN_SETTLE_S
from shoal.protocol.messages import (
    Evict,
    Held,
    Plan,
    Propose,
    Relay,
    ViewChange,
)
from shoal.protocol.planning import check_plan
from shoal.protocol.round import RoundMachine
from shoal.protocol.timeouts import CROWD, HELD_TIMEOUT_S, PROPOSE_TIMEOUT_S, SILENCE_S
from tests.protocol.round_lab import HANG_SEEN_S, RoundLab
from tests.protocol.round_machines import (
    REDUCE_S,
    REPLAN_S,
    ROUND_S,
    accuse,
    planned,
    sends,
)
from tests.protocol.round_node import SETTINGS, report_on

pytestmark = pytest.mark.usefixtures("paper_signatures")


# -- hangs, stalls -------------------------------------------------------------------------------------------


def test_hung_participant_is_evicted_on_the_word_of_two() -> None:
    lab = RoundLab(4, seed=2, stall_s=2.0)
    victim = (lab.lead() + 1) % 4
    lab.run_until(lab.reducing(victim), 10)
    lab.run_for(0.3)
    lab.hang(victim)
    took = lab.run_until(lab.height_of_all(1), 30)
    assert took < 2.0 + REPLAN_S + REDUCE_S + 0.5, "before the failure detector saw it"
    assert lab.members(1) == set(range(4)) - {victim}
    lab.run_for(0.2)  # until nothing is on its way to it any more
    lab.resume(victim)
    lab.run_until(lab.height_of_all(3), 30)
    assert [plan.evicted for plan in lab.nodes[victim].evictions][:1] == [(lab.nodes[victim].peer,)]
    assert victim in lab.members(lab.nodes[victim].height)


def test_hung_lead_is_replaced_when_others_accuse_it() -> None:
    lab = RoundLab(4, seed=4, stall_s=2.0)
    leader = lab.lead()
    lab.run_until(lab.reducing(leader), 10)
    lab.run_for(0.3)
    lab.hang(leader)
    took = lab.run_until(lab.height_of_all(1), 30)
    assert took < 2.0 + REPLAN_S + REDUCE_S + 1.0
    assert lab.plans[lab.value(1).plan].view > 0
    lab.resume(leader)
    lab.run_until(lab.height_of_all(3), 30)
    assert len({node.values[1].hash for node in lab.nodes}) == 1


def test_lead_hung_while_training_is_replaced_once_the_detector_sees_it() -> None:
    lab = RoundLab(3, seed=6)
    leader = lab.lead()
    lab.run_for(0.2)
    lab.hang(leader)
    assert lab.run_until(lab.height_of_all(1), 30) < HANG_SEEN_S + ROUND_S


def test_lead_that_lives_but_never_proposes_is_passed_over() -> None:
    lab = RoundLab(3, seed=1)
    leader = lab.lead()
    lab.intercept = lambda number, effect: () if number == leader and sends(effect, Propose) else None
    lab.nodes[leader].train_s = 1.0
    # Its votes are never sent either, being on a proposal nobody has; it is alive in every other way.
    lab.run_until(lambda: max(node.height for node in lab.nodes) == 1, 60)
    assert SILENCE_S < lab.now < ROUND_S + SILENCE_S + 1.0


def all_but_the_lead_report(lab: RoundLab, machines: list[RoundMachine], leader: int, plan: Plan, now: float) -> None:
    for number, machine in enumerate(machines):
        if number != leader:
            machine.reduced(report_on(plan), now)
            for other in machines:
                if other is not machine and other is not machines[leader]:
                    other.receive(machine.me, lab.signed_report(plan, machine), now)


def moves(effects: Sequence[Effect]) -> bool:
    return any(sends(effect, ViewChange) for effect in effects)


@pytest.mark.parametrize(("took_s", "timeout_s"), [(0.5, SILENCE_S), (5.0, 5.0)])
def test_lead_to_whom_all_have_reported_has_as_long_again_to_propose(took_s: float, timeout_s: float) -> None:
    lab, machines, leader, plan = planned(4)
    reported_at = 1.1 + took_s
    all_but_the_lead_report(lab, machines, leader, plan, reported_at)
    for number, machine in enumerate(machines):
        if number != leader:
            assert not moves(machine.tick(reported_at + timeout_s - 0.1))
            assert moves(machine.tick(reported_at + timeout_s + 0.1))


def test_lead_that_is_still_reducing_says_so_and_is_not_silent() -> None:
    lab, machines, leader, plan = planned(4)
    all_but_the_lead_report(lab, machines, leader, plan, 2.0)
    lead, others = machines[leader], [machine for number, machine in enumerate(machines) if number != leader]
    for other in others:
        lead.receive(other.me, lab.signed_report(plan, other), 2.0)
    now = 2.0
    while now < 2.0 + PROPOSE_TIMEOUT_S - 0.5:
        now += 0.25
        said = any(isinstance(effect, Broadcast) and effect.message == plan for effect in lead.tick(now))
        for other in others:
            effects = other.receive(lead.me, plan, now) if said else other.tick(now)
            assert not moves(effects), now
    assert moves(others[0].tick(now + 1.0)), "but not for ever"


def test_lead_that_falls_silent_after_it_was_heard_is_passed_over() -> None:
    lab, machines, leader, plan = planned(4)
    all_but_the_lead_report(lab, machines, leader, plan, 2.0)
    lead, other = machines[leader], next(machine for number, machine in enumerate(machines) if number != leader)
    other.receive(lead.me, plan, 3.0)
    assert not moves(other.tick(3.0 + SILENCE_S - 0.1))
    assert moves(other.tick(3.0 + SILENCE_S + 0.1))


def test_lead_that_waits_for_a_report_is_not_silent() -> None:
    lab, machines, leader, plan = planned(4)
    late = next(number for number in range(4) if number != leader)
    all_but_the_lead_report(lab, machines, leader, plan, 2.0)
    waiting = next(machine for number, machine in enumerate(machines) if number not in (leader, late))
    del waiting._facts.reports[plan.hash][machines[late].me]
    assert not moves(waiting.tick(2.0 + PROPOSE_TIMEOUT_S - 0.1))
    assert moves(waiting.tick(2.0 + PROPOSE_TIMEOUT_S + 0.1))


def test_lead_whom_the_detector_suspects_is_not_waited_for() -> None:
    _, machines, leader, plan = planned(4)
    members, suspect = [machine.me for machine in machines], machines[leader].me
    member = next(machine for number, machine in enumerate(machines) if number != leader)
    assert not moves(member.peers_alive(members, 1.2, suspected=[suspect])), "in a reduction others have to say so too"
    assert moves(member.reduced(report_on(plan), 1.3))


def test_lone_accuser_is_not_believed() -> None:
    _, machines, leader, plan = planned(4)
    accuser, accused, second = (machines[n] for n in range(4) if n != leader)
    lead = machines[leader]
    assert lead.receive(accuser.me, accuse(plan, accused.me), 2.0) == []
    lead.tick(2.0 + 0.9 * RELAY_SETTLE_S)
    assert lead.plan == plan
    second_at = 2.0 + 0.9 * RELAY_SETTLE_S
    lead.receive(second.me, accuse(plan, accused.me), second_at)
    effects = lead.tick(second_at + REPLAN_SETTLE_S)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{accused.me}]


def test_lead_that_two_accuse_is_left_a_moment_later_unless_one_takes_it_back() -> None:
    for takes_back in (False, True):
        _, machines, leader, plan = planned(4)
        member, one, two = (machine for number, machine in enumerate(machines) if number != leader)
        for accuser in (one, two):
            assert not moves(member.receive(accuser.me, accuse(plan, plan.planner), 2.0))
        if takes_back:
            member.receive(two.me, accuse(plan), 2.0 + REPLAN_SETTLE_S / 2)
        assert not moves(member.tick(2.0 + 0.9 * REPLAN_SETTLE_S))
        assert moves(member.tick(2.0 + REPLAN_SETTLE_S)) != takes_back


@pytest.mark.parametrize("accused_again", [False, True])
def test_lead_that_plans_again_when_two_accuse_it_is_left_if_they_do_again(accused_again: bool) -> None:
    """Its plan may be an answer; one that does so each time would else be left never."""
    _, machines, leader, plan = planned(4)
    member, one, two = (machine for number, machine in enumerate(machines) if number != leader)
    for accuser in (one, two):
        assert not moves(member.receive(accuser.me, accuse(plan, plan.planner), 2.0))
    places = sorted((plan.number(one.me) or 0, plan.number(two.me) or 0))
    relays = (Relay(places[0], places[1], plan.number(member.me) or 0),)
    again = msgspec.structs.replace(plan, attempt=1, origin=plan.hash, relays=relays)
    effects = member.receive(plan.planner, again, 2.0 + REPLAN_SETTLE_S / 2)
    assert any(isinstance(effect, Repair) for effect in effects)
    assert not moves(member.tick(9.0))
    effects = []
    for accuser in (one, two) if accused_again else ():
        effects += member.receive(accuser.me, accuse(again, plan.planner), 10.0)
    assert moves(effects) == accused_again, "at once, lest it plan again before the moment is over"


def test_in_a_crowd_a_lone_accusation_stands_for_longer_before_the_two_are_led_through_a_third() -> None:
    _, machines, leader, plan = planned(2 * CROWD)
    accuser, accused, *_ = (machines[n] for n in range(2 * CROWD) if n != leader)
    lead = machines[leader]
    assert lead.receive(accuser.me, accuse(plan, accused.me), 2.0) == []
    lead.tick(2.0 + 2 * RELAY_SETTLE_S - 0.1)
    assert lead.plan == plan
    (repair,) = (e for e in lead.tick(2.0 + 2 * RELAY_SETTLE_S) if isinstance(e, Repair))
    assert len(repair.plan.relays) == 1


def test_who_may_yet_answer_does_not_go_along_with_one_who_died() -> None:
    """Two of many accuse it, as where its router failed; its own word has as long as without that death."""
    _, machines, leader, plan = planned(9)
    lead = machines[leader]
    accused, dead, *others = (machines[n] for n in range(9) if n != leader)
    for one in others[:2]:
        lead.receive(one.me, accuse(plan, accused.me), 2.0)
    effects = lead.peers_alive([machine.me for machine in machines if machine is not dead], 2.0)
    effects += lead.tick(2.0 + REPLAN_SETTLE_S)
    assert {effect.evicted for effect in effects if isinstance(effect, CloseOff)} == {frozenset({dead.me})}
    effects = lead.tick(2.0 + RELAY_SETTLE_S)
    assert {effect.evicted for effect in effects if isinstance(effect, CloseOff)} == {frozenset({dead.me, accused.me})}


def test_in_a_crowd_a_participant_has_longer_to_say_what_it_holds() -> None:
    _, machines, leader, plan = planned(2 * CROWD)
    lead = machines[leader]
    gone, slow, *others = (machines[n] for n in range(2 * CROWD) if n != leader)
    for one in others[:CROWD]:
        lead.receive(one.me, accuse(plan, gone.me), 2.0)
    effects = lead.tick(2.0 + REPLAN_SETTLE_S)
    (asked,) = (effect for effect in effects if isinstance(effect, CloseOff))
    (evict,) = (effect.message for effect in effects if sends(effect, Evict))
    since = 2.0 + REPLAN_SETTLE_S
    lead.closed_off(asked, (), since)
    for one in others:
        (asked,) = (effect for effect in one.receive(lead.me, evict, since) if isinstance(effect, CloseOff))
        (held,) = (effect.message for effect in one.closed_off(asked, (), since) if sends(effect, Held))
        lead.receive(one.me, held, since)
    waited = lead.tick(since + 2 * HELD_TIMEOUT_S - 0.1)
    assert not [effect for effect in waited if isinstance(effect, CloseOff)]
    late = lead.tick(since + 2 * HELD_TIMEOUT_S + 0.1)
    assert [effect.evicted for effect in late if isinstance(effect, CloseOff)] == [{gone.me, slow.me}]


def test_lone_accuser_is_believed_of_whom_the_detector_suspects_too() -> None:
    _, machines, leader, plan = planned(4)
    accuser, accused, _ = (machines[n] for n in range(4) if n != leader)
    lead, alive = machines[leader], [m.me for m in machines]
    assert lead.peers_alive(alive, 2.0, suspected=[accused.me]) == [], "suspicion alone evicts nobody"
    lead.receive(accuser.me, accuse(plan, accused.me), 2.1)
    effects = lead.tick(2.1 + REPLAN_SETTLE_S)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{accused.me}]


def test_pair_of_which_one_accuses_the_other_is_relayed_through_each_third_and_then_the_accuser_evicted() -> None:
    """The thirds say nothing: they have their time, and then who has nobody's word but its own goes."""
    _, machines, leader, plan = planned(4)
    accuser, accused, third = (machines[n] for n in range(4) if n != leader)
    lead, now, via = machines[leader], 2.0, set()
    pair = {plan.number(accuser.me), plan.number(accused.me)}
    for attempt in (1, 2):
        assert lead.plan is not None
        assert lead.receive(accuser.me, accuse(lead.plan, accused.me), now) == []
        if attempt > 1:  # a relay may run late
            now += RELAY_LATE_S
            assert not any(isinstance(effect, Repair | CloseOff) for effect in lead.tick(now))
        now += RELAY_SETTLE_S
        (repair,) = (e for e in lead.tick(now) if isinstance(e, Repair))
        assert (repair.plan.attempt, repair.plan.lineage, repair.plan.evicted) == (attempt, plan.hash, ())
        assert (repair.plan.owners, repair.plan.standing) == (plan.owners, ())
        (relay,) = repair.plan.relays
        assert {relay.one, relay.other} == pair
        via.add(relay.via)
        check_plan(repair.plan, lead.me, lead.previous, SETTINGS)
    assert via == {plan.number(lead.me), plan.number(third.me)}
    assert lead.plan is not None
    lead.receive(accuser.me, accuse(lead.plan, accused.me), now)
    evictions = [e.evicted for e in lead.tick(now + RELAY_SETTLE_S + RELAY_LATE_S) if isinstance(e, CloseOff)]
    assert evictions == [{accuser.me}]


def test_owner_that_accuses_another_is_not_blamed_for_its_late_finals() -> None:
    _, machines, leader, plan = planned(5)
    blocked, silent, one, two = (machines[n] for n in range(5) if n != leader)
    lead = machines[leader]
    late = msgspec.structs.replace(accuse(plan), late=(blocked.me,))
    for other in (one, two):
        lead.receive(other.me, late, 2.0)
    effects = lead.tick(2.0 + REPLAN_SETTLE_S)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{blocked.me}], "nobody else is to blame"

    _, machines, leader, plan = planned(5)
    lead = machines[leader]
    lead.receive(blocked.me, accuse(plan, silent.me), 2.0)
    for other in (one, two):
        lead.receive(other.me, msgspec.structs.replace(accuse(plan), late=(blocked.me,)), 2.0)
    lead.tick(2.1)
    assert lead.plan == plan
    lead.receive(two.me, accuse(plan, silent.me), 2.2)
    effects = lead.tick(2.2 + REPLAN_SETTLE_S)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{silent.me}]


def test_nobody_accuses_itself_out_of_the_round() -> None:
    _, machines, leader, plan = planned(4)
    one, two, _ = (machines[n] for n in range(4) if n != leader)
    lead = machines[leader]
    lead.receive(one.me, accuse(plan, one.me), 2.0)
    lead.tick(5.0)
    assert lead.plan == plan
    lead.receive(two.me, accuse(plan, one.me), 5.0)
    lead.tick(5.1)
    assert lead.plan == plan, "its own word does not count"


def test_accusations_about_another_plan_do_not_count() -> None:
    _, machines, leader, plan = planned(4)
    one, two, three = (machines[n] for n in range(4) if n != leader)
    lead = machines[leader]
    old = msgspec.structs.replace(plan, attempt=7)
    lead.receive(one.me, accuse(old, three.me), 2.0)
    lead.receive(two.me, accuse(old, three.me), 2.0)
    lead.tick(5.0)
    assert lead.plan == plan


def test_word_against_the_lead_of_a_plan_is_none_against_the_next_lead() -> None:
    """Two nodes whose words about an old plan accuse each other must not chase one another through the views."""
    _, machines, leader, _ = planned(3)
    one, two = machines[leader], machines[(leader + 1) % 3]
    for machine in (one, two):
        machine.peers_alive([one.me, two.me], 1.9)  # the third has died
    pending = [(two, e) for e in one.stalled([two.me], (), 2.0)] + [(one, e) for e in two.stalled([one.me], (), 2.0)]
    for _ in range(60):
        if pending:
            receiver, effect = pending.pop(0)
            if isinstance(effect, Broadcast) and not isinstance(effect.message, Plan):
                sender = two if receiver is one else one
                pending += [(sender, e) for e in receiver.receive(sender.me, effect.message, 2.1)]
    assert one.agreement.view <= 2
    assert two.agreement.view <= 2


def test_reduction_slower_than_the_deadline_is_given_longer() -> None:
    lab = RoundLab(3, seed=1, reduce_s=1.6 * SETTINGS.reduce_deadline_s, stall_s=1000.0)
    lab.run_until(lab.height_of_all(1), 6 * SETTINGS.reduce_deadline_s)
    assert lab.members(1) == {0, 1, 2}
