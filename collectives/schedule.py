"""The learning rate: a function of the tokens that the swarm has trained on, and of nothing else.

    t < W            lr · (t + 1) / W                                    W: warmup_tokens
    constant         lr
    linear           min_lr + (lr − min_lr) · (1 − p)                    p = min(1, (t − W) / decay_tokens)
    cosine           min_lr + (lr − min_lr) · (1 + cos π p) / 2

For inner steps t is what certificates have counted, and what this node has trained on since. So all nodes are at the
same place of the schedule whenever they came and whatever they missed, and a rollback takes the schedule back with the
state. For a certified step t is what certificates had counted before it, and the rate is part of what is certified: it
is the same to the bit on every machine, for it is made of + − × ÷ of float64, each rounded by itself. The cosine
is a polynomial for that reason: a C library's is as exact, and differs from the next one's in the last bit.

Source of the cosine schedule: SGDR, arXiv 1608.03983, equation 5, without restarts.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

_PI: Final = 3.141592653589793
_COSINE: Final = tuple((-1) ** k / math.factorial(2 * k) for k in range(13))
"""The Taylor series, whose first term left out is below 2^-64 where |x| ≤ π/2."""


class RateSettings(Protocol):
    """The keys of the manifest's [inner] that the learning rate follows from."""

    @property
    def lr(self) -> float: ...
    @property
    def warmup_tokens(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def decay_tokens(self) -> int: ...
    @property
    def min_lr(self) -> float: ...


def learning_rate(settings: RateSettings, tokens: int) -> float:
    """The learning rate of the step after `tokens`."""
    if tokens < settings.warmup_tokens:
        return settings.lr * (tokens + 1) / settings.warmup_tokens
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (tokens - settings.warmup_tokens) / max(1, settings.decay_tokens))
    left = 1.0 - progress if settings.schedule == "linear" else (1.0 + cosine_of_half_turns(progress)) / 2.0
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def cosine_of_half_turns(turns: float) -> float:
    """cos(π · turns) for 0 ≤ turns ≤ 1, to 2^-52; the same bits everywhere."""
    if turns > 0.5:
        return -cosine_of_half_turns(1.0 - turns)
    square = (_PI * turns) * (_PI * turns)
    result = 0.0
    for coefficient in reversed(_COSINE):
        result = result * square + coefficient
    return result
