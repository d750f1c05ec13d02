"""Members that stand in different views meet in one where the round can be decided, and stay where they can decide."""

from __future__ import annotations

import pytest

from shoal.lab.signed import vote_of
from shoal.protocol.agreement import Agreement, Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.effects import MemberEffect
from shoal.protocol.following import APART_S
from shoal.protocol.messages import Plan, Stalled, Value, ViewChange
from shoal.protocol.voting import common_view
from tests.protocol.lab import SWARM, PaperIdentity, paper_identities, plan_hash, value_of
from tests.protocol.round_lab import BREAK_SEEN_S, LATENCY_S, TICK_S, RoundLab

pytestmark = pytest.mark.usefixtures("paper_signatures")

REDUCE_S = 1.0
STALL_S = 4.0
MEET_S = BREAK_SEEN_S + APART_S + 2 * TICK_S + LATENCY_S[1]
"""From a break that makes a member needed until the others are in its view."""


def swarm(members: int) -> tuple[list[PaperIdentity], Value]:
    """The founders, the first of whom has the casting vote, and C(0)."""
    identities = paper_identities(members)
    return identities, genesis(SWARM, [identity.peer_id for identity in identities])


@pytest.mark.parametrize(
    ("members", "view", "promised", "living", "leaves", "meeting"),
    [
        (5, 0, {}, {0, 1, 2, 3, 4}, (), 0),
        (5, 0, {4: 2}, {0, 1, 2, 3, 4}, (), 0),  # four are a quorum without it
        (5, 0, {4: 2}, {1, 3, 4}, (), 2),  # the three are one only together
        (5, 1, {4: 4, 3: 2, 1: 1}, {1, 3, 4}, (), 4),
        (5, 0, {4: 7, 3: 2}, {0, 1, 3, 4}, (), 2),  # the lowest that is enough
        (5, 2, {4: 1, 3: 1}, {1, 3, 4}, (), 2),  # never back
        (5, 0, {4: 2}, {0, 1, 2}, (), 0),  # it is dead: its promise keeps nobody
        (5, 0, {4: 2}, {1, 4}, (), 0),  # no view has a quorum
        (4, 0, {3: 1}, {0, 3}, (), 1),  # half with the casting vote, which one of them has
        (4, 0, {3: 1}, {0, 2, 3}, (), 0),
        (4, 0, {3: 1}, {1, 2, 3}, (), 1),
        (4, 0, {3: 1}, {1, 2, 3}, {0}, 0),  # the leaver is counted out: two of three are enough
        (2, 0, {1: 3}, {0, 1}, (), 0),
        (2, 0, {0: 3}, {0, 1}, (), 3),
    ],
)
def test_meeting_view_is_the_lowest_that_can_be_decided(
    members: int, view: int, promised: dict[int, int], living: set[int], leaves: set[int], meeting: int
) -> None:
    identities, previous = swarm(members)
    peers = [identity.peer_id for identity in identities]
    said = {peers[number]: up_to for number, up_to in promised.items()}
    alive, gone = {peers[number] for number in living}, {peers[number] for number in leaves}
    assert common_view(previous, view, said, alive, gone) == meeting


@pytest.mark.parametrize(
    ("promised", "living", "meeting"),
    [
        ({2: 2, 3: 1}, {0, 1, 2, 3}, 1),  # half of them, with the casting vote, are a quorum that counts half
        ({3: 2}, {0, 1, 2, 3}, 0),
        ({2: 2, 3: 2}, {0, 1, 2}, 0),  # of those who live more than half are here
    ],
)
def test_as_long_as_nothing_is_planned_members_meet_where_more_than_half_of_the_living_are(
    promised: dict[int, int], living: set[int], meeting: int
) -> None:
    identities, previous = swarm(4)
    peers = [identity.peer_id for identity in identities]
    said = {peers[number]: up_to for number, up_to in promised.items()}
    alive = {peers[number] for number in living}
    assert common_view(previous, 0, said, alive, (), planned=False) == meeting
    assert common_view(previous, 0, said, alive, ()) == 0


def test_promise_is_told_by_moves_and_by_votes() -> None:
    identities, previous = swarm(7)
    machine = Agreement(identity=identities[0], previous=previous)
    value = value_of(previous, plan_hash("a"), machine.lead(3))
    mover, voter, both = identities[1:4]
    for identity, view in ((mover, 2), (mover, 5), (mover, 3), (both, 6)):
        other = Agreement(identity=identity, previous=previous)
        moved = next(e.message for e in other.move_to(view) if isinstance(e, Broadcast))
        machine.receive(identity.peer_id, moved)
    for identity in (voter, both):
        machine.receive(identity.peer_id, vote_of(identity, 3, value))
    assert machine.promised() == {mover.peer_id: 5, voter.peer_id: 3, both.peer_id: 6}
    machine.move_to(1)
    assert machine.promised()[identities[0].peer_id] == 1


def moved_ahead(lab: RoundLab, view: int, *, others: int) -> tuple[int, list[int]]:
    """Let a member that leads neither the first view nor `view` move there while a plan is reduced: what is planned
    without its knowing is lost on it. Returns it and so many of the other followers."""
    leads = {lab.lead(0), lab.lead(view)}
    lab.run_until(lab.reducing(lab.lead(0)), 10)
    ahead, *rest = (number for number in range(len(lab.nodes)) if number not in leads)
    lab.out_of_turn(ahead, lab.nodes[ahead].running().agreement.move_to(view))
    return ahead, rest[:others]


