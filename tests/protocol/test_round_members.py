"""The round machine with members that are away, late, new, paused or leaving, and without a quorum of them."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from shoal.protocol.agreement import Standing
from shoal.protocol.departure import TOGETHER_S
from shoal.protocol.effects import MemberEffect
from shoal.protocol.messages import (
    NO_HASH,
    Vote,
)
from shoal.protocol.round import RESEND_S
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_machines import REDUCE_S, ROUND_S, sends
from tests.protocol.round_node import SETTINGS

pytestmark = pytest.mark.usefixtures("paper_signatures")


LONG_S = 4.0
"""Training in which there is time to leave."""


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
    lab.pause(1)
    lab.run_until(lab.height_of_all(4), 5 * ROUND_S)
    for height in (2, 3, 4):
        assert lab.contributors(height) == {0, 2}
        assert lab.members(height) == {0, 1, 2}
    assert {record.kind for record in lab.nodes[1].log} >= {"vote"}


def test_leaver_without_whom_the_others_can_go_on_just_goes() -> None:
    for seed in range(6):
        lab = RoundLab(3, seed=seed, train_s=LONG_S)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        lab.leave(2)
        lab.run_for(TOGETHER_S + 0.2)
        assert not lab.nodes[2].up
        lab.run_until(lab.height_of([0, 1], 2), LONG_S + 2)
        assert lab.value(2).leaves == ()
        assert lab.members(2) == {0, 1}
        lab.run_until(lab.height_of([0, 1], 4), 3 * LONG_S)


def test_leaver_without_whom_the_other_could_not_go_on_is_counted_out_and_gone() -> None:
    for seed in range(6):
        lab = RoundLab(2, seed=seed, train_s=LONG_S)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        leaver = lab.number(lab.value(1).planner)
        lab.leave(leaver)
        lab.run_for(TOGETHER_S + 0.2)
        assert lab.nodes[leaver].running().agreement.standing is Standing.LEFT
        lab.run_until(lab.height_of([1 - leaver], 2), LONG_S + 2)
        assert lab.value(2).leaves == (lab.nodes[leaver].peer,)
        assert lab.members(2) == {1 - leaver}
        lab.run_until(lab.height_of([1 - leaver], 4), 3 * LONG_S)
        assert lab.value(3).leaves == ()
        assert not lab.nodes[leaver].up


def test_leave_after_voting_waits_for_the_next_round() -> None:
    lab = RoundLab(3, seed=5)
    leaver = lab.lead()  # it votes first, and what follows takes the other some milliseconds
    dead, other = (number for number in range(3) if number != leaver)
    lab.kill(dead)
    said: list[str] = []

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
        if number == leaver and sends(effect, Vote) and not said:
            said.append("leave")
            lab.after(0.0, lambda: lab.leave(leaver))
        return None

    lab.intercept = intercept
    lab.run_until(lambda: lab.nodes[leaver].member.leaving, 10)
    assert lab.nodes[leaver].height == 0
    assert lab.nodes[leaver].running().agreement.standing is Standing.OPEN
    lab.run_until(lab.height_of([other], 2), 10)
    assert lab.value(1).leaves == ()
    assert lab.value(2).leaves == (lab.nodes[leaver].peer,)


def test_two_of_three_that_leave_one_after_the_other_leave_one_that_goes_on() -> None:
    lab = RoundLab(3, seed=6)
    for leaver in (1, 2):
        lab.run_until(lab.height_of_all(leaver), 10)
        lab.run_for(0.3)
        lab.leave(leaver)
    lab.run_until(lab.height_of([0], 5), 15)
    assert lab.members(4) == {0}


@pytest.mark.parametrize("stays", range(3))
@pytest.mark.parametrize("while_reducing", [False, True])
def test_two_of_three_that_leave_in_the_same_moment_leave_one_that_goes_on(stays: int, while_reducing: bool) -> None:
    for seed in range(2):
        lab = RoundLab(3, seed=seed, train_s=LONG_S)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        if while_reducing:
            lab.run_until(lab.reducing(stays), LONG_S + 2)
        began = lab.now
        for leaver in {0, 1, 2} - {stays}:
            lab.leave(leaver)
        lab.run_until(lab.height_of([stays], 5), 6 * LONG_S)
        assert lab.members(5) == lab.contributors(5) == {stays}
        lab.run_for(1.0)
        assert [node.number for node in lab.nodes if node.up] == [stays]
        assert lab.decided_at[5] - began < 4 * (LONG_S + 2)


def test_all_that_leave_in_the_same_moment_promise_nothing_and_any_majority_goes_on_later() -> None:
    for dead in range(3):
        lab = RoundLab(3, seed=dead, train_s=LONG_S)
        lab.run_until(lab.height_of_all(1), 10)
        lab.run_for(0.3)
        for leaver in range(3):
            lab.leave(leaver)
        lab.run_for(TOGETHER_S + 0.5)
        assert not any(node.up for node in lab.nodes)
        assert not any(record.kind == "leave" for node in lab.nodes for record in node.log)
        back = {0, 1, 2} - {dead}
        for number in back:
            lab.restart(number)
        lab.run_until(lab.height_of(back, 3), 4 * LONG_S)
        assert lab.members(3) == back


def test_node_on_another_state_is_not_planned() -> None:
    lab = RoundLab(4, seed=7)
    lab.run_until(lab.height_of_all(1), 10)
    odd = next(n for n in range(4) if n != lab.lead())
    lab.nodes[odd].wrong_state = True
    lab.run_until(lab.height_of_all(3), 30)
    assert odd not in lab.members(3)
    assert odd not in lab.contributors(3)
    assert lab.members(3) == set(range(4)) - {odd}
