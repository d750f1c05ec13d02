"""When a member gives the lead of its view up: at once if it was there before, later if it has not come yet."""

from __future__ import annotations

import pytest

from shoal.lab.signed import change_of
from shoal.protocol.agreement import Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.following import VIEW_SYNC_S
from shoal.protocol.leading import RELAY_SETTLE_S
from shoal.protocol.messages import Target, Value, ViewChange, domain_hash
from shoal.protocol.planning import OBSERVER, absent_ready
from shoal.protocol.round import RoundMachine
from shoal.protocol.voting import lead_order
from tests.protocol.lab import SWARM, PaperIdentity, paper_identities, plan_hash, value_of
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_machines import accuse, contribution, planned
from tests.protocol.round_node import SETTINGS, deal_evenly

pytestmark = pytest.mark.usefixtures("paper_signatures")

MEMBERS = 5
SOON_S = 0.1


def order_of(previous: Value) -> list[PaperIdentity]:
    """The members in the order in which they lead the round after `previous`."""
    by_peer = {identity.peer_id: identity for identity in paper_identities(MEMBERS)}
    return [by_peer[peer] for peer in lead_order(previous)]


def machine_of(identity: PaperIdentity, previous: Value, *, trains: bool = False, now: float = 0.0) -> RoundMachine:
    """A machine that has announced its contribution, as three of the others have, or that trains yet."""
    machine = RoundMachine(
        identity=identity,
        previous=previous,
        state=previous.digest,
        life=bytes(32),
        settings=SETTINGS,
        deal=deal_evenly,
    )
    for other in () if trains else order_of(previous)[1:]:
        ready = contribution(machine, root=domain_hash("root", other.peer_id.encode()))
        machine.receive(other.peer_id, ready, now) if other is not identity else machine.ready(ready, now)
    return machine


def first_value() -> Value:
    return genesis(SWARM, [identity.peer_id for identity in paper_identities(MEMBERS)])


def later_value() -> Value:
    """C(1) of the same members."""
    start = first_value()
    return value_of(start, plan_hash("a"), lead_order(start)[0])


def views(machine: RoundMachine, *looks: tuple[float, set[int]], order: list[PaperIdentity]) -> list[int]:
    """The view of `machine` after each look at who is alive, by their places in `order`."""
    seen = []
    for now, alive in looks:
        machine.peers_alive([order[place].peer_id for place in alive], now)
        seen.append(machine.agreement.view)
    return seen


@pytest.mark.parametrize("alone_at_first", [True, False])
def test_lead_that_has_not_come_yet_is_waited_for_from_the_quorum_on(alone_at_first: bool) -> None:
    order = order_of(first_value())
    machine = machine_of(order[4], first_value(), now=0.0 if alone_at_first else 10.0)
    looks = [(0.0, {4}), (7.0, {4, 3})] if alone_at_first else []
    quorum = [(10.0, {1, 2, 3, 4}), (10.0 + VIEW_SYNC_S - SOON_S, {1, 2, 3, 4}), (10.0 + VIEW_SYNC_S, {1, 2, 3, 4})]
    assert views(machine, *looks, *quorum, order=order)[-3:] == [0, 0, 1]


def test_wait_for_the_lead_begins_anew_with_a_new_quorum() -> None:
    order = order_of(first_value())
    machine = machine_of(order[4], first_value())
    looks = [(0.0, {1, 2, 3, 4}), (1.5, {3, 4}), (5.0, {1, 2, 3, 4}), (5.0 + VIEW_SYNC_S - SOON_S, {1, 2, 3, 4})]
    assert views(machine, *looks, (5.0 + VIEW_SYNC_S, {1, 2, 3, 4}), order=order) == [0, 0, 0, 0, 1]


def test_lead_that_comes_in_time_keeps_its_view() -> None:
    order = order_of(first_value())
    machine = machine_of(order[4], first_value())
    looks = [(0.0, {1, 2, 3, 4}), (1.0, {0, 2, 3, 4}), (7.0, {0, 2, 3, 4})]
    assert views(machine, *looks, order=order) == [0, 0, 0]


