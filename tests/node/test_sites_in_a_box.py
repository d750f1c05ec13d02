"""Real engines of which some are of one site: what each learnt is counted once, whoever of them dies, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.node.simulated_disk import Disks, Survival
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

SITES = {0: "north", 1: "north", 2: "south", 3: "south", 4: "east"}
NODES = len(SITES)


def box_of(tmp_path: Path, disks: Disks, seed: int = 0, strategy: str = "diloco") -> Box:
    return Box(tmp_path, disks, nodes=NODES, sites=SITES, seed=seed, strategy=strategy)


def delegates(box: Box) -> set[int]:
    """The first of each site by PeerId."""
    return {min((n for n in SITES if SITES[n] == site), key=lambda n: box.peers[n]) for site in set(SITES.values())}


@pytest.mark.parametrize("seed", range(3))
def test_one_of_each_site_contributes_what_all_of_it_learnt(tmp_path: Path, disks: Disks, seed: int) -> None:
    box = box_of(tmp_path, disks, seed)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(6)

    box.run(course)
    rounds = len(box.values)
    plans = [box.finals[value.plan].plan for value in box.values.values()]
    assert box.counted.sum() == NODES * rounds, "all work counts, and in the round that it was made for"
    for plan in plans[1:]:
        counted = {box.peers.index(one.peer) for one in plan.participants if one.weight}
        assert counted == delegates(box)
        assert {one.peer: one.tokens for one in plan.participants if one.weight and one.tokens == 200}
        assert plan.delegates.keys() == set(box.peers) - {box.peers[n] for n in counted}
        assert not {plan.participants[one.owner].peer for one in plan.owners} & plan.delegates.keys()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_nothing_is_counted_twice_whoever_dies_and_comes_back(tmp_path: Path, disks: Disks, seed: int) -> None:
    box = box_of(tmp_path, disks, seed, strategy="streaming" if seed % 4 == 3 else "diloco")
    rng = box.rng

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(1)
        for _ in range(6):
            await trio.sleep(rng.uniform(0.0, 0.4))
            number = rng.randrange(NODES)
            life = box.node(number)
            survival = rng.choice([Survival.ALL, Survival.SYNCED])
            life.cut() if survival is not Survival.ALL else life.scope.cancel()
            await life.over.wait()
            await trio.sleep(rng.uniform(0.0, 1.0))
            box.start(number, survival)
            await box.until_round(max(life.round for life in box.living()) + 1)
        await box.until_round(max(life.round for life in box.living()) + 3)

    box.run(course)
    assert len(box.values) > 9
