"""What a strategy implies for the keys of [sync] that a manifest leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OVERLAP_STEPS: Final = 2
"""Of `streaming`, or as many as there are between two rounds: enough to hide a round and that nodes are ready apart."""
FRAGMENTS: Final = (4, 3, 5, 2, 1)
"""Of `streaming`: the first of these that divides the inner steps."""
STRATEGY_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "diloco": {"norm_clip": True},
    "ddp": {"inner_steps": 1, "codec": "fp32"},
    "streaming": {"codec": "int4", "fragments": FRAGMENTS[0], "overlap_steps": OVERLAP_STEPS, "norm_clip": True},
    "sparse": {"codec": "topk", "outer_lr": 1.0, "outer_momentum": 0.0, "error_feedback": 0.95, "norm_clip": True},
    "gossip": {"codec": "bf16", "outer_momentum": 0.5},
    "rollouts": {"inner_steps": 1},
}
"""What [sync] has under a strategy where it says nothing itself, and that differs from the keys' own defaults.

ddp is to be what synchronous data parallel is, the mean of all gradients; so it clips no norms unless told to."""
DEFAULT_STRATEGY = "diloco"


def with_strategy_defaults(tables: dict[str, Any]) -> dict[str, Any]:
    """`tables` with what the strategy implies for [sync], in the place of what is left out."""
    sync = tables.get("sync")
    if not isinstance(sync, dict) or not isinstance(strategy := sync.get("strategy", DEFAULT_STRATEGY), str):
        return tables
    implied = dict(STRATEGY_DEFAULTS.get(strategy, {}))
    steps = sync.get("inner_steps")
    if strategy == "streaming" and isinstance(steps, int):
        implied["fragments"] = next(count for count in FRAGMENTS if steps % count == 0)
        fragments = sync.get("fragments", implied["fragments"])
        if isinstance(fragments, int) and fragments > 0:
            implied["overlap_steps"] = min(OVERLAP_STEPS, max(0, steps // fragments))
        implied["late_steps"] = steps
    return {**tables, "sync": {**implied, **sync}}
