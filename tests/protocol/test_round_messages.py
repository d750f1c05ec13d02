"""The rules of the round machine, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import pytest

from shoal.lab.signed import moves_of
from shoal.protocol.accusations import PLANS_LIMIT, WORDS_LIMIT
from shoal.protocol.agreement import Broadcast, DurableRecord, NeedFinals, Persist
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.leading import REPLAN_SETTLE_S, REPORT_GRACE_S
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    ChunkResults,
    Evict,
    Held,
    Message,
    OwnedRange,
    Plan,
    Propose,
    Ready,
    Rebase,
    Report,
    RoundMessage,
    Stalled,
    ViewChange,
    domain_hash,
)
from shoal.protocol.peering import SwarmMessage
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, absent_ready
from shoal.protocol.round import RESEND_S, RULES, WAITING_RESEND_S, Phase, RoundMachine
from shoal.protocol.timeouts import CROWD, HELD_TIMEOUT_S
from tests.protocol.lab import PaperIdentity, value_of
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_machines import contribution, machines_of, planned, sends
from tests.protocol.round_node import SETTINGS, deal_evenly

pytestmark = pytest.mark.usefixtures("paper_signatures")


# -- rules of the machine, message by message ----------------------------------------------------------------


def test_second_contribution_and_unknown_role_are_blamed() -> None:
    _, machines = machines_of(2)
    one, two = machines
    two.receive(one.me, contribution(one), 0.1)
    two.receive(one.me, contribution(one), 0.2)
    with pytest.raises(RemoteError, match="two contributions"):
        two.receive(one.me, contribution(one, root=domain_hash("other")), 0.3)
    with pytest.raises(RemoteError, match="unknown role"):
        two.receive(one.me, contribution(one, role="king"), 0.3)


def test_plan_with_a_contribution_never_announced_is_blamed() -> None:
    _, machines, leader, plan = planned(3)
    other = machines[(leader + 1) % 3]
    place = plan.number(other.me)
    assert place is not None
    forged = list(plan.participants)
    forged[place] = msgspec.structs.replace(forged[place], root=domain_hash("forged"))
    with pytest.raises(RemoteError, match="did not announce"):
        other.receive(plan.planner, msgspec.structs.replace(plan, attempt=1, participants=tuple(forged)), 2.0)
    assert other.plan == plan


def returned(lab: RoundLab, machine: RoundMachine) -> RoundMachine:
    """The machine of the same node after a restart that nobody noticed; everyone else lives."""
    identity = next(node.identity for node in lab.nodes if node.peer == machine.me)
    again = RoundMachine(
        identity=identity,
        previous=machine.previous,
        state=machine.previous.digest,
        life=domain_hash("second life"),
        settings=SETTINGS,
        deal=deal_evenly,
    )
    again.peers_alive([node.peer for node in lab.nodes], 1.5)
    return again


def announced(effects: Sequence[Effect]) -> Ready:
    (ready,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Ready)]
    return ready


def late_member_planned() -> tuple[RoundLab, list[RoundMachine], int, int, Plan]:
    """Three machines and the plan that they follow, which names one of them, that still trained, without weight."""
    lab, machines = machines_of(3)
    leader = lab.lead()
    late = (leader + 1) % 3
    readies = [contribution(machine) for machine in machines]
    absent = absent_ready(TRAINING, machines[late].previous, machines[late].previous.digest)
    readies[late] = announced(machines[late].ready(absent, 1.0))
    for sender, ready in zip(machines, readies, strict=True):
        if sender is not machines[late]:
            sender.ready(ready, 1.0)
        for machine in machines:
            if machine is not sender:
                machine.receive(sender.me, ready, 1.0)
    effects = machines[leader].tick(1.0 + SETTINGS.grace_s)
    (plan,) = [e.plan for e in effects if isinstance(e, StartReduce)]
    for machine in machines:
        if machine is not machines[leader]:
            assert StartReduce(plan) in machine.receive(plan.planner, plan, 1.1)
    return lab, machines, leader, late, plan


def test_plan_names_the_lives_that_were_announced() -> None:
    _, machines, _, late, plan = late_member_planned()
    assert {p.peer: p.life for p in plan.participants} == {machine.me: machine.life for machine in machines}
    assert [p.peer for p in plan.participants if p.weight == 0] == [machines[late].me]


@pytest.mark.parametrize("contributes", [False, True])
def test_node_that_was_restarted_does_not_reduce_under_a_plan_of_its_earlier_life(contributes: bool) -> None:
    if contributes:
        lab, machines, leader, plan = planned(3)
        number = (leader + 1) % 3
        again = returned(lab, machines[number])
        ready = contribution(again)  # the very same one: it was on disk
    else:
        lab, machines, leader, number, plan = late_member_planned()
        again = returned(lab, machines[number])
        ready = absent_ready(TRAINING, again.previous, again.previous.digest)
    lead = machines[leader]
    said = announced(again.ready(ready, 1.5))
    assert said.life == again.life
    later = msgspec.structs.replace(plan, attempt=1)
    for old in (plan, later):
        assert again.receive(plan.planner, old, 1.6) == []
        assert again.plan is None
    # Nobody noticed that it was gone; the lead goes on without it as soon as it hears its announcement.
    effects = lead.receive(again.me, said, 1.1 + SETTINGS.grace_s + REPLAN_SETTLE_S)
    assert CloseOff(plan.hash, frozenset({again.me})) in effects
    assert lead._gathering.get(again.me) == said
    place = plan.number(lead.me)
    assert place is not None
    evicted = msgspec.structs.replace(
        plan, attempt=1, evicted=(again.me,), origin=plan.hash, owners=(OwnedRange(place, 0, plan.chunks),)
    )
    assert again.receive(plan.planner, evicted, 2.0) == [Evicted(evicted)]


def test_plan_of_this_life_is_followed_after_a_restart() -> None:
    lab, machines, _, late, plan = late_member_planned()
    again = returned(lab, machines[late])
    again.ready(absent_ready(TRAINING, again.previous, again.previous.digest), 1.5)
    named = [msgspec.structs.replace(p, life=again.life) if p.peer == again.me else p for p in plan.participants]
    fresh = msgspec.structs.replace(plan, attempt=1, participants=tuple(named))
    assert again.receive(plan.planner, fresh, 1.6) == [StartReduce(fresh)]


def test_lead_that_was_restarted_unnoticed_plans_anew_and_is_followed() -> None:
    lab, machines, leader, plan = planned(3)
    lead = returned(lab, machines[leader])
    others = [machine for machine in machines if machine is not machines[leader]]
    effects = [*lead.ready(contribution(lead), 1.5)]
    for other in others:
        effects += lead.receive(other.me, contribution(other), 1.6)
    (fresh,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Plan)]
    assert (fresh.view, fresh.attempt) == (plan.view, plan.attempt)
    assert fresh.lineage != plan.lineage, "or what it signs would be about the same chunks as before"
    for other in others:
        assert other.receive(lead.me, fresh, 1.7) == [], "a second plan of one life"
        other.receive(lead.me, announced(effects), 1.7)
        assert other.receive(lead.me, fresh, 1.7) == [StartReduce(fresh)]
        assert other.receive(lead.me, plan, 1.8) == []


def test_older_plan_does_not_replace_a_newer() -> None:
    _, machines, leader, plan = planned(3)
    other = machines[(leader + 1) % 3]
    newer = msgspec.structs.replace(plan, attempt=2)
    assert other.receive(plan.planner, newer, 2.0) == [StartReduce(newer)]
    assert other.receive(plan.planner, plan, 2.1) == []
    assert other.plan == newer


def test_planner_that_died_and_forgot_its_attempts_is_listened_to() -> None:
    _, machines, leader, plan = planned(3)
    followers = (machines[n] for n in range(3) if n != leader)
    other, third = sorted(followers, key=lambda machine: machine.me == machine.previous.planner)
    second = msgspec.structs.replace(plan, attempt=1)
    assert other.receive(plan.planner, second, 2.0) == [StartReduce(second)]
    afresh = msgspec.structs.replace(
        plan, participants=plan.participants[1:], owners=deal_evenly([(1, 1)] * 2, plan.chunks)
    )
    assert other.receive(plan.planner, afresh, 2.1) == [], "an older one that was late"
    other.agreement.leaves.add(third.me)  # keeps it from moving on by itself: alone it is no quorum
    other.peers_alive([other.me], 2.2)
    other.agreement.leaves.clear()
    other.peers_alive([m.me for m in machines], 2.3)
    effects = other.receive(plan.planner, afresh, 2.4)
    assert [type(e) for e in effects] in ([StartReduce], [Evicted])
    assert other.plan == afresh
    assert other.receive(plan.planner, afresh, 2.5) == []


def test_plan_of_a_later_view_is_followed_into_it() -> None:
    """Its lead planned with a quorum behind it, whose messages were lost here: an own older plan is over."""
    lab, machines, leader, plan = planned(3)
    lead = machines[leader]
    second = lab.number(lead.agreement.lead(1))
    later = msgspec.structs.replace(plan, view=1, attempt=0, planner=machines[second].me)
    with pytest.raises(RemoteError, match="no quorum is shown"):
        lead.receive(later.planner, later, 2.0)
    assert lead.agreement.view == 0
    moves = moves_of([node.identity for node in lab.nodes if node.peer != lead.me], lead.previous, 1)
    later = msgspec.structs.replace(later, moves=moves)
    effects = lead.receive(later.planner, later, 2.0)
    assert [e.record.kind for e in effects if isinstance(e, Persist)] == ["promise"]
    assert StartReduce(later) in effects
    assert lead.agreement.view == 1
    assert [e for e in lead.tick(2.5) if isinstance(e, StartReduce)] == []
    assert lead.plan == later


def test_evicted_node_is_told() -> None:
    _, machines, leader, plan = planned(3)
    other = machines[(leader + 1) % 3]
    rest = tuple(p for p in plan.participants if p.peer != other.me)
    without = msgspec.structs.replace(
        plan, attempt=1, participants=rest, owners=deal_evenly([(1, 1)] * 2, plan.chunks), evicted=(other.me,)
    )
    assert other.receive(plan.planner, without, 2.0) == [Evicted(without)]
    assert other.phase is Phase.PLAN


def test_member_that_never_saw_the_plan_that_is_repaired_is_silent_and_planned_anew() -> None:
    """The lead died when it had told but one; the two that are left are no quorum without each other."""
    lab, machines = machines_of(3)
    readies = [contribution(machine) for machine in machines]
    leader, second, third = (machines[lab.lead(view)] for view in range(3))
    effects: list[Effect] = []
    for machine in machines:
        for sender, ready in zip(machines, readies, strict=True):
            effects += machine.ready(ready, 1.0) if sender is machine else machine.receive(sender.me, ready, 1.0)
    (plan,) = (effect.message for effect in effects if sends(effect, Plan))
    assert second.receive(leader.me, plan, 1.1) == [StartReduce(plan)]

    alive = [second.me, third.me]
    moved = [e.message for e in third.peers_alive(alive, 2.0) if sends(e, ViewChange)]
    effects = second.peers_alive(alive, 2.0) + [e for m in moved for e in second.receive(third.me, m, 2.0)]
    effects += second.tick(2.0 + REPLAN_SETTLE_S)
    (evict,) = (effect.message for effect in effects if sends(effect, Evict))
    assert (evict.lineage, evict.evicted) == (plan.hash, (leader.me,))
    (asked,) = (effect for effect in effects if isinstance(effect, CloseOff))
    second.closed_off(asked, (), 2.3)
    assert not [effect for effect in third.receive(second.me, evict, 2.3) if isinstance(effect, CloseOff)]

    waited = second.tick(2.2 + HELD_TIMEOUT_S - 0.1)
    (afresh,) = (effect.plan for effect in second.tick(2.2 + HELD_TIMEOUT_S) if isinstance(effect, StartReduce))
    assert not [effect for effect in waited if sends(effect, Plan)]
    assert afresh.origin == NO_HASH
    assert {participant.peer for participant in afresh.participants} == set(alive)
    assert StartReduce(afresh) in third.receive(second.me, afresh, 7.0)


@pytest.mark.parametrize(
    ("held", "hears", "goes_on"),
    [((), True, False), ((ChunkResults.of(0, {0: domain_hash("result")}),), True, True), ((), False, True)],
)
def test_member_that_never_saw_the_plan_is_evicted_only_where_a_final_is_held_or_it_hears_nothing(
    held: tuple[ChunkResults, ...], hears: bool, goes_on: bool
) -> None:
    """The lead died when it had told three of four, which are a quorum without the last."""
    lab, machines = machines_of(5)
    readies = [contribution(machine) for machine in machines]
    leader, second, *told, unaware = (machines[lab.lead(view)] for view in range(5))
    effects: list[Effect] = []
    for machine in machines:
        for sender, ready in zip(machines, readies, strict=True):
            effects += machine.ready(ready, 1.0) if sender is machine else machine.receive(sender.me, ready, 1.0)
    (plan,) = (effect.message for effect in effects if sends(effect, Plan))
    alive, effects = [second.me, *(machine.me for machine in told), unaware.me], []
    for machine in (second, *told):
        machine.receive(leader.me, plan, 1.1)
    for machine in (*told, unaware) if hears else told:
        moved = [e.message for e in machine.peers_alive(alive, 2.0) if sends(e, ViewChange)]
        effects += [effect for message in moved for effect in second.receive(machine.me, message, 2.0)]
    effects += second.peers_alive(alive, 2.0)
    effects += second.tick(2.0 + REPLAN_SETTLE_S)
    (evict,) = (effect.message for effect in effects if sends(effect, Evict))
    (asked,) = (effect for effect in effects if isinstance(effect, CloseOff))
    second.closed_off(asked, (), 2.3)
    for machine in told:
        (asked,) = (effect for effect in machine.receive(second.me, evict, 2.3) if isinstance(effect, CloseOff))
        (answer,) = (e.message for e in machine.closed_off(asked, held, 2.3) if sends(e, Held))
        assert not second.receive(machine.me, answer, 2.3)

    effects = second.tick(2.2 + HELD_TIMEOUT_S)
    if goes_on:
        (again,) = (effect.message for effect in effects if sends(effect, Evict))
        assert again.evicted == tuple(sorted((leader.me, unaware.me)))
        return
    (afresh,) = (effect.plan for effect in effects if isinstance(effect, StartReduce))
    assert (afresh.origin, afresh.evicted) == (NO_HASH, (leader.me,))
    assert {participant.peer for participant in afresh.participants} == set(alive)
    assert all(StartReduce(afresh) in machine.receive(second.me, afresh, 7.0) for machine in (*told, unaware))


def test_member_that_sees_the_plan_late_answers_what_it_was_asked_before() -> None:
    lab, machines = machines_of(3)
    readies = [contribution(machine) for machine in machines]
    lead, late = machines[lab.lead()], machines[lab.lead(1)]
    effects: list[Effect] = []
    for machine in (lead, late):
        for sender, ready in zip(machines, readies, strict=True):
            effects += machine.ready(ready, 1.0) if sender is machine else machine.receive(sender.me, ready, 1.0)
    (plan,) = (effect.message for effect in effects if sends(effect, Plan))
    evict = Evict(
        term=plan.term,
        round=plan.round,
        base=plan.base,
        view=0,
        attempt=1,
        lineage=plan.hash,
        evicted=(machines[lab.lead(2)].me,),
    )
    assert not [effect for effect in late.receive(lead.me, evict, 1.5) if isinstance(effect, CloseOff)]
    late.receive(lead.me, plan, 1.6)
    assert CloseOff(plan.hash, frozenset(evict.evicted)) in late.receive(lead.me, evict, 1.7)


def test_new_lead_that_had_been_evicted_plans_itself_in() -> None:
    lab, machines, leader, plan = planned(3)
    second = lab.number(machines[leader].agreement.lead(1))
    third = 3 - leader - second
    machine = machines[second]
    rest = tuple(p for p in plan.participants if p.peer != machine.me)
    without = msgspec.structs.replace(
        plan, attempt=1, participants=rest, owners=deal_evenly([(1, 1)] * 2, plan.chunks), evicted=(machine.me,)
    )
    assert machine.receive(plan.planner, without, 2.0) == [Evicted(without)]
    effects = machine.peers_alive([machine.me, machines[third].me], 3.0)
    effects += machine.receive(machines[third].me, next(m for m in _moved(machines[third], machines, leader)), 3.1)
    effects += machine.tick(4.0)
    made = [e.plan for e in effects if isinstance(e, StartReduce)]
    assert [lab.number(p.peer) for p in made[-1].participants] == sorted([second, third])
    assert made[-1].evicted == (machines[leader].me,)


def _moved(machine: RoundMachine, machines: Sequence[RoundMachine], dead: int) -> list[Message]:
    """What a member says when it sees that the lead has died."""
    alive = [m.me for n, m in enumerate(machines) if n != dead]
    effects = machine.peers_alive(alive, 3.0)
    return [e.message for e in effects if isinstance(e, Broadcast)]


def test_new_lead_waits_a_moment_for_reports_on_their_way() -> None:
    lab, machines, leader, plan = planned(4)
    second = lab.number(machines[leader].agreement.lead(1))
    machine = machines[second]
    alive = [m.me for n, m in enumerate(machines) if n != leader]
    machine.tick(50.0 - 49.0)
    effects = machine.peers_alive(alive, 5.0)
    for number, other in enumerate(machines):
        if number not in (leader, second):
            for message in _moved(other, machines, leader):
                effects += machine.receive(other.me, message, 5.05)
    assert machine.agreement.free_to_plan
    assert not [e for e in effects if isinstance(e, StartReduce)], "it settles first"
    now = 5.05 + REPLAN_SETTLE_S + 0.01
    (asked,) = (e for e in machine.tick(now) if isinstance(e, CloseOff))
    assert asked.evicted == {machines[leader].me}
    effects = machine.closed_off(asked, (), now)
    for number, other in enumerate(machines):
        if number not in (leader, second):
            assert not [e for e in effects if isinstance(e, Repair)], "all are asked"
            (held,) = (e for e in other.closed_off(asked, (), now) if sends(e, Held))
            effects = machine.receive(other.me, held.message, now)  # type: ignore[union-attr]
    assert [(e.plan.view, e.plan.lineage) for e in effects if isinstance(e, Repair)] == [(1, plan.hash)]


def test_messages_of_another_round_or_base_are_passed_over() -> None:
    _, machines = machines_of(2)
    one, two = machines
    assert two.receive(one.me, contribution(one, round=2), 0.1) == []
    assert two.receive(one.me, contribution(one, base=domain_hash("x")), 0.1) == []
    assert one.me not in two._gathering


def test_foreign_message_is_our_own_bug() -> None:
    _, machines = machines_of(2)
    with pytest.raises(LocalError):
        machines[0].receive(machines[1].me, Message(), 0.0)
    with pytest.raises(LocalError):
        absent_ready(CONTRIBUTOR, machines[0].previous, NO_HASH)
    for role in (TRAINING, OBSERVER, JOINER):
        assert absent_ready(role, machines[0].previous, NO_HASH).role == role


def test_tables_keyed_by_plan_are_bounded_per_sender() -> None:
    _, machines = machines_of(2)
    one, two = machines
    base = two.previous
    for number in range(3 * PLANS_LIMIT):
        plan = domain_hash("no such plan", bytes([number]))
        report = Report(term=base.term, round=1, base=base.hash, plan=plan, digest=NO_HASH, bitmaps=NO_HASH)
        two.receive(one.me, one.agreement.sign_report(report), 0.1)
        two.receive(one.me, Stalled(term=base.term, round=1, base=base.hash, plan=plan, peers=(two.me,)), 0.1)
    assert len(two._facts.reports) <= PLANS_LIMIT
    assert len(two._facts.accusations._said) == WORDS_LIMIT


def test_plan_holds_no_more_than_a_message_may() -> None:
    lab, machines = machines_of(3)
    lead = machines[lab.lead()]
    crowd = [PaperIdentity(f"x{number}").peer_id for number in range(MEMBER_LIMIT + 6)]
    lead.peers_alive([m.me for m in machines] + crowd, 0.0)
    for peer in crowd:
        lead.receive(peer, absent_ready(JOINER, lead.previous, lead.previous.digest), 0.5)
    effects: list[Effect] = []
    for machine in machines:
        if machine is not lead:
            effects += lead.receive(machine.me, contribution(machine), 1.0)
    effects += lead.ready(contribution(lead), 1.0)
    (started,) = [e.plan for e in effects if isinstance(e, StartReduce)]
    planned_peers = {p.peer for p in started.participants}
    assert len(planned_peers) == MEMBER_LIMIT
    assert planned_peers >= {m.me for m in machines}, "members come first"


def report_on(plan: Plan) -> Report:
    return Report(
        term=plan.term, round=1, base=plan.base, plan=plan.hash, digest=domain_hash("d"), bitmaps=domain_hash("b")
    )


def test_lead_waits_for_a_slow_report_but_not_for_ever() -> None:
    _, machines, leader, plan = planned(4)
    lead = machines[leader]
    others = [machines[n] for n in range(4) if n != leader]
    report = report_on(plan)
    effects = lead.reduced(report, 2.0)
    for other in others[:2]:
        effects += lead.receive(other.me, other.agreement.sign_report(report), 2.1)
    assert not [e for e in effects if sends(e, Propose)]
    late = lead.tick(2.1 + REPORT_GRACE_S + 0.01)
    proposed = next(e.message for e in late if isinstance(e, Broadcast) and isinstance(e.message, Propose))
    assert proposed.value.members == tuple(sorted([lead.me, others[0].me, others[1].me]))


def test_who_reported_is_told_to_who_is_still_reducing_by_that_plan() -> None:
    _, machines, leader, plan = planned(4)
    slow, *others = (machines[n] for n in range(4) if n != leader)
    report = report_on(plan)
    slow.receive(machines[leader].me, plan, 1.5)
    assert slow.phase is Phase.REDUCE
    assert slow.complete_at() == ()
    another = msgspec.structs.replace(report, plan=domain_hash("another"))
    slow.receive(others[0].me, others[0].agreement.sign_report(another), 2.0)
    assert slow.complete_at() == ()
    slow.receive(others[1].me, others[1].agreement.sign_report(report), 2.0)
    slow.receive(machines[leader].me, machines[leader].agreement.sign_report(report), 2.0)
    assert set(slow.complete_at()) == {others[1].me, machines[leader].me}
    slow.reduced(report, 2.5)
    assert slow.complete_at() == ()


def test_report_of_another_digest_is_no_membership() -> None:
    _, machines, leader, plan = planned(3)
    lead = machines[leader]
    one, two = (machines[n] for n in range(3) if n != leader)
    report = report_on(plan)
    effects = lead.reduced(report, 2.0)
    another = msgspec.structs.replace(report, digest=domain_hash("e"))
    effects += lead.receive(one.me, one.agreement.sign_report(another), 2.1)
    effects += lead.receive(two.me, two.agreement.sign_report(report), 2.1)
    effects += lead.tick(2.1 + REPORT_GRACE_S + 0.01)
    proposed = next(e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Propose))
    assert proposed.value.members == tuple(sorted([lead.me, two.me]))


def test_messages_are_sent_again_until_the_round_is_decided() -> None:
    _, machines, leader, plan = planned(3)
    lead = machines[leader]
    effects = lead.tick(1.0 + RESEND_S + 0.2)
    sent = [e.message for e in effects if isinstance(e, Broadcast)]
    mine = sent[0]
    assert isinstance(mine, Ready)
    assert mine.signature
    assert [msgspec.structs.replace(mine, signature=b""), *sent[1:]] == [contribution(lead), plan]
    assert lead.tick(1.0 + RESEND_S + 0.3) == []
    assert lead.current() == sent


def test_what_is_not_news_is_sent_again_less_and_less_often() -> None:
    _, machines = machines_of(3)
    machine = machines[0]
    machine.ready(absent_ready(TRAINING, machine.previous, NO_HASH), 0.0)

    def said_again(since: float, until: float) -> list[float]:
        times = [since + tick / 5 for tick in range(1, round((until - since) * 5))]
        return [at for at in times if any(sends(effect, Ready) for effect in machine.tick(at))]

    assert said_again(0.0, 150.0) == pytest.approx([WAITING_RESEND_S, 2 * WAITING_RESEND_S]), "it trains"
    machine.ready(contribution(machine), 150.0)
    times = said_again(150.0, 220.0)
    assert times == pytest.approx([150.0 + RESEND_S, 150.0 + RESEND_S + WAITING_RESEND_S]), "it is news; others train"
    _, (machine, *_), _, plan = planned(3)
    machine.reduced(report_on(plan), 2.0)
    assert said_again(2.0, 16.0) == pytest.approx([2.0 + RESEND_S, 2.0 + 3 * RESEND_S])
    _, (machine, *_), _, plan = planned(2 * CROWD)
    machine.reduced(report_on(plan), 2.0)
    assert said_again(2.0, 12.0) == pytest.approx([2.0 + 2 * RESEND_S]), "each hears as much"


def test_members_wait_for_the_lead_and_a_lead_for_those_who_are_yet_to_announce_or_report() -> None:
    _, machines = machines_of(3)
    assert [machine.awaited() for machine in machines] == [frozenset()] * 3, "all train"
    lead = next(machine for machine in machines if machine.agreement.lead(0) == machine.me)
    lead.peers_alive([machine.me for machine in machines], 1.0)
    lead.ready(contribution(lead), 1.0)
    assert lead.awaited() == {machine.me for machine in machines} - {lead.me}
    _, machines, leader, plan = planned(3)
    lead, others = machines[leader], [machine for machine in machines if machine is not machines[leader]]
    assert [machine.awaited() for machine in others] == [{lead.me}] * 2
    assert lead.awaited() == frozenset(), "it reduces itself"
    report = report_on(plan)
    lead.reduced(report, 2.0)
    assert lead.awaited() == {machine.me for machine in others}
    lead.receive(others[0].me, others[0].agreement.sign_report(report), 2.1)
    assert lead.awaited() == {others[1].me}


def test_lead_that_lacks_the_finals_of_what_it_proposed_asks_for_them_again() -> None:
    """Nobody tells a lead of its own proposal, which it may have found on its disk when nobody was linked."""
    lab, machines = machines_of(3)
    leader = lab.lead()
    machine = machines[leader]
    value = value_of(machine.previous, domain_hash("plan", b"one"), machine.me)
    record = DurableRecord(kind="propose", term=value.term, round=machine.round, view=0, value=value)
    said, need = machine.restore([record])
    assert sends(said, Propose)
    assert need == NeedFinals(value)
    assert machine.tick(1.0) == []
    assert NeedFinals(value) in machine.tick(1.0 + RESEND_S)


def test_all_that_is_said_in_a_round_may_travel_on_a_link() -> None:
    of_rounds = {kind for kind in RoundMessage.__subclasses__() if kind.__module__ == RoundMessage.__module__}
    assert of_rounds <= set(get_args(SwarmMessage))


def test_every_message_of_a_round_that_travels_has_a_rule() -> None:
    assert set(get_args(SwarmMessage)) - {Rebase} == RULES.keys()
