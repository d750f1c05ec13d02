"""The round machine under random faults: when they cease, a round is certified in bounded time."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from shoal.protocol.effects import MemberEffect
from tests.protocol.lab import paper_signatures
from tests.protocol.round_lab import Intercept, RoundLab
from tests.protocol.round_machines import ROUND_S

pytestmark = pytest.mark.usefixtures("paper_signatures")

__all__ = ["paper_signatures"]


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

    def intercept(number: int, effect: MemberEffect) -> Collection[int] | None:
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
        assert len({node.values[height].hash for node in lab.nodes}) == 1
        assert not any(node.blamed for node in lab.nodes)