def test_lead_that_is_dead_while_all_train_is_given_up_only_when_half_of_them_are_done() -> None:
    """Then there is something for it to do; until then it may be back, and who moved on would have parted for nothing.

    So it was in a storm of faults: one member saw the lead die as the round began, and be back 0.4 s later. The others
    went on without the member, and the round did not count it.
    """
    order = order_of(later_value())
    machine = machine_of(order[4], later_value(), trains=True)
    assert views(machine, (0.0, {0, 1, 2, 3, 4}), (1.0, {1, 2, 3, 4}), (60.0, {1, 2, 3, 4}), order=order) == [0, 0, 0]
    assert views(machine, (60.4, {0, 1, 2, 3, 4}), (61.0, {1, 2, 3, 4}), order=order) == [0, 0]
    for count, one in enumerate((order[1], order[2]), start=1):
        machine.receive(one.peer_id, contribution(machine, root=bytes([count]) * 32), 61.0 + count)
    assert views(machine, (65.0 - SOON_S, {1, 2, 3, 4}), (65.0, {1, 2, 3, 4}), order=order) == [0, 1]


def test_lead_that_is_back_a_moment_after_half_are_done_keeps_its_view_and_who_knows_better_is_followed() -> None:
    """Its links come up one after the other; those to which it is linked already go on with it, and count who does."""
    order = order_of(later_value())
    back, moved = (machine_of(order[4], later_value(), trains=True) for _ in range(2))
    for machine in (back, moved):
        assert views(machine, (0.0, {0, 1, 2, 3, 4}), (1.0, {1, 2, 3, 4}), order=order) == [0, 0]
        for count, one in enumerate((order[1], order[2]), start=1):
            machine.receive(one.peer_id, contribution(machine, root=bytes([count]) * 32), 2.0)
        assert machine.agreement.view == 0
    assert views(back, (3.0, {0, 1, 2, 3, 4}), (5.0, {0, 1, 2, 3, 4}), order=order) == [0, 0]
    moved.receive(order[1].peer_id, change_of(order[1], later_value(), 1), 2.1)
    assert moved.agreement.view == 1


def test_dead_lead_is_given_up_where_no_member_trains_and_a_newcomer_has_contributed() -> None:
    """Half of those that train are never done, as none does; and yet there is something to plan."""
    order = order_of(later_value())
    machine = machine_of(order[4], later_value(), trains=True)
    for one in order:
        absent = absent_ready(OBSERVER, later_value(), later_value().digest)
        machine.receive(one.peer_id, absent, 0.0) if one is not order[4] else machine.ready(absent, 0.0)
    assert views(machine, (0.0, {0, 1, 2, 3, 4}), (1.0, {1, 2, 3, 4}), order=order) == [0, 1]


def test_dead_lead_is_given_up_while_all_train_where_somebody_would_go_back() -> None:
    order = order_of(later_value())
    machine = machine_of(order[4], later_value(), trains=True)
    assert views(machine, (0.0, {0, 1, 2, 3, 4}), (1.0, {1, 2, 3, 4}), order=order) == [0, 0]
    machine.consent(Target(0, first_value().hash), asked=True, now=2.0)
    assert machine.agreement.view == 1


def test_lead_that_was_there_is_given_up_at_once() -> None:
    order = order_of(first_value())
    machine = machine_of(order[4], first_value())
    assert views(machine, (0.0, {0, 4}), (0.1, {1, 2, 3, 4}), order=order) == [0, 1]


def test_lead_that_died_between_two_rounds_is_given_up_once_others_would_have_seen_it_back() -> None:
    order = order_of(later_value())
    machine = machine_of(order[4], later_value())
    looks = [(0.0, {1, 2, 3, 4}), (VIEW_SYNC_S - SOON_S, {1, 2, 3, 4}), (VIEW_SYNC_S, {1, 2, 3, 4})]
    assert views(machine, *looks, order=order) == [0, 0, 1]


def test_member_that_was_started_again_waits_for_the_lead_of_a_later_round() -> None:
    order = order_of(later_value())
    machine = machine_of(order[4], later_value())
    looks = [(0.0, {4}), (1.0, {1, 2, 3, 4}), (1.0 + VIEW_SYNC_S, {1, 2, 3, 4})]
    assert views(machine, *looks, order=order) == [0, 0, 1]


