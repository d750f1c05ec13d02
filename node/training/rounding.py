"""Rounding up or down at random, so that the mean over many roundings is the value itself.

To the nearest, a number in few bits stands still under any change of less than half a step: a mean that forgets slowly
never moves, nor does a parameter under a small learning rate. Rounded up with the probability that its distance says,
it moves as it should on average.

What is random is a hash of where a value lies and how often it was rounded. So nothing is to be kept for a restart, and
processes that hold a tensor together round it as one would.

Source: Deep Learning with Limited Numerical Precision, arXiv 1502.02551; the hash is `lowbias32` of C. Wellons, "Hash
Function Prospecting" (2018).
"""

from __future__ import annotations

import torch

_WORD = 0xFFFF_FFFF
_ROUNDS = ((16, 0x7FEB_352D), (15, 0x846C_A68B), (16, 1))
"""Each: by how many bits the word is shifted onto itself, and what it is multiplied by then."""


def hashed(word: int) -> int:
    """The hash of 32 bits, 32 bits."""
    for shift, factor in _ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word


def random_words(key: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each of `count` places from `first` on, ``(count,) int32``, other ones for every key.

    key: of 32 bits, to be well mixed.
    """
    words = torch.arange(first, first + count, dtype=torch.int64, device=device).to(torch.int32)
    words.bitwise_xor_(_signed(key))
    for shift, factor in _ROUNDS:
        words.bitwise_xor_((words >> shift).bitwise_and_(_WORD >> shift))
        words.mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    """The same 32 bits as torch's int32 has them."""
    return word - (1 << 32) if word >> 31 else word
