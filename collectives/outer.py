"""The outer optimizer: what turns the mean update of a round into the next anchor, to the bit.

Source: DiLoCo, arXiv 2311.08105, algorithm 1 (outer Nesterov, 0.7 and 0.9); the recurrence is that of
torch.optim.SGD(nesterov=True).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.collectives.codecs import F32, check_denormals
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, frozen
from shoal.protocol.errors import LocalError


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Learning rate and momentum of the outer step; `lr=1, momentum=0` just takes the mean update."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.lr <= 100 and 0 <= self.momentum < 1):
            raise LocalError(f"no outer step has lr {self.lr} and momentum {self.momentum}")


def nesterov_step(
    anchor: F32, momentum: F32, update: F32, settings: OuterSettings, out_anchor: F32, out_momentum: F32
) -> None:
    """One outer step: m' = μ·m + g, θ' = θ − lr·(g + μ·m').

    anchor θ, momentum m, update g: (n,) float32, not changed. Results into out_anchor and out_momentum, which must
    not overlap with the inputs. Every operation is rounded to fp32 by itself, in this order; bit-identical anywhere.
    """
    lr, mu = np.float32(settings.lr), np.float32(settings.momentum)
    np.multiply(momentum, mu, out=out_momentum)
    np.add(out_momentum, update, out=out_momentum)
    np.multiply(out_momentum, mu, out=out_anchor)
    np.add(update, out_anchor, out=out_anchor)
    np.multiply(out_anchor, lr, out=out_anchor)
    np.subtract(anchor, out_anchor, out=out_anchor)


def apply_finals(state: CertifiedState, finals: Finals, settings: OuterSettings) -> tuple[CertifiedState, F32]:
    """The certified state after the round of `finals`, and the mean update that led to it.

    The update is (numel,) float32, read-only, as every member decoded it. `state` is not changed.

    Raises LocalError if the finals are of another round, term or size, or if this thread flushes subnormals.
    """
    check_denormals()
    plan = finals.plan
    if plan.round != state.round + 1 or plan.term != state.term or plan.numel != state.numel:
        raise LocalError(
            f"finals of round {plan.round} ({plan.numel} values) do not follow round {state.round} ({state.numel})"
        )
    grid = Grid.of(plan)
    anchor, momentum = np.empty_like(state.anchor), np.empty_like(state.momentum)
    for chunk in range(grid.chunks):
        at = slice(*grid.span(chunk))  # chunk by chunk, so that the six passes run in the cache
        nesterov_step(state.anchor[at], state.momentum[at], finals.update[at], settings, anchor[at], momentum[at])
    after = CertifiedState(
        term=state.term,
        round=plan.round,
        tokens=state.tokens + finals.tokens,
        layout_hash=state.layout_hash,
        anchor=frozen(anchor),
        momentum=frozen(momentum),
    )
    return after, finals.update
