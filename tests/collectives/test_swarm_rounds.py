"""Whole rounds over real machines and real reductions in virtual time: losses at any moment, every value recomputed."""

from __future__ import annotations

import random

import pytest

from tests.collectives.swarm_lab import SwarmLab, paper_statements
from tests.protocol.lab import paper_signatures

pytestmark = pytest.mark.usefixtures("paper_signatures", "paper_statements")
__all__ = ["paper_signatures", "paper_statements"]

QUIET_S = 60.0
"""After faults cease, everyone who is up has certified another two rounds within this virtual time."""


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_undisturbed_rounds_are_exact_and_count_everyone(nodes: int) -> None:
    lab = SwarmLab(nodes, seed=nodes)
    lab.run_until(lab.height_of_all(3), 30)
    lab.check()
    for round in (1, 2, 3):
        assert lab.members(round) == lab.contributors(round) == set(range(nodes))
    assert {len(plan.evicted) for plan in lab.plans.values()} == {0}


@pytest.mark.parametrize("seed", range(24))
def test_one_killed_in_mid_reduce_costs_only_a_repair(seed: int) -> None:
    nodes = 3 + seed % 4
    lab = SwarmLab(nodes, seed=seed)
    victim = seed % nodes
    lab.run_until(lab.reducing(victim), 20)
    lab.run_for(lab.rng.uniform(0, 0.6))
    at = lab.now
    lab.kill(victim)
    survivors = [n for n in range(nodes) if n != victim]
    lab.run_until(lab.height_of(survivors, 1), 20)
    assert lab.now - at < 4.0
    lab.restart(victim)
    lab.run_until(lab.height_of_all(4), 60)
    lab.check()
    assert lab.members(4) == set(range(nodes))


@pytest.mark.parametrize("seed", range(40))
def test_kills_hangs_and_returns_at_any_moment_leave_every_round_exact(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(3, 7)
    lab = SwarmLab(nodes, seed=seed, loss=rng.choice((0.0, 0.0, 0.05)))
    for _ in range(rng.randrange(2, 7)):
        lab.run_for(rng.uniform(0.1, 3.0))
        number = rng.randrange(nodes)
        node = lab.nodes[number]
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
        else:
            rng.choice((lab.kill, lab.hang))(number)
    for number, node in enumerate(lab.nodes):
        if not node.up:
            lab.restart(number)
        elif node.hung:
            lab.resume(number)
    height = max(node.height for node in lab.nodes)
    lab.run_until(lab.height_of_all(height + 2), QUIET_S)
    lab.check()
