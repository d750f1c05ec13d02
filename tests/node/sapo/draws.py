"""Draws of completions for tests: of chance, and assigned as in a swarm."""

from __future__ import annotations

import random
from functools import partial

from shoal.node.sapo.generation import AssignedDraws
from shoal.node.sapo.policy import Draws
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import assigned_draws
from shoal.protocol.wire import SwarmId


def of_chance(seed: int) -> Draws:
    """Numbers by chance, one after the other whatever the place."""
    chance = random.Random(seed)
    return lambda _: chance.random()


def assigned(seed: int) -> AssignedDraws:
    """Draws as they are assigned to one member of a swarm."""
    return partial(assigned_draws, SwarmId(seed.to_bytes(32, "big")), PeerId("one"))
