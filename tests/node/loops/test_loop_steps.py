"""What is measured of a loop between two contributions."""

from __future__ import annotations

import math

import torch

from shoal.node.loops.loop_steps import Tally


def test_the_loss_of_a_step_on_no_tokens_counts_where_it_is_a_number() -> None:
    """A rank whose part of a batch is all masked has none, and one that scales sums of losses has 0."""
    tally = Tally()
    for tokens, loss in ((8, torch.tensor(2.0)), (0, torch.tensor(math.nan)), (0, math.nan), (0, 0.0)):
        tally.add(1, tokens, loss)
    assert (tally.losses(), tally.steps, tally.tokens) == ((2.0, 2), 4, 8)
    tally.add(1, 8, torch.tensor(math.nan))
    assert math.isnan(tally.mean_loss()), "of a loop that has gone astray"
