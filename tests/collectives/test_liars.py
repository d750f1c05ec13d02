"""Liars in a swarm of real machines and reductions: who can be proven to lie is banned soon, and nobody else ever."""

from __future__ import annotations

import random

import pytest

from tests.collectives.liars_lab import LiarsLab, Lie
from tests.collectives.swarm_lab import paper_statements
from tests.protocol.lab import paper_signatures

pytestmark = pytest.mark.usefixtures("paper_signatures", "paper_statements")
__all__ = ["paper_signatures", "paper_statements"]

LIES: tuple[Lie, ...] = ("sums", "nan", "copies", "squares", "votes", "results")


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_that_can_be_proven_is_banned_within_five_rounds(lie: Lie) -> None:
    lab = LiarsLab(5, lies={3: lie}, seed=LIES.index(lie))
    lab.nodes[3].train_s = 1.5  # after the one that it copies
    lab.run_until(lab.height_of(lab.watches, 6), 120)
    assert lab.accused() == {3}
    assert lab.bans().keys() == {3}
    assert lab.bans()[3] <= 5
    for round in range(lab.bans()[3], 7):
        assert 3 not in lab.members(round)
    lab.check(lab.bans()[3] + 1)


def test_three_liars_of_sixteen_are_banned_within_five_rounds() -> None:
    lab = LiarsLab(16, lies={5: "sums", 9: "nan", 15: "copies"}, seed=7)
    lab.nodes[15].train_s = 1.5
    lab.run_until(lab.height_of(lab.watches, 7), 200)
    assert lab.accused() == {5, 9, 15}
    assert lab.bans().keys() == {5, 9, 15}
    assert max(lab.bans().values()) <= 5
    lab.check(max(lab.bans().values()) + 1)


def test_member_that_hears_of_no_evidence_fetches_what_a_value_names() -> None:
    lab = LiarsLab(4, lies={3: "nan"}, deaf={0, 1}, seed=1)
    lab.run_until(lab.height_of(lab.watches, 6), 120)
    assert lab.bans().keys() == {3}
    assert all(watch.verdicts for watch in lab.watches.values())


@pytest.mark.parametrize("seed", range(6))
def test_kills_hangs_repairs_and_returns_convict_nobody(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(3, 7)
    lab = LiarsLab(nodes, lies={}, seed=seed)
    for _ in range(6):
        lab.run_for(rng.uniform(0.1, 3.0))
        number = rng.randrange(nodes)
        node = lab.nodes[number]
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
        elif rng.random() < 0.6:
            lab.kill(number)
        else:
            lab.hang(number)
    for number, node in enumerate(lab.nodes):
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
    height = max(node.height for node in lab.nodes)
    lab.run_until(lab.height_of_all(height + 2), 120)
    assert lab.accused() == set()
    assert not any(watch.refused for watch in lab.watches.values()), "nothing was even suspected"
    assert lab.bans() == {}
    lab.check()
