"""Real engines whose disks fail at operations drawn by lot: what they let out is on disk, whatever happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.node.simulated_disk import Disks, Fault, Survival
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

OPERATIONS_OF_TWO_ROUNDS = 80
"""And of a start."""
SEEDS, SEEDS_OF_AN_ORDEAL, SEEDS_A_TEST = 75, 200, 25


async def killed_at_random(box: Box) -> None:
    """Once or twice a disk fails or loses power at an operation drawn by lot; what survives is drawn by lot too."""
    rng = random.Random(box.seed)
    box.start_all()
    for _ in range(rng.randint(1, 2)):
        victim = box.node(rng.randrange(len(box.lives)))
        fault = rng.choice((Fault.CUT, Fault.CUT, Fault.CUT, Fault.FULL, Fault.BROKEN))
        victim.disk.faults[victim.disk.operations + rng.randint(1, OPERATIONS_OF_TWO_ROUNDS)] = fault
        await box.until(lambda: victim.over.is_set() or victim.disk.failed)  # noqa: B023
        if not victim.over.is_set():  # a disk's error need not end a node
            await trio.sleep(rng.uniform(0, 0.5))
            victim.cut()
            await victim.over.wait()
        await trio.sleep(rng.uniform(0, 0.5))
        box.start(victim.number, rng.choice((Survival.SYNCED, Survival.SYNCED, Survival.SOME, Survival.ALL)))
    await box.until_round(max(life.round for life in box.living()) + 1)


@pytest.mark.parametrize(
    "first",
    [
        *range(0, SEEDS, SEEDS_A_TEST),
        *(pytest.param(first, marks=pytest.mark.long) for first in range(SEEDS, SEEDS_OF_AN_ORDEAL, SEEDS_A_TEST)),
    ],
)
def test_nodes_whose_disks_fail_at_random_let_nothing_out_that_is_not_safe(
    tmp_path: Path, disks: Disks, first: int
) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        Box(tmp_path / str(seed), disks, seed=seed).run(killed_at_random)
