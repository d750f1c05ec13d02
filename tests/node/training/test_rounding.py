"""The random bits of rounding are those of the hash, spread evenly, and differ by place and by key."""

from __future__ import annotations

import torch

from shoal.node.training.rounding import hashed, random_words

CPU = torch.device("cpu")


def test_words_are_the_hash_of_their_place_and_key() -> None:
    for first in (0, 7, 2**31 - 2):
        words = random_words(0xDEAD_BEEF, first, 5, CPU).tolist()
        assert [word & 0xFFFF_FFFF for word in words] == [hashed((first + n) ^ 0xDEAD_BEEF) for n in range(5)]
    assert hashed(1) == 1753845952  # of the published function


def test_parts_of_a_stretch_have_the_words_of_the_whole() -> None:
    whole = random_words(5, 0, 1000, CPU)
    assert torch.equal(torch.cat([random_words(5, 0, 300, CPU), random_words(5, 300, 700, CPU)]), whole)


def test_every_bit_is_as_often_one_as_zero_and_no_two_keys_or_neighbours_agree() -> None:
    words, others = random_words(hashed(1), 0, 1 << 16, CPU), random_words(hashed(2), 0, 1 << 16, CPU)
    for bit in range(32):
        ones = (words >> bit) & 1
        assert abs(float(ones.double().mean()) - 0.5) < 0.01  # five deviations
        assert abs(float((ones == (others >> bit) & 1).double().mean()) - 0.5) < 0.01
        assert abs(float((ones[1:] == ones[:-1]).double().mean()) - 0.5) < 0.01
