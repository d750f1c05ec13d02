"""A state transition by itself, over a cache: states that finals lead to, without the rounds around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.collectives.outer import OuterSettings
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.state.states import StateCache
from tests.node.ledger import AUTHORITY
from tests.node.swarm_in_a_box import manifest_of


def transition_of(cache: StateCache, outer: OuterSettings) -> StateTransition:
    """One whose outer step is `outer`."""
    manifest = manifest_of([AUTHORITY.peer_id], "int8", 1.0, "diloco")
    parts: Any = SimpleNamespace(
        cache=cache, state_store=None, reduce=SimpleNamespace(), config=SimpleNamespace(manifest=manifest)
    )
    transition = StateTransition(parts)
    transition._outer = outer
    return transition
