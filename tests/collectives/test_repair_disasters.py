"""Any number lost at any point, leads that replace each other: survivors end with the same exact finals."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Held
from tests.collectives.reduce_lab import CODECS
from tests.collectives.repair_lab import Swarm, swarm_of

SEEDS, BATCH = 300, 20
SOME_PIECES = 12


class Disaster:
    """A swarm that loses up to four, at any point, also while it is being repaired, and changes leads over it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        count = rng.randint(3, 6)
        weights = [rng.choice((1, 1, 2, 5, 1000)) for _ in range(count)]
        if rng.random() < 0.3:
            weights[rng.randrange(1, count)] = 0
        self.swarm: Swarm = swarm_of(weights, CODECS[seed % len(CODECS)], seed=seed)
        self.to_die = rng.randint(1, min(4, count - 2))
        self.view = self.swarm.living_view(0)

    def run(self) -> Swarm:
        swarm, rng = self.swarm, self.rng
        swarm.start(*(n for n in range(len(swarm.nodes)) if rng.random() < 0.8))
        swarm.deliver(rng.randrange(3 * SOME_PIECES * len(swarm.nodes)))
        self._kill()
        if self.to_die and rng.random() < 0.3:
            self._kill()
        while not self._repair():
            pass
        swarm.start()
        swarm.deliver()
        return swarm

    def _kill(self) -> None:
        victim = self.rng.choice(self.swarm.survivors())
        self.swarm.kill(victim.number, loss=self.rng.choice((0.0, 0.5, 1.0)))
        self.to_die -= 1

    def _trouble(self) -> bool:
        """Time passes; whether the lead has to begin anew."""
        swarm, rng = self.swarm, self.rng
        swarm.deliver(rng.randrange(SOME_PIECES))
        if self.to_die and rng.random() < 0.2:
            self._kill()
            return True
        if rng.random() < 0.15:
            self.view += 1
            return True
        return False

    def _repair(self) -> bool:
        """Whether everyone who lives followed the plan."""
        swarm = self.swarm
        self.view = view = swarm.living_view(self.view)
        evicted, helds = swarm.evicted(swarm.plans[0]), dict[PeerId, Held]()
        for node in swarm.shuffled():
            if self._trouble():
                return False
            helds[node.peer] = swarm.close_off(node, evicted)
        plan = swarm.revise(helds, evicted, view=view)
        lead = swarm.node_of(plan.planner)
        for node in [lead, *(node for node in swarm.shuffled() if node is not lead)]:
            swarm.adopt(node, plan, self._heard(helds))
            if self._trouble():
                return False
        return True

    def _heard(self, helds: Mapping[PeerId, Held]) -> dict[PeerId, Held]:
        return {who: held for who, held in helds.items() if self.rng.random() < 0.9}


@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_survivors_of_any_disaster_end_with_the_same_exact_finals(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        Disaster(seed).run().check()
