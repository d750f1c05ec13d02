"""Token efficiency: a run beside the curve of synchronous training, loss against loss, tokens for tokens.

    loss        the mean of the last `EVALUATIONS` evaluations of the run
    ratio       loss ÷ the mean of the synchronous curve at the same numbers of tokens, between points by straight lines
    efficiency  tokens that synchronous training needs for that loss ÷ the mean number of tokens at these evaluations

What synchronous training needs is where its curve, made monotone, first comes down to the loss. It is made so by
isotonic regression: of all curves that never rise, the one that is nearest in the sum of squares. Of a run that is the
synchronous one itself, on a curve that falls evenly, ratio and efficiency are 1.

Source: pool adjacent violators, Barlow et al., Statistical Inference under Order Restrictions (1972), chapter 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

import msgspec
import numpy as np

from shoal.lab.bench.train_spec import Point

EVALUATIONS: Final = 5
"""One alone is noisy at a constant learning rate."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a run's end with a synchronous curve.

    tokens: the mean of those at its last evaluations. sync_tokens: what synchronous training needs for the same loss;
    None if its curve ends above that. sync_length: where its curve ends; of a longer run there is no sync_val_loss.
    """

    val_loss: float
    sync_val_loss: float | None
    tokens: float
    sync_tokens: float | None
    sync_length: int

    @property
    def loss_ratio(self) -> float | None:
        """The run's loss ÷ that of synchronous training with as many tokens."""
        return None if self.sync_val_loss is None else self.val_loss / self.sync_val_loss

    @property
    def efficiency(self) -> float:
        """Tokens that synchronous training needs for the loss ÷ those of the run; at least that if it never has it."""
        return (self.sync_length if self.sync_tokens is None else self.sync_tokens) / self.tokens


def ending(curve: Sequence[Point], sync: Sequence[Point]) -> Ending:
    """Compare a run with a synchronous curve, or what there is of it.

    Both begin with the point before the first round, which is left out of the run.
    """
    last = curve[1:][-EVALUATIONS:]
    loss, length = fmean(point.val_loss for point in last), sync[-1].tokens if sync else 0
    return Ending(
        val_loss=loss,
        sync_val_loss=fmean(loss_at(point.tokens, sync) for point in last) if length >= last[-1].tokens else None,
        tokens=fmean(point.tokens for point in last),
        sync_tokens=tokens_for(loss, sync),
        sync_length=length,
    )


def loss_at(tokens: float, curve: Sequence[Point]) -> float:
    """The curve's loss at a number of tokens, on the straight line between its points; beyond its end the last."""
    return float(np.interp(tokens, [point.tokens for point in curve], [point.val_loss for point in curve]))


def tokens_for(loss: float, curve: Sequence[Point]) -> float | None:
    """Tokens at which the curve, made monotone, first comes down to a loss; None if it never does."""
    losses = falling([point.val_loss for point in curve])
    if losses and losses[0] <= loss:
        return float(curve[0].tokens)
    for (before, above), (after, below) in pairwise(zip(curve, losses, strict=True)):
        if below <= loss:
            return before.tokens + (after.tokens - before.tokens) * (above - loss) / (above - below)
    return None


def falling(losses: Sequence[float]) -> list[float]:
    """Of all sequences that never rise, the one nearest to `losses`: neighbours that rise become their mean."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for loss in losses:
        mean, count = loss, 1
        while pools and pools[-1][0] < mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
