"""The learning rate of the inner steps: a function of the tokens that the swarm has trained on, and of nothing else.

    t < W            lr · (t + 1) / W                                    W: warmup_tokens
    constant         lr
    linear           min_lr + (lr − min_lr) · (1 − p)                    p = min(1, (t − W) / decay_tokens)
    cosine           min_lr + (lr − min_lr) · (1 + cos π p) / 2

t is what certificates have counted, and what this node has trained on since. So all nodes are at the same place of the
schedule whenever they came and whatever they missed, and a rollback takes the schedule back with the state.

Source of the cosine: SGDR, arXiv 1608.03983, equation 5, without restarts.
"""

from __future__ import annotations

import math

from shoal.node.trainer_messages import InnerSettings


def learning_rate(settings: InnerSettings, tokens: int) -> float:
    """The learning rate of the step after `tokens`."""
    if tokens < settings.warmup_tokens:
        return settings.lr * (tokens + 1) / settings.warmup_tokens
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (tokens - settings.warmup_tokens) / max(1, settings.decay_tokens))
    left = 1.0 - progress if settings.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.min_lr + (settings.lr - settings.min_lr) * left
