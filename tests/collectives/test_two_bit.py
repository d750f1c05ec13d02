"""Two bits a value: what they cost, what they lose, and that what is lost is carried on and does not pile up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives.codecs import F32, codec
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.state.contributions import Contributions
from shoal.protocol.identity import PeerId
from tests.collectives.encodings import decode, encode, f32

GRID = Grid(3 * 4096 + 700, 4096)
"""Four chunks, the last of a whole block and one that is shorter."""


def drawn(seed: int, n: int = GRID.numel) -> F32:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def through(values: F32) -> F32:
    return decode("2bit", encode("2bit", values).tobytes(), values.size)


def test_two_bits_take_two_bits_and_an_eighth() -> None:
    assert codec("2bit").encoded_bytes(1 << 18) * 8 / (1 << 18) == 2.125


def test_error_of_normal_values_is_near_the_least_that_two_bits_can_have() -> None:
    values = drawn(1, 1 << 18)
    error = float(((through(values) - values).astype(np.float64) ** 2).mean())
    assert 0.1175 < error < 0.13  # the least, of two magnitudes made for normal values: Max, 1960


@settings(max_examples=100)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=60))
def test_what_is_lost_is_uncorrelated_with_what_is_sent(values: list[float]) -> None:
    """And the magnitudes have their sum: both because every value is sent as the mean of those sent alike."""
    owed = f32(*values)
    sent = through(owed).astype(np.float64)
    scale = max(float(np.abs(owed).max()), 2.0**-100)
    assert float(np.abs(sent).sum()) == pytest.approx(float(np.abs(owed.astype(np.float64)).sum()), abs=1e-4 * scale)
    assert float((sent * (owed - sent)).sum()) == pytest.approx(0, abs=1e-4 * scale**2)


@pytest.mark.parametrize("draw", ["standard_normal", "heavy"])
def test_what_was_sent_and_what_is_left_are_all_that_was_owed_and_what_is_left_stops_growing(draw: str) -> None:
    """Half of what is learnt is the same in every round: what always goes the same way must not pile up."""

    def part(seed: int) -> F32:
        rng = np.random.default_rng(seed)
        drawn = rng.standard_t(3, GRID.numel) if draw == "heavy" else rng.standard_normal(GRID.numel)
        return drawn.astype(np.float32)

    node = Contributions(Fragments(GRID), "2bit", 3, sender=PeerId("me"))
    owed, sent, left = np.zeros(GRID.numel), np.zeros(GRID.numel), []
    for round in range(1, 61):
        learnt = part(round) + part(0)
        made = node.make(round, round, 10, learnt, base=round.to_bytes(32, "little"))
        owed += learnt
        sent += made.encoded.decoded()
        residual = made.values - made.encoded.decoded()
        np.testing.assert_allclose(sent + residual, owed, rtol=0, atol=1e-4)
        left.append(float(np.linalg.norm(residual) / np.linalg.norm(learnt)))
        node.settle(round, [True] * GRID.chunks)
    assert max(left[30:]) < 1.1 * max(left[10:30])
    assert max(left) < {"standard_normal": 0.6, "heavy": 1.0}[draw]