def test_member_that_knows_better_is_followed_at_once() -> None:
    order = order_of(first_value())
    machine, other = machine_of(order[4], first_value()), machine_of(order[3], first_value())
    assert views(machine, (0.0, {1, 2, 3, 4}), order=order) == [0]
    (moved,) = [
        e.message for e in other.agreement.move_to(1) if isinstance(e, Broadcast) and isinstance(e.message, ViewChange)
    ]
    machine.receive(other.me, moved, 0.2)
    assert machine.agreement.view == 1


def test_lead_that_never_comes_costs_the_start_that_moment_and_no_more() -> None:
    """Everyone else is linked when the round begins."""
    undisturbed = RoundLab(MEMBERS, train_s=0.5)
    took_s = undisturbed.run_until(undisturbed.height_of_all(1), 10)
    lab = RoundLab(MEMBERS, train_s=0.5)
    leader = lab.lead()
    for number, node in enumerate(lab.nodes):
        node.present = {peer: life for peer, life in node.present.items() if peer != lab.nodes[leader].peer}
        node.log.clear()
        if number != leader:
            lab.restart(number, seen=False)
    lab.kill(leader)
    assert lab.run_until(lab.height_of_all(1), 20) < took_s + VIEW_SYNC_S + 0.5
    assert lab.members(1) == set(range(MEMBERS)) - {leader}


def test_lead_that_went_on_to_another_view_is_followed_out_of_its_own_and_no_further() -> None:
    """Nothing can come of its view without it; a lead that gave up, or a liar, held the others there for minutes."""
    order = order_of(later_value())
    machine = machine_of(order[4], later_value())
    everybody = set(range(MEMBERS))
    assert views(machine, (0.0, everybody), (1.0, everybody), order=order) == [0, 0]
    machine.receive(order[1].peer_id, change_of(order[1], later_value(), 1), 1.1)
    assert machine.agreement.view == 0, "another member's word takes nobody along"
    effects = machine.receive(order[0].peer_id, change_of(order[0], later_value(), 7), 1.2)
    assert machine.agreement.view == 1
    assert any(isinstance(effect, Broadcast) and isinstance(effect.message, ViewChange) for effect in effects)


def test_no_round_waits_for_ever_for_members_whose_trainers_are_stuck_and_they_count_again_when_they_are_not() -> None:
    lab = RoundLab(3, train_s=0.5)
    lab.run_until(lab.height_of_all(2), 30)
    stuck = [node for node in lab.nodes if node.number]
    for node in stuck:
        node.trained_at = float("inf")
    assert lab.run_until(lambda: lab.nodes[0].member.unready() != frozenset(), 30)
    assert lab.nodes[0].member.unready() == {node.peer for node in stuck}
    height = lab.nodes[0].chain.height
    lab.run_for(600)
    assert lab.nodes[0].chain.height == height, "as long as they may be slow, more than half of all are waited for"
    for node in stuck:
        node.stuck = True
    lab.run_until(lab.height_of_all(height + 2), 60)
    assert lab.contributors(height + 2) == {0}
    assert lab.members(height + 2) == {0, 1, 2}, "they vote"
    assert lab.nodes[0].member.unready() == frozenset()
    for node in stuck:
        node.stuck, node.trained_at, node.train_s = False, lab.now, 2.0
    height = lab.nodes[0].chain.height
    lab.run_until(lab.height_of_all(height + 3), 60)
    assert lab.contributors(height + 3) == {0, 1, 2}


def test_lead_that_was_gone_together_with_the_quorum_has_its_time_to_answer_when_it_is_back() -> None:
    """What was said against it before it died, of seconds in which it was not there, cost it its view in the first
    moment: whoever moved on alone then was left out, as the lead went on in the view that it knew."""
    _, machines, leader, plan = planned(5)
    others = [machine for number, machine in enumerate(machines) if number != leader]
    me, accusers = others[0], others[1:4]
    everybody = [machine.me for machine in machines]
    me.peers_alive(everybody, 1.2)
    for one in accusers[:2]:
        me.receive(one.me, accuse(plan, plan.planner), 1.3)
    me.peers_alive([me.me, others[3].me], 1.4)
    me.tick(8.0)
    me.peers_alive(everybody, 9.0)
    me.tick(9.1)
    assert me.agreement.view == 0, "nobody answers while nobody is there"
    me.tick(9.0 + 2 * RELAY_SETTLE_S)
    assert me.agreement.view == 1, "and what stands then counts"