@pytest.mark.parametrize("seed", range(4))
def test_member_that_moved_ahead_is_followed_once_it_is_needed(seed: int) -> None:
    lab = RoundLab(5, seed=seed)
    _, gone = moved_ahead(lab, 2, others=2)
    for number in gone:
        lab.kill(number)
    took_s = lab.run_until(lab.height_of_all(1), 60)
    staying = set(range(5)) - set(gone)
    assert took_s < MEET_S + STALL_S + 2 * REDUCE_S + 1.0
    assert lab.members(1) == staying
    assert lab.contributors(1) == staying
    lab.run_until(lab.height_of_all(2), 10)


def test_member_that_moved_ahead_is_left_alone_where_the_others_are_enough() -> None:
    lab = RoundLab(5, seed=1)
    ahead, (gone,) = moved_ahead(lab, 2, others=1)
    moves: list[int] = []

    def note(number: int, effect: MemberEffect) -> None:
        if isinstance(effect, Broadcast) and isinstance(effect.message, ViewChange) and lab.nodes[number].height == 0:
            moves.append(number)

    lab.intercept = note
    lab.kill(gone)
    lab.run_until(lab.height_of_all(1), 30)
    assert not set(moves) - {ahead}
    assert {node.certificate(lab.start).view for node in lab.running()} == {0}


def test_plan_is_made_without_who_moved_ahead_and_its_work_counts_in_the_next_round() -> None:
    lab = RoundLab(5)
    ahead = next(number for number in range(5) if number not in (lab.lead(0), lab.lead(2)))
    lab.out_of_turn(ahead, lab.nodes[ahead].running().agreement.move_to(2))
    took_s = lab.run_until(lab.height_of_all(1), 30)
    assert lab.contributors(1) == set(range(5)) - {ahead}
    assert took_s < 1.2 + REDUCE_S + 1.0  # nobody waits for its part of a plan that it does not follow
    lab.run_until(lab.height_of_all(2), 10)
    assert lab.contributors(2) == set(range(5))


def test_lead_does_not_wait_for_training_of_who_moved_ahead() -> None:
    lab = RoundLab(5)
    ahead = next(number for number in range(5) if number not in (lab.lead(0), lab.lead(2)))
    lab.nodes[ahead].trained_at = 100.0
    lab.out_of_turn(ahead, lab.nodes[ahead].running().agreement.move_to(2))
    assert lab.run_until(lab.height_of(set(range(5)) - {ahead}, 1), 30) < 1.2 + REDUCE_S + 1.0


def test_one_accuser_is_enough_against_who_moved_ahead_before_it_heard_of_the_plan() -> None:
    """Where one owner has all chunks, nobody else misses a contribution; a path through a third would not bring it."""
    lab = RoundLab(5)
    leader = lab.lead(0)
    ahead = next(number for number in range(5) if number not in (leader, lab.lead(2)))
    planned: list[Plan] = []

    def hide(number: int, effect: MemberEffect) -> set[int] | None:
        message = effect.message if isinstance(effect, Broadcast) else None
        if isinstance(message, Stalled) and number != leader:
            return set()
        if isinstance(message, Plan):
            planned.append(message)
            return set(range(5)) - {ahead}
        return None

    lab.intercept = hide
    lab.run_until(lambda: bool(planned), 10)
    lab.out_of_turn(ahead, lab.nodes[ahead].running().agreement.move_to(2))
    lab.run_until(lab.height_of_all(1), 30)
    assert lab.contributors(1) == set(range(5)) - {ahead}
    assert not any(plan.relays for plan in planned)


def test_view_that_lacks_votes_for_a_moment_is_kept() -> None:
    lab = RoundLab(5, seed=2)
    ahead, gone = moved_ahead(lab, 2, others=2)
    for number in gone:
        lab.kill(number)
    lab.run_for(BREAK_SEEN_S + 1.5)
    staying = [node for number, node in enumerate(lab.nodes) if number not in {ahead, *gone}]
    assert [(node.height, node.running().agreement.view) for node in staying] == [(0, 0)] * 2
    for number in gone:
        lab.restart(number)
    lab.run_until(lab.height_of_all(1), 60)
    assert {node.certificate(lab.start).view for node in lab.nodes} == {0}
    lab.run_until(lab.height_of_all(2), 30)


def test_wait_for_votes_begins_anew_after_a_time_without_quorum() -> None:
    lab = RoundLab(5)
    leader, me, needed = lab.lead(0), *[n for n in range(5) if n not in (lab.lead(0), lab.lead(2))][:2]
    machine, ahead = lab.nodes[me].running(), lab.nodes[needed].running()
    alive = [lab.nodes[number].peer for number in (leader, me, needed)]
    moved = next(e.message for e in ahead.agreement.move_to(2) if isinstance(e, Broadcast))
    machine.receive(ahead.me, moved, 0.0)
    assert machine.agreement.view == 0
    machine.peers_alive(alive, 0.0)
    machine.peers_alive(alive, 1.5)
    machine.peers_alive([machine.me], 1.6)
    machine.peers_alive(alive, 10.0)
    machine.peers_alive(alive, 11.9)
    assert machine.agreement.view == 0
    machine.peers_alive(alive, 12.1)
    assert machine.agreement.view == 1, "one step of its own after the other"
    machine.peers_alive(alive, 12.2)
    assert machine.agreement.view == 2
