"""Tokens drawn for samples: equal parameters say equal things, and training's random numbers are left alone."""

from __future__ import annotations

from typing import Final

import torch

TEMPERATURE: Final = 0.8
"""Below 1, as a small model at 1 says what it half believes; a model that says the likeliest repeats itself."""
SEED: Final = 1


def sample_generator() -> torch.Generator:
    """The random numbers of one sampling, the same for each."""
    return torch.Generator().manual_seed(SEED)


def draw_tokens(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row, (B,) int64 on the host, of logits (B, V)."""
    weights = torch.softmax(logits.detach().float().cpu() / TEMPERATURE, dim=-1)
    return torch.multinomial(weights, 1, generator=generator)[:, 0]
