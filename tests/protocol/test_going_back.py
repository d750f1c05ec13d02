"""Rollbacks in whole rounds, in virtual time: who decides them, what they wait for, and that nothing waits for them."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import pairwise

import pytest

from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import MemberEffect
from shoal.protocol.messages import Certificate, Consent, Propose, Target, Term, Vote
from tests.protocol.round_lab import RoundLab

pytestmark = pytest.mark.usefixtures("paper_signatures")

ROUND_S = 2.6
SOON_S = 1.0
"""Consents, a proposal and votes travel, with a tick or two; nobody trains for it."""


def certified(lab: RoundLab, rounds: int) -> None:
    lab.run_until(lab.height_of_all(rounds), 10 * rounds)


def test_quorum_goes_back_at_once_and_all_go_on_in_the_next_term() -> None:
    lab = RoundLab(3, seed=1)
    certified(lab, 4)
    for number in range(2):
        lab.go_back(number, 2)
    assert lab.run_until(lab.height_of_all(5), 10) < SOON_S + ROUND_S  # the lead may be who does not want to
    while not lab.nodes[0].values[-1].rollback:
        certified(lab, lab.nodes[0].height + 1)
    back = lab.nodes[0].values[-1]
    assert back.rollback
    assert back.rollback.target.certificate == lab.value(2).hash
    assert (back.digest, back.members) == (lab.value(2).digest, lab.value(4).members)
    height = lab.nodes[0].height
    assert lab.run_until(lab.height_of_all(height + 1), 10) < 2 * ROUND_S
    after = lab.value(height + 1)
    assert (after.term, after.round, after.base) == (Term(0, 1), 3, back.hash)
    assert lab.contributors(height + 1) == {0, 1, 2}
    certified(lab, height + 2)
    assert len({tuple(value.hash for value in node.values[: height + 3]) for node in lab.nodes}) == 1
    assert not any(node.blamed for node in lab.nodes)


def test_whoever_wants_to_go_back_alone_keeps_nobody_waiting() -> None:
    lab, plain = RoundLab(3, seed=2), RoundLab(3, seed=2)
    for one in (lab, plain):
        certified(one, 3)
    lab.go_back(1, 1)
    assert lab.run_until(lab.height_of_all(8), 30) == pytest.approx(plain.run_until(plain.height_of_all(8), 30), abs=1)
    assert not any(value.rollback for node in lab.nodes for value in node.values)
    assert all(machine.consents().keys() == {lab.nodes[1].peer} for n in lab.nodes for machine in [n.running()])


def test_of_two_targets_that_halve_the_swarm_the_last_planners_is_taken() -> None:
    lab = RoundLab(4, seed=3)
    certified(lab, 4)
    for number, round in ((0, 1), (1, 1), (2, 2), (3, 2)):
        lab.go_back(number, round)
    certified(lab, 7)
    chain = lab.nodes[0].values
    at, back = next((i, value) for i, value in enumerate(chain) if value.rollback)
    assert back.rollback
    assert len(back.rollback.consenting) == 2
    assert chain[at - 1].planner in back.rollback.consenting


def only_to(lab: RoundLab, receivers: Collection[int], kinds: tuple[type, ...]) -> None:
    """From now on messages of these kinds reach nobody else."""

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
        return receivers if isinstance(effect, Broadcast) and isinstance(effect.message, kinds) else None

    lab.intercept = intercept


def pending_rollback(seed: int) -> tuple[RoundLab, int, int, int]:
    """A rollback for which the lead and one other have voted, while nobody knows that it is decided."""
    lab = RoundLab(3, seed=seed)
    certified(lab, 3)
    lab.run_for(0.3)
    lead = lab.lead()
    follower, third = (number for number in range(3) if number != lead)
    only_to(lab, (follower,), (Propose,))
    heard = lab.intercept

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
        mute = isinstance(effect, Broadcast) and isinstance(effect.message, Vote | Certificate)
        return () if mute else heard(number, effect)

    lab.intercept = intercept
    for number in (lead, follower):
        lab.go_back(number, 1)
    lab.run_until(lambda: any(r.kind == "vote" and r.round == 4 for r in lab.nodes[follower].log), SOON_S)
    return lab, lead, follower, third


@pytest.mark.parametrize("seed", range(4))
def test_rollback_that_may_be_decided_is_carried_on_by_a_lead_that_did_not_want_it(seed: int) -> None:
    lab, lead, follower, third = pending_rollback(seed)
    lab.kill(lead)
    lab.intercept = lambda number, effect: None
    (cast,) = (r.value for r in lab.nodes[follower].log if r.kind == "vote" and r.round == 4)
    assert cast is not None
    certified(lab, 4)
    decided = lab.nodes[third].values[4]
    assert decided.hash == cast.hash  # the dead lead's name included
    assert decided.planner == lab.nodes[lead].peer
    assert Target not in lab.nodes[third].orders
    certified(lab, 6)
    assert (lab.nodes[third].values[6].term, lab.nodes[third].values[6].round) == (Term(0, 1), 3)


@pytest.mark.parametrize("seed", range(4))
def test_swarm_that_loses_its_power_in_the_vote_decides_it_when_it_is_back(seed: int) -> None:
    lab, _, follower, _ = pending_rollback(seed)
    (cast,) = {r.value.hash for r in lab.nodes[follower].log if r.kind == "vote" and r.round == 4 and r.value}
    for number in range(3):
        lab.kill(number)
        lab.nodes[number].orders.clear()  # what its user ordered is not wanted any more
    lab.intercept = lambda number, effect: None
    for number in range(3):
        lab.restart(number)
    certified(lab, 4)
    assert {node.values[4].hash for node in lab.nodes} == {cast}
    certified(lab, 6)
    assert {node.values[6].term for node in lab.nodes} == {Term(0, 1)}


def test_result_that_may_be_decided_is_not_given_up_for_a_rollback() -> None:
    lab = RoundLab(3, seed=5)
    certified(lab, 3)
    lab.run_for(0.3)
    lead = lab.lead()
    follower, third = (number for number in range(3) if number != lead)

    def mute(number: int, effect: MemberEffect) -> Collection[int] | None:
        return () if isinstance(effect, Broadcast) and isinstance(effect.message, Vote | Certificate) else None

    lab.intercept = mute
    lab.run_until(lambda: any(r.kind == "vote" and r.round == 4 for r in lab.nodes[follower].log), 10)
    lab.kill(lead)
    lab.intercept = lambda number, effect: None
    for number in (follower, third):
        lab.go_back(number, 1)
    certified(lab, 4)
    assert not lab.nodes[follower].values[4].rollback
    certified(lab, 5)  # but the next round can decide it
    assert lab.nodes[follower].values[5].rollback


def test_rollback_waits_for_a_lead_that_has_the_state_and_nothing_waits_for_it() -> None:
    lab = RoundLab(3, seed=6)
    certified(lab, 3)
    lab.run_for(0.3)
    for number in range(3):
        lab.go_back(number, 1)
        lab.nodes[number].has_old_states = number == 0
    certified(lab, 6)
    assert not any(value.rollback for value in lab.nodes[0].values)
    for node in lab.nodes:
        node.has_old_states = True
    certified(lab, lab.nodes[0].height + 1)
    assert any(value.rollback for value in lab.nodes[0].values)


def test_consent_that_somebody_else_signed_is_blamed_on_who_brought_it() -> None:
    lab = RoundLab(3, seed=8)
    certified(lab, 3)
    sent: list[Consent] = []

    def forge(number: int, effect: MemberEffect) -> Collection[int] | None:
        if isinstance(effect, Broadcast) and isinstance(effect.message, Consent):
            sent.append(effect.message)
        return None

    lab.intercept = forge
    lab.go_back(0, 1)
    lab.run_until(lambda: bool(sent), 5)
    lab._send(1, 2, sent[-1])
    lab.run_for(0.2)
    assert ["consent whose signature" in text for text in lab.nodes[2].blamed] == [True]
    assert lab.nodes[2].running().consents().keys() == {lab.nodes[0].peer}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_all_decide_the_same_and_go_on(seed: int) -> None:
    """Members that want to go back to this or that, die, return and lose messages; the ledger sees every vote."""
    lab, rng = RoundLab(4, seed=seed, loss=0.05), random.Random(seed)
    certified(lab, 3)
    for _ in range(14):
        number = rng.randrange(4)
        node = lab.nodes[number]
        if rng.random() < 0.6:
            standing = node.values[-1].state_round
            for wishing in rng.sample(range(4), 3):
                lab.withdraw(wishing, Target)
                if 1 < standing <= lab.nodes[wishing].values[-1].state_round:
                    lab.go_back(wishing, rng.randrange(1, standing))
        elif node.up:
            lab.kill(number)
            lab.after(rng.uniform(0.1, 4.0), lambda number=number: lab.restart(number))  # type: ignore[misc]
        lab.run_for(rng.uniform(0.2, 3.0))
    lab.run_for(6.0)
    lab.loss = 0.0
    for number in range(4):
        lab.withdraw(number, Target)
    certified(lab, max(node.height for node in lab.nodes) + 2)
    shortest = min(node.height for node in lab.nodes)
    assert len({tuple(value.hash for value in node.values[: shortest + 1]) for node in lab.nodes}) == 1
    chain = lab.nodes[0].values
    assert sum(bool(value.rollback) for value in chain) >= 1
    for before, after in pairwise(chain):
        assert (after.term, after.round, after.base) == (before.next_term, before.next_round, before.hash)
        assert not after.rollback or set(after.members) | set(after.leaves) == set(before.members)
