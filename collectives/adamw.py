"""AdamW as a certified outer step: the same bits on every machine.

    ĝ  = c·g                                        c: what clips the whole mean gradient g to clip_norm
    m' = β₁·m + (1 − β₁)·ĝ
    v' = β₂·v + (1 − β₂)·(ĝ·ĝ)
    θ' = (1 − lr·λ)·θ − (lr / (1 − β₁ᵗ)) · (m' / (√v' / √(1 − β₂ᵗ) + ε))

Vectors are float32, and every operation on them is one of + − × ÷ √, rounded by itself, in the order in which
`adamw_step` has them. The factors are worked out in float64 by the same operations, and rounded to float32 once. That
is exact in the sense that matters, that IEEE 754 leaves no choice: a float64 of Python is a C double, the interpreter
makes each operation alone, and the powers βᵗ are products (`power`), since a C library's `pow` may differ in its last
bit. t is the number of the round, lr that of the tokens certified before it. Gradients are at most 2^64, so no square
of one is infinite, and nothing here becomes NaN, whose bits would differ.

The norm of g is the root of a sum of squares in float64. A product of two float32 is exact there, and the order of the
additions is fixed: in a span of NORM_SPAN_VALUES of a chunk, the halves are added to each other until one value is
left (what a short span lacks counts as +0); then span after span, and chunk after chunk.

Source: Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2, with torch.optim.AdamW's place of ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.collectives.codecs import F32
from shoal.collectives.schedule import learning_rate
from shoal.protocol.manifest import InnerSection

F64 = npt.NDArray[np.float64]
Moments = tuple[F32, F32, F32]
"""Anchor θ, first moment m and second moment v, ``(n,) float32`` each."""

NORM_SPAN_VALUES: Final = 1 << 17
"""Part of what is certified, unlike the spans in which a step is made."""
EPSILON: Final = 1e-8
NORM_EPSILON: Final = 1e-6
"""Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWFactors:
    """Factors and divisors of one AdamW step; the same for every value of the model."""

    clip: np.float32
    keep_first: np.float32
    take_first: np.float32
    keep_second: np.float32
    take_second: np.float32
    root: np.float32
    decay: np.float32
    step: np.float32

    @classmethod
    def of(cls, inner: InnerSection, *, steps: int, tokens: int, norm: float) -> AdamWFactors:
        """Compute the factors of step number `steps`, from 1, after `tokens`, with a gradient of this norm."""
        beta1, beta2 = inner.betas
        lr = learning_rate(inner, tokens)
        return cls(
            clip=np.float32(min(1.0, inner.clip_norm / (norm + NORM_EPSILON))),
            keep_first=np.float32(beta1),
            take_first=np.float32(1.0 - beta1),
            keep_second=np.float32(beta2),
            take_second=np.float32(1.0 - beta2),
            root=np.float32(math.sqrt(1.0 - power(beta2, steps))),
            decay=np.float32(1.0 - lr * inner.weight_decay),
            step=np.float32(lr / (1.0 - power(beta1, steps))),
        )


def power(base: float, exponent: int) -> float:
    """base ** exponent as products of float64, by the exponent's bits from the lowest on. exponent: 0 or more."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def square_sum(values: F32, scratch: F64) -> float:
    """The sum of the squares of `values`, ``(n,) float32``, in the order that the module's text fixes.

    scratch: of at least the next power of two from n on; its content is lost.
    """
    count = values.size
    width = 1 << max(0, count - 1).bit_length()
    np.multiply(values, values, out=scratch[:count], dtype=np.float64)
    scratch[count:width] = 0.0
    while width > 1:
        width //= 2
        np.add(scratch[:width], scratch[width : 2 * width], out=scratch[:width])
    return float(scratch[0])


def adamw_step(before: Moments, update: F32, factors: AdamWFactors, out: Moments, scratch: F32) -> None:
    """One step on a part of the model, from `before` into `out`, which must not overlap with it.

    update: the mean gradient g, ``(n,) float32``. scratch: ``(n,) float32``, not any of the others.
    """
    anchor, first, second = before
    out_anchor, out_first, out_second = out
    gradient = out_anchor  # its place is free until the anchor is made
    np.multiply(update, factors.clip, out=gradient)
    np.multiply(first, factors.keep_first, out=out_first)
    np.multiply(gradient, factors.take_first, out=scratch)
    np.add(out_first, scratch, out=out_first)
    np.multiply(second, factors.keep_second, out=out_second)
    np.multiply(gradient, gradient, out=scratch)
    np.multiply(scratch, factors.take_second, out=scratch)
    np.add(out_second, scratch, out=out_second)
    np.sqrt(out_second, out=scratch)
    np.divide(scratch, factors.root, out=scratch)
    np.add(scratch, np.float32(EPSILON), out=scratch)
    np.divide(out_first, scratch, out=scratch)
    np.multiply(scratch, factors.step, out=scratch)
    np.multiply(anchor, factors.decay, out=out_anchor)
    np.subtract(out_anchor, scratch, out=out_anchor)
