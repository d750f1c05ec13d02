"""The round machine in virtual time: whole rounds, undisturbed, and with deaths and restarts at any moment.

Bounds are in virtual seconds. An undisturbed round takes the training (1 s, up to 1.2), the reduction (1 s) and a few
message delays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import pytest

from shoal.protocol.effects import Append, MemberEffect, Repair, StartReduce, Write
from shoal.protocol.messages import (
    NO_HASH,
    Message,
    Plan,
    Prepare,
    Propose,
    Report,
    Vote,
)
from shoal.protocol.round import RESEND_S, Phase
from shoal.protocol.timeouts import HELD_TIMEOUT_S
from tests.protocol.round_lab import Intercept, RoundLab
from tests.protocol.round_machines import REDUCE_S, REPLAN_S, ROUND_S, TRAIN_S, sends
from tests.protocol.round_node import report_on

pytestmark = pytest.mark.usefixtures("paper_signatures")


def writes(effect: MemberEffect, kind: str) -> bool:
    return isinstance(effect, Write) and any(record.kind == kind for record in effect.records)


def kill_before(lab: RoundLab, kind: type[Message] | str, *, round: int = 1) -> Intercept:
    """Kill whoever is about to send a message of this kind (or to write such a record) first."""
    struck: list[int] = []

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
        hit = writes(effect, kind) if isinstance(kind, str) else sends(effect, kind)
        hit = hit or (kind in ("vote", Vote) and isinstance(effect, Append))  # others' votes were here first
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
        assert node.values == lab.nodes[0].values
        assert not node.blamed
        assert not node.evictions
        assert node.running().agreement.view == 0
    plan = lab.plans[lab.value(1).plan]
    assert (plan.view, plan.attempt, plan.evicted) == (0, 0, ())
    assert lab.value(1).tokens == sum(100 + n for n in range(nodes))
    assert lab.value(1).digest == report_on(plan).digest


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

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
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
@pytest.mark.parametrize("moment", ["training", Plan, Report, "propose", Propose, "prepare", Prepare, "vote", Vote])
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
    planned_before = moment not in ("training", Plan)  # the others hold the finals
    assert (leader in lab.contributors(1)) == planned_before
    proposed = moment in ("prepare", Prepare, "vote", Vote)
    assert (value.planner == lab.nodes[leader].peer) == proposed, "a value that may be decided keeps its planner"
    assert not any(node.blamed for node in lab.nodes)
    lab.run_until(lab.height_of_all(3), 3 * ROUND_S)
    assert lab.members(3) == set(range(4)) - {leader}


def killed_when_told(*told: int) -> tuple[RoundLab, int, Plan]:
    """Four nodes, whose lead of round 2 dies when `told` have its plan: the lab, the lead, the certified plan."""
    lab = RoundLab(4)
    lab.run_until(lab.height_of_all(1), 2 * ROUND_S)
    lab.run_for(TRAIN_S / 2)
    lead = lab.lead()

    def tell(number: int, effect: MemberEffect) -> Collection[int] | None:
        return told if number == lead and sends(effect, Plan) else None

    lab.intercept = tell
    lab.run_until(lab.reducing(told[0]), 2 * ROUND_S)
    lab.kill(lead)
    lab.run_until(lab.height_of({0, 1, 2, 3} - {lead}, 2), ROUND_S + REPLAN_S + HELD_TIMEOUT_S)
    return lab, lead, lab.plans[lab.value(2).plan]


@pytest.mark.parametrize("deaf", [0, 2, 3])
def test_member_that_the_plan_of_a_dead_lead_did_not_reach_stays_and_is_counted(deaf: int) -> None:
    """Two of four are a quorum, where one planned the round before: they do not go on without the third."""
    told = {0, 2, 3} - {deaf}
    lab, lead, plan = killed_when_told(*sorted(told))
    assert lead == 1
    assert lab.number(lab.value(1).planner) == lab.number(plan.planner) == 2
    assert lab.members(2) == lab.contributors(2) == {0, 2, 3}
    assert (plan.view, plan.origin) == (1, NO_HASH)
    assert [lab.number(peer) for peer in plan.evicted] == ([lead] if deaf != 2 else [])


@pytest.mark.parametrize("told", [0, 1, 2, 3])
def test_lead_killed_after_its_proposal_reached_only_some(told: int) -> None:
    for seed in range(4):
        lab = RoundLab(4, seed=seed)
        leader = lab.lead()
        others = [n for n in range(4) if n != leader]

        def intercept(
            number: int, effect: MemberEffect, lab: RoundLab = lab, leader: int = leader, others: Sequence[int] = others
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
        assert len({node.values[1].hash for node in lab.nodes}) == 1
        assert lab.members(4) == set(range(4))


def test_lead_restarted_after_it_wrote_its_proposal_stands_by_it() -> None:
    for nodes in (2, 3, 4):
        lab = RoundLab(nodes, seed=nodes)
        leader = lab.lead()
        lab.intercept = kill_before(lab, Propose)
        lab.run_until(lab.down(leader), 10)
        lab.after(0.05, partial(lab.restart, leader))
        lab.run_until(lab.height_of_all(2), 30)
        assert next(r.kind for r in lab.nodes[leader].log if r.round == 1 and r.kind != "ready") == "propose"


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
            number: int, effect: MemberEffect, lab: RoundLab = lab, followed: list[bool] = followed
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
