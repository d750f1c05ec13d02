"""The round machine in virtual time: whole rounds, undisturbed and with every kind of interruption.

Bounds are in virtual seconds. An undisturbed round takes the training (1 s, up to 1.2), the reduction (1 s) and a few
message delays.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import partial

import msgspec
import pytest

from shoal.protocol.accusations import PLANS_LIMIT
from shoal.protocol.agreement import Broadcast, Persist, Standing
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.leading import RELAY_SETTLE_S, REPLAN_SETTLE_S, REPORT_GRACE_S
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    NO_HASH,
    Held,
    Message,
    OwnedRange,
    Plan,
    Propose,
    Ready,
    Report,
    Stalled,
    ViewChange,
    Vote,
    domain_hash,
)
from shoal.protocol.patience import PROPOSE_PATIENCE_S, SILENCE_S
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, absent_ready, check_plan
from shoal.protocol.round import RESEND_S, Phase, RoundMachine
from tests.protocol.lab import PaperIdentity, paper_signatures
from tests.protocol.round_lab import (
    BREAK_SEEN_S,
    HANG_SEEN_S,
    LATENCY_S,
    SETTINGS,
    TICK_S,
    Intercept,
    RoundLab,
    deal_evenly,
)

pytestmark = pytest.mark.usefixtures("paper_signatures")
__all__ = ["paper_signatures"]

TRAIN_S = 1.2
REDUCE_S = 1.0
ROUND_S = TRAIN_S + REDUCE_S + 0.4
"""Longest undisturbed round: training, reducing, five message delays, a tick or two."""
REPLAN_S = BREAK_SEEN_S + REPLAN_SETTLE_S + 2 * TICK_S + 3 * LATENCY_S[1]
"""What a death adds at most, besides reducing again."""


def sends(effect: Effect, kind: type[Message]) -> bool:
    return isinstance(effect, Broadcast) and isinstance(effect.message, kind)


def writes(effect: Effect, kind: str) -> bool:
    return isinstance(effect, Persist) and effect.record.kind == kind


def kill_before(lab: RoundLab, kind: type[Message] | str, *, round: int = 1) -> Intercept:
    """Kill whoever is about to send a message of this kind (or to write such a record) first."""
    struck: list[int] = []

    def intercept(number: int, effect: Effect) -> Collection[int] | None:
        hit = writes(effect, kind) if isinstance(kind, str) else sends(effect, kind)
        if hit and not struck and lab.nodes[number].height == round - 1:
            struck.append(number)
            lab.kill(number)
        return None

    return intercept


# -- undisturbed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", range(1, 7))
def test_undisturbed_rounds_certify_everyone_in_time(nodes: int) -> None:
    lab = RoundLab(nodes, seed=nodes)
    for height in range(1, 5):
        assert lab.run_until(lab.height_of_all(height), 10) < ROUND_S
        assert lab.members(height) == lab.contributors(height) == set(range(nodes))
    for node in lab.nodes:
        assert node.chain == lab.nodes[0].chain
        assert not node.blamed
        assert not node.evictions
        assert node.running().agreement.view == 0
    plan = lab.plans[lab.value(1).plan]
    assert (plan.view, plan.attempt, plan.evicted) == (0, 0, ())
    assert lab.value(1).tokens == sum(100 + n for n in range(nodes))
    assert lab.value(1).digest == lab.report(plan).digest


def test_many_seeds_of_undisturbed_rounds_never_blame_or_change_view() -> None:
    for seed in range(12):
        lab = RoundLab(2 + seed % 5, seed=seed)
        lab.run_until(lab.height_of_all(2), 2 * ROUND_S)
        assert not any(node.blamed for node in lab.nodes)
        assert {r.view for node in lab.nodes for r in node.log} == {0}


def test_rounds_go_on_under_a_fifth_of_messages_lost() -> None:
    for seed in range(6):
        lab = RoundLab(4, seed=seed, loss=0.2)
        lab.run_until(lab.height_of_all(3), 3 * (ROUND_S + 6 * RESEND_S))
        assert not any(node.blamed for node in lab.nodes)


def test_phases_follow_the_course_of_a_round() -> None:
    lab = RoundLab(3)
    seen: list[Phase] = []

    def watch() -> bool:
        node = lab.nodes[0]
        if node.machine is not None and node.height == 0 and node.machine.phase not in seen:
            seen.append(node.machine.phase)
        return node.height == 1

    lab.run_until(watch, 10)
    assert seen[0] is Phase.TRAIN
    assert [p for p in (Phase.TRAIN, Phase.REDUCE, Phase.CERTIFY) if p in seen] == [
        p for p in seen if p is not Phase.PLAN
    ]


# -- deaths --------------------------------------------------------------------------------------------------


def test_participant_killed_while_reducing_is_evicted_and_only_costs_the_repair() -> None:
    for seed in range(10):
        lab = RoundLab(4, seed=seed)
        victim = next(n for n in range(4) if n != lab.lead())
        lab.run_until(lab.reducing(victim), 10)
        lab.run_for(0.5)
        killed_at = lab.now
        lab.kill(victim)
        lab.run_until(lab.height_of_all(1), 20)
        plan = lab.plans[lab.value(1).plan]
        assert (plan.view, plan.attempt, plan.evicted) == (0, 1, (lab.nodes[victim].peer,))
        assert lab.members(1) == lab.contributors(1) == set(range(4)) - {victim}
        assert lab.now - killed_at < REPLAN_S + REDUCE_S + 0.2
        assert REPLAN_S < 1.0


def test_two_deaths_one_after_the_other_are_both_named() -> None:
    lab = RoundLab(5, seed=3)
    victims = [n for n in range(5) if n != lab.lead()][:2]
    for attempt, victim in enumerate(victims):
        lab.run_until(lab.planned(attempt), 10)
        lab.run_for(0.5)
        lab.kill(victim)
    lab.run_until(lab.height_of_all(1), 20)
    plan = lab.plans[lab.value(1).plan]
    assert plan.attempt == 2
    assert {lab.number(p) for p in plan.evicted} == set(victims)
    assert lab.members(1) == set(range(5)) - set(victims)


def test_participant_that_dies_after_its_report_costs_nothing() -> None:
    lab = RoundLab(4, seed=5)
    leader = lab.lead()
    victim = (leader + 1) % 4

    def intercept(number: int, effect: Effect) -> Collection[int] | None:
        if number == leader and sends(effect, Propose) and lab.nodes[victim].up:
            lab.kill(victim)
        return None

    lab.intercept = intercept
    lab.run_until(lab.height_of_all(1), ROUND_S)
    assert lab.plans[lab.value(1).plan].attempt == 0
    assert lab.contributors(1) == set(range(4))
    # The next round does without it, and it is no member after that.
    assert lab.run_until(lab.height_of_all(2), 10) < ROUND_S
    assert lab.members(2) == set(range(4)) - {victim}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("moment", ["training", Plan, Report, "propose", Propose, "vote", Vote])
def test_lead_killed_at_any_moment_is_replaced_at_once(moment: type[Message] | str, seed: int) -> None:
    lab = RoundLab(4, seed=seed)
    leader = lab.lead()
    if moment == "training":
        lab.run_for(0.5)
        lab.kill(leader)
    else:
        kill = kill_before(lab, moment)
        lab.intercept = lambda number, effect: kill(number, effect) if number == leader else None
    lab.run_until(lab.height_of_all(1), 20)
    assert not lab.nodes[leader].up
    assert lab.now < ROUND_S + REPLAN_S + REDUCE_S + 0.5
    value = lab.value(1)
    planned_before = moment in (Report, "propose", Propose, "vote", Vote)  # the others hold the finals
    assert (leader in lab.contributors(1)) == planned_before
    proposed = moment in ("vote", Vote)
    assert (value.planner == lab.nodes[leader].peer) == proposed, "a value that may be decided keeps its planner"
    assert not any(node.blamed for node in lab.nodes)
    lab.run_until(lab.height_of_all(3), 3 * ROUND_S)
    assert lab.members(3) == set(range(4)) - {leader}


@pytest.mark.parametrize("told", [0, 1, 2, 3])
def test_lead_killed_after_its_proposal_reached_only_some(told: int) -> None:
    for seed in range(4):
        lab = RoundLab(4, seed=seed)
        leader = lab.lead()
        others = [n for n in range(4) if n != leader]

        def intercept(
            number: int, effect: Effect, lab: RoundLab = lab, leader: int = leader, others: Sequence[int] = others
        ) -> Collection[int] | None:
            if number == leader and sends(effect, Propose):
                lab.after(0.0, lambda: lab.kill(leader))
                return others[:told]
            return () if number == leader and sends(effect, Vote) else None

        lab.intercept = intercept
        lab.run_until(lab.height_of_all(1), 20)
        assert lab.contributors(1) == set(range(4)), "what was reduced is not reduced again"
        assert lab.now < ROUND_S + REPLAN_S + 0.5
        lab.intercept = lambda number, effect: None
        lab.restart(leader)
        lab.run_until(lab.height_of_all(4), 20)
        assert len({node.chain[1].hash for node in lab.nodes}) == 1
        assert lab.members(4) == set(range(4))


def test_lead_restarted_after_it_wrote_its_proposal_stands_by_it() -> None:
    for nodes in (2, 3, 4):
        lab = RoundLab(nodes, seed=nodes)
        leader = lab.lead()
        lab.intercept = kill_before(lab, Propose)
        lab.run_until(lab.down(leader), 10)
        lab.after(0.05, partial(lab.restart, leader))
        lab.run_until(lab.height_of_all(2), 30)
        assert next(r.kind for r in lab.nodes[leader].log if r.round == 1) == "propose"


def test_everyone_killed_and_restarted_goes_on() -> None:
    for keeps_contribution in (True, False):
        lab = RoundLab(3, seed=1, keeps_contribution=keeps_contribution)
        lab.run_until(lab.reducing(0), 10)
        for number in range(3):
            lab.kill(number)
        lab.run_for(1.0)
        for number in range(3):
            lab.restart(number)
        assert lab.run_until(lab.height_of_all(1), 20) < ROUND_S + 2 * RESEND_S


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_member_that_lost_its_contribution_in_a_restart_holds_nobody_up(nodes: int) -> None:
    for seed in range(6):
        lab = RoundLab(nodes, seed=seed, keeps_contribution=False)
        lab.run_until(lab.planned(0), 10)
        victim = next(n for n in range(nodes) if n != lab.lead())
        lab.kill(victim)
        lab.run_for(0.4)
        lab.restart(victim)
        assert lab.run_until(lab.height_of_all(1), 60) < 4 * ROUND_S
        assert not any(node.blamed for node in lab.nodes)


@pytest.mark.parametrize("keeps_contribution", [True, False])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_node_that_is_back_at_once_reduces_under_plans_of_its_present_life_only(
    nodes: int, keeps_contribution: bool
) -> None:
    for leads in (True, False):
        lab = RoundLab(nodes, seed=nodes, keeps_contribution=keeps_contribution)
        victim = lab.lead() if leads else next(n for n in range(nodes) if n != lab.lead())
        followed: list[bool] = []

        def intercept(
            number: int, effect: Effect, lab: RoundLab = lab, followed: list[bool] = followed
        ) -> Collection[int] | None:
            if isinstance(effect, StartReduce | Repair):
                machine = lab.nodes[number].running()
                followed += [p.life == machine.life for p in effect.plan.participants if p.peer == machine.me]
            return None

        lab.intercept = intercept
        lab.run_until(lab.reducing(victim), 10)
        lab.kill(victim)
        lab.restart(victim)
        assert lab.run_until(lab.height_of_all(2), 60) < 5 * ROUND_S
        assert all(followed)
        assert len(followed) > nodes
        assert not any(node.blamed for node in lab.nodes)


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
    assert len({node.chain[1].hash for node in lab.nodes}) == 1


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


def machines_of(count: int) -> tuple[RoundLab, list[RoundMachine]]:
    """Machines of a lab in which no time passes; the test hands them messages itself."""
    lab = RoundLab(count)
    return lab, [node.running() for node in lab.nodes]


def contribution(machine: RoundMachine, **changes: object) -> Ready:
    ready = Ready(
        term=machine.previous.term,
        round=machine.round,
        base=machine.previous.hash,
        role=CONTRIBUTOR,
        state=machine.previous.digest,
        root=domain_hash("root", machine.me.encode()),
        squares=(),
        tokens=10,
        upload=1,
        download=1,
        reaches=(),
        life=machine.life,
    )
    return msgspec.structs.replace(ready, **changes)


def planned(count: int) -> tuple[RoundLab, list[RoundMachine], int, Plan]:
    """`count` machines, all ready; the lead has planned and the others have the plan."""
    lab, machines = machines_of(count)
    leader = lab.lead()
    effects: list[Effect] = []
    readies = [contribution(machine) for machine in machines]
    for number, machine in enumerate(machines):
        for ready, sender in zip(readies, machines, strict=True):
            if sender is machine:
                effects += machine.ready(ready, 1.0)
            else:
                effects += machine.receive(sender.me, ready, 1.0)
        assert machine.phase in (Phase.PLAN, Phase.REDUCE), number
    (plan,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Plan)]
    for number, machine in enumerate(machines):
        if number != leader:
            assert StartReduce(plan) in machine.receive(plan.planner, plan, 1.1)
    return lab, machines, leader, plan


def accuse(plan: Plan, *accused: str) -> Stalled:
    return Stalled(term=plan.term, round=plan.round, base=plan.base, plan=plan.hash, peers=tuple(accused))  # type: ignore[arg-type]


def all_but_the_lead_report(lab: RoundLab, machines: list[RoundMachine], leader: int, plan: Plan, now: float) -> None:
    report = lab.report(plan)
    for number, machine in enumerate(machines):
        if number != leader:
            machine.reduced(report, now)
            for other in machines:
                if other is not machine and other is not machines[leader]:
                    other.receive(machine.me, report, now)


def moves(effects: Sequence[Effect]) -> bool:
    return any(sends(effect, ViewChange) for effect in effects)


@pytest.mark.parametrize(("took_s", "patience_s"), [(0.5, SILENCE_S), (5.0, 5.0)])
def test_lead_to_whom_all_have_reported_has_as_long_again_to_propose(took_s: float, patience_s: float) -> None:
    lab, machines, leader, plan = planned(4)
    reported_at = 1.1 + took_s
    all_but_the_lead_report(lab, machines, leader, plan, reported_at)
    for number, machine in enumerate(machines):
        if number != leader:
            assert not moves(machine.tick(reported_at + patience_s - 0.1))
            assert moves(machine.tick(reported_at + patience_s + 0.1))


def test_lead_that_is_still_reducing_says_so_and_is_not_silent() -> None:
    lab, machines, leader, plan = planned(4)
    all_but_the_lead_report(lab, machines, leader, plan, 2.0)
    lead, others = machines[leader], [machine for number, machine in enumerate(machines) if number != leader]
    for other in others:
        lead.receive(other.me, lab.report(plan), 2.0)
    now = 2.0
    while now < 2.0 + PROPOSE_PATIENCE_S - 0.5:
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
    assert not moves(waiting.tick(2.0 + PROPOSE_PATIENCE_S - 0.1))
    assert moves(waiting.tick(2.0 + PROPOSE_PATIENCE_S + 0.1))


def test_lead_whom_the_detector_suspects_is_not_waited_for() -> None:
    lab, machines, leader, plan = planned(4)
    members, suspect = [machine.me for machine in machines], machines[leader].me
    member = next(machine for number, machine in enumerate(machines) if number != leader)
    assert not moves(member.peers_alive(members, 1.2, suspected=[suspect])), "in a reduction others have to say so too"
    assert moves(member.reduced(lab.report(plan), 1.3))


def test_lone_accuser_is_not_believed() -> None:
    _, machines, leader, plan = planned(4)
    accuser, accused, second = (machines[n] for n in range(4) if n != leader)
    lead = machines[leader]
    assert lead.receive(accuser.me, accuse(plan, accused.me), 2.0) == []
    lead.tick(2.0 + 0.9 * RELAY_SETTLE_S)
    assert lead.plan == plan
    effects = lead.receive(second.me, accuse(plan, accused.me), 2.0 + 0.9 * RELAY_SETTLE_S)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{accused.me}]


def test_lone_accuser_is_believed_of_whom_the_detector_suspects_too() -> None:
    _, machines, leader, plan = planned(4)
    accuser, accused, _ = (machines[n] for n in range(4) if n != leader)
    lead, alive = machines[leader], [m.me for m in machines]
    assert lead.peers_alive(alive, 2.0, suspected=[accused.me]) == [], "suspicion alone evicts nobody"
    effects = lead.receive(accuser.me, accuse(plan, accused.me), 2.1)
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{accused.me}]


def test_pair_of_which_one_accuses_the_other_is_relayed_through_each_third_and_then_the_accused_evicted() -> None:
    _, machines, leader, plan = planned(4)
    accuser, accused, third = (machines[n] for n in range(4) if n != leader)
    lead, now, via = machines[leader], 2.0, set()
    pair = {plan.number(accuser.me), plan.number(accused.me)}
    for attempt in (1, 2):
        assert lead.plan is not None
        assert lead.receive(accuser.me, accuse(lead.plan, accused.me), now) == []
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
    evictions = [e.evicted for e in lead.tick(now + RELAY_SETTLE_S) if isinstance(e, CloseOff)]
    assert evictions == [{accused.me}]


def test_owner_that_accuses_another_is_not_blamed_for_its_late_finals() -> None:
    _, machines, leader, plan = planned(5)
    blocked, silent, one, two = (machines[n] for n in range(5) if n != leader)
    lead = machines[leader]
    late = msgspec.structs.replace(accuse(plan), late=(blocked.me,))
    effects = [effect for other in (one, two) for effect in lead.receive(other.me, late, 2.0)]
    assert [e.evicted for e in effects if isinstance(e, CloseOff)] == [{blocked.me}], "nobody else is to blame"

    _, machines, leader, plan = planned(5)
    lead = machines[leader]
    lead.receive(blocked.me, accuse(plan, silent.me), 2.0)
    for other in (one, two):
        lead.receive(other.me, msgspec.structs.replace(accuse(plan), late=(blocked.me,)), 2.0)
    lead.tick(2.1)
    assert lead.plan == plan
    effects = lead.receive(two.me, accuse(plan, silent.me), 2.2)
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


# -- quorum --------------------------------------------------------------------------------------------------


def test_without_a_quorum_nothing_moves_until_someone_returns() -> None:
    lab = RoundLab(3, seed=7)
    lab.run_until(lab.height_of_all(1), 10)
    lab.run_for(0.3)
    lab.kill(1)
    lab.kill(2)
    lab.run_for(60.0)
    alone = lab.nodes[0].running()
    assert lab.nodes[0].height == 1
    assert not alone.has_quorum()
    assert set(alone.missing()) == {lab.nodes[1].peer, lab.nodes[2].peer}
    assert alone.agreement.view <= 2, "it waits, it does not run through views"
    lab.restart(1)
    assert lab.run_until(lambda: lab.nodes[0].height == 2 == lab.nodes[1].height, 30) < ROUND_S + 2 * RESEND_S
    assert lab.members(2) == {0, 1}


def test_evicted_member_that_is_needed_again_is_taken_back() -> None:
    """One is evicted, returns, and another dies: the two that are left are a quorum only together."""
    for seed in range(8):
        lab = RoundLab(3, seed=seed, reduce_s=3.0)
        leader = lab.lead()
        first, second = (n for n in range(3) if n != leader)
        lab.run_until(lab.reducing(leader), 10)
        lab.kill(first)
        lab.run_until(lab.planned(1), 10)
        lab.restart(first)
        lab.run_for(0.5)
        lab.kill(second)
        lab.run_until(lab.height_of([leader], 1), 30)
        assert lab.members(1) == {leader, first}


@pytest.mark.parametrize("victim_is_planner", [True, False])
def test_of_two_the_planner_goes_on_alone(victim_is_planner: bool) -> None:
    for seed in range(4):
        lab = RoundLab(2, seed=seed)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        planner = lab.number(lab.value(1).planner)
        victim = planner if victim_is_planner else 1 - planner
        lab.kill(victim)
        if victim_is_planner:
            lab.run_for(60.0)
            assert lab.nodes[1 - victim].height == 1
            lab.restart(victim)
            lab.run_until(lab.height_of_all(2), 10)
            assert lab.members(2) == {0, 1}
        else:
            lab.run_until(lab.height_of_all(3), 3 * ROUND_S)
            assert lab.members(3) == {planner}


def test_split_down_the_middle_one_half_goes_on_and_the_other_catches_up() -> None:
    for seed in range(6):
        lab = RoundLab(4, seed=seed)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.2)
        planner = lab.number(lab.value(1).planner)
        mate = (planner + 1) % 4
        rest = set(range(4)) - {planner, mate}
        lab.split({planner, mate}, rest)
        lab.run_for(60.0)
        assert all(lab.nodes[n].height == 1 for n in rest)
        assert all(lab.nodes[n].height > 10 for n in (planner, mate))
        lab.heal()
        height = lab.nodes[planner].height
        lab.run_until(lab.height_of_all(height + 3), 30)
        assert lab.members(height + 3) == set(range(4))


# -- who is late, new, paused, leaving -----------------------------------------------------------------------


def test_late_trainer_is_weightless_now_and_counts_next_round() -> None:
    lab = RoundLab(4, seed=8)
    late = (lab.lead() + 1) % 4
    lab.nodes[late].trained_at = 7.0
    lab.run_until(lab.height_of_all(1), 20)
    assert SETTINGS.grace_s < lab.now < SETTINGS.grace_s + ROUND_S
    assert lab.contributors(1) == set(range(4)) - {late}
    assert lab.members(1) == set(range(4))
    plan = lab.plans[lab.value(1).plan]
    place = plan.number(lab.nodes[late].peer)
    assert place is not None
    assert (plan.participants[place].weight, plan.participants[place].root) == (0, NO_HASH)
    lab.run_until(lab.height_of_all(3), 20)
    assert any(late in lab.contributors(r) for r in (2, 3))


def test_grace_counts_from_half_of_the_trainers() -> None:
    lab = RoundLab(4, seed=9)
    for number in range(4):
        lab.nodes[number].trained_at = 1.0 if number == 0 else 5.0 if number == 1 else 500.0
    lab.run_until(lab.height_of_all(1), 30)
    assert 5.0 + SETTINGS.grace_s < lab.now < 5.0 + SETTINGS.grace_s + REDUCE_S + 0.6
    assert lab.contributors(1) == {0, 1}
    assert lab.members(1) == {0, 1, 2, 3}


def test_joiner_is_weightless_once_then_a_member_that_counts() -> None:
    lab = RoundLab(4, founders=3, seed=2)
    lab.run_until(lab.height_of_all(1), 10)
    lab.join(3)
    first = lab.nodes[3].height + 1
    lab.run_until(lambda: lab.nodes[3].height == first, 10)
    assert 3 not in lab.members(first - 1)
    assert lab.contributors(first) == {0, 1, 2}
    assert lab.members(first) == {0, 1, 2, 3}
    lab.run_until(lab.height_of_all(first + 2), 10)
    assert lab.contributors(first + 1) == {0, 1, 2, 3}
    assert lab.members(first + 2) == {0, 1, 2, 3}


def test_returner_counts_at_once() -> None:
    lab = RoundLab(4, seed=3)
    lab.run_until(lab.height_of_all(1), 10)
    lab.run_for(0.2)
    lab.kill(3)
    lab.run_until(lab.height_of_all(2), 10)
    assert lab.members(2) == {0, 1, 2}
    lab.nodes[3].train_s = 0.5
    lab.restart(3)
    lab.run_until(lab.height_of_all(3), 10)
    assert 3 in lab.contributors(3)
    assert lab.members(3) == {0, 1, 2, 3}


def test_paused_member_votes_and_stays_without_weight() -> None:
    lab = RoundLab(3, seed=4)
    lab.nodes[1].paused = True
    lab.run_until(lab.height_of_all(4), 5 * ROUND_S)
    for height in (2, 3, 4):
        assert lab.contributors(height) == {0, 2}
        assert lab.members(height) == {0, 1, 2}
    assert {record.kind for record in lab.nodes[1].log} >= {"vote"}


def test_leaver_is_counted_out_and_gone() -> None:
    for seed in range(6):
        lab = RoundLab(3, seed=seed)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        lab.leave(2)
        assert lab.nodes[2].running().agreement.standing is Standing.LEFT
        lab.run_until(lab.height_of([0, 1], 2), ROUND_S + 1)
        assert lab.value(2).leaves == (lab.nodes[2].peer,)
        assert lab.members(2) == {0, 1}
        lab.run_until(lab.height_of([0, 1], 4), 3 * ROUND_S)
        assert lab.value(3).leaves == ()
        assert not lab.nodes[2].up


def test_leave_after_voting_waits_for_the_next_round() -> None:
    lab = RoundLab(3, seed=5)
    leaver = lab.lead()  # it votes first, and what follows takes the others some milliseconds
    said: list[str] = []

    def intercept(number: int, effect: Effect) -> Collection[int] | None:
        if number == leaver and sends(effect, Vote) and not said:
            said.append("leave")
            lab.after(0.0, lambda: lab.leave(leaver))
        return None

    lab.intercept = intercept
    lab.run_until(lambda: lab.nodes[leaver].leaving, 10)
    assert lab.nodes[leaver].height == 0
    assert lab.nodes[leaver].running().agreement.standing is Standing.OPEN
    rest = [n for n in range(3) if n != leaver]
    lab.run_until(lambda: all(lab.nodes[n].height >= 2 for n in rest), 10)
    assert lab.value(1).leaves == ()
    assert lab.value(2).leaves == (lab.nodes[leaver].peer,)


def test_leave_of_two_of_three_leaves_one_that_goes_on() -> None:
    lab = RoundLab(3, seed=6)
    lab.run_until(lab.height_of_all(1), 10)
    lab.run_for(0.3)
    lab.leave(1)
    lab.leave(2)
    lab.run_until(lambda: lab.nodes[0].height >= 3, 10)
    assert lab.members(2) == {0}


def test_node_on_another_state_is_not_planned() -> None:
    lab = RoundLab(4, seed=7)
    lab.run_until(lab.height_of_all(1), 10)
    odd = next(n for n in range(4) if n != lab.lead())
    lab.nodes[odd].wrong_state = True
    lab.run_until(lab.height_of_all(3), 30)
    assert odd not in lab.members(3)
    assert odd not in lab.contributors(3)
    assert lab.members(3) == set(range(4)) - {odd}


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
    other, third = (machines[n] for n in range(3) if n != leader)
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
        two.receive(one.me, report, 0.1)
        two.receive(one.me, Stalled(term=base.term, round=1, base=base.hash, plan=plan, peers=(two.me,)), 0.1)
    assert len(two._facts.reports) <= PLANS_LIMIT
    assert len(two._facts.accusations._said) <= PLANS_LIMIT


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


def test_lead_waits_for_a_slow_report_but_not_for_ever() -> None:
    _, machines, leader, plan = planned(4)
    lead = machines[leader]
    others = [machines[n] for n in range(4) if n != leader]
    report = Report(
        term=plan.term, round=1, base=plan.base, plan=plan.hash, digest=domain_hash("d"), bitmaps=domain_hash("b")
    )
    effects = lead.reduced(report, 2.0)
    for other in others[:2]:
        effects += lead.receive(other.me, report, 2.1)
    assert not [e for e in effects if sends(e, Propose)]
    late = lead.tick(2.1 + REPORT_GRACE_S + 0.01)
    proposed = next(e.message for e in late if isinstance(e, Broadcast) and isinstance(e.message, Propose))
    assert proposed.value.members == tuple(sorted([lead.me, others[0].me, others[1].me]))


def test_report_of_another_digest_is_no_membership() -> None:
    _, machines, leader, plan = planned(3)
    lead = machines[leader]
    one, two = (machines[n] for n in range(3) if n != leader)
    report = Report(
        term=plan.term, round=1, base=plan.base, plan=plan.hash, digest=domain_hash("d"), bitmaps=domain_hash("b")
    )
    effects = lead.reduced(report, 2.0)
    effects += lead.receive(one.me, msgspec.structs.replace(report, digest=domain_hash("e")), 2.1)
    effects += lead.receive(two.me, report, 2.1)
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


# -- random faults -------------------------------------------------------------------------------------------


def disturb(lab: RoundLab, rng: random.Random, faults: int, spread_s: float) -> None:
    """Kill, hang, restart, split and heal at random moments."""
    count = len(lab.nodes)
    for _ in range(faults):
        lab.run_for(rng.uniform(0.1, spread_s))
        number, chance = rng.randrange(count), rng.random()
        node = lab.nodes[number]
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
        elif chance < 0.5:
            lab.kill(number)
        elif chance < 0.75:
            lab.hang(number)
        elif chance < 0.9 and count > 1:
            order = rng.sample(range(count), count)
            cut = rng.randrange(1, count)
            lab.split(order[:cut], order[cut:])
        else:
            lab.heal()


def crash_between_effects(lab: RoundLab, rng: random.Random) -> Intercept:
    """Once in a while a node dies between two effects of one step, and comes back some seconds later."""

    def intercept(number: int, effect: Effect) -> Collection[int] | None:
        if rng.random() < 0.004:
            lab.kill(number)
            lab.after(rng.uniform(0.2, 5.0), lambda: None if lab.nodes[number].up else lab.restart(number))
        return None

    return intercept


def recover(lab: RoundLab) -> int:
    """End all faults; returns the greatest height so far."""
    lab.loss = 0.0
    lab.intercept = lambda number, effect: None
    lab.heal()
    for number, node in enumerate(lab.nodes):
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
    return max(node.height for node in lab.nodes)


RECOVERY_S = 40.0


@pytest.mark.parametrize("nodes", range(1, 7))
def test_after_faults_cease_a_round_is_certified_in_bounded_time(nodes: int) -> None:
    for seed in range(6):
        lab = RoundLab(nodes, seed=seed, loss=(0.0, 0.05, 0.25)[seed % 3])
        lab.intercept = crash_between_effects(lab, random.Random(seed))
        disturb(lab, random.Random(seed), faults=10, spread_s=12.0 if seed % 2 else 3.0)
        height = recover(lab)
        lab.run_until(lab.height_of_all(height + 1), RECOVERY_S)
        settled = max(node.height for node in lab.nodes) + 2
        assert lab.run_until(lab.height_of_all(settled), RECOVERY_S) < 3 * ROUND_S
        assert lab.members(settled) == set(range(nodes))
        assert len({node.chain[height].hash for node in lab.nodes}) == 1
        assert not any(node.blamed for node in lab.nodes)
