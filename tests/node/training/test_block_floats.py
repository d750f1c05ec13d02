"""Numbers of 8 bits are the nearest two to a value, as often as makes its mean, and stay what they are."""

from __future__ import annotations

import pytest
import torch

from shoal.node.training.block_floats import BLOCK_VALUES, BlockFloats
from shoal.node.training.rounding import hashed, random_words

ALL = slice(None)
CPU = torch.device("cpu")
BITS = 20


def words(shape: tuple[int, ...], key: int) -> torch.Tensor:
    count = shape[0] * shape[1]
    return (random_words(hashed(key), 0, count, CPU) & ((1 << BITS) - 1)).view(shape)


def written(values: torch.Tensor, *, signed: bool, key: int = 1) -> BlockFloats:
    made = BlockFloats(values, signed=signed)
    made.write(ALL, values, words(tuple(values.shape), key))
    return made


def drawn(shape: tuple[int, int], *, signed: bool, spread: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    magnitude = torch.exp(spread * torch.rand(shape, generator=generator))
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return magnitude * sign if signed else magnitude


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_that_can_be_kept_is_kept_to_the_bit_whatever_the_words(signed: bool) -> None:
    made = BlockFloats(torch.zeros(2, BLOCK_VALUES), signed=signed)
    made.exponents.fill_(130)
    made.codes[0, 0], made.codes[1, 0] = torch.arange(BLOCK_VALUES), torch.arange(256)[-BLOCK_VALUES:]
    made.codes[:, 0, -1] -= 1  # 2^(E + 1) is kept too, in a block whose exponent is one more
    values, codes = made.read(ALL), made.codes.clone()
    assert values.abs().max() == 15.0 if signed else values[0].max() < values[1].max() == 15.0
    again = written(values, signed=signed)
    assert torch.equal(again.read(ALL), values)
    for key in range(5):
        again.write(ALL, again.read(ALL), words((2, BLOCK_VALUES), key))
        assert torch.equal(again.read(ALL), values)
    levels = codes.flatten() & made._top
    assert torch.equal(values.flatten() == 0, levels == 0 if signed else levels < 0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [32, 100, 128, 300, 509])
def test_a_value_becomes_one_of_its_two_neighbours_and_their_mean_is_the_value(signed: bool, width: int) -> None:
    values = drawn((8, width), signed=signed)
    rounds = 400
    read = torch.stack([written(values, signed=signed, key=key).read(ALL) for key in range(rounds)]).double()
    cut = values.view(torch.int32) >> BITS << BITS
    nearer, farther = (bits.view(torch.float32).double() for bits in (cut, cut + (1 << BITS)))
    assert bool(((read == nearer) | (read == farther)).all())
    deviation = (farther - nearer).abs() / 2 / rounds**0.5
    assert bool(((read.mean(0) - values).abs() <= 5 * deviation + 1e-9).all())
    together = float((deviation / values).square().sum().sqrt()) / values.numel()
    assert float((read.mean(0) / values).mean()) == pytest.approx(1, abs=5 * together)
    assert together < 2e-4


def test_levels_stay_where_they_are_when_the_largest_of_a_block_changes() -> None:
    kept = written(drawn((4, 128), signed=True), signed=True).read(ALL)
    changed = kept.clone()
    changed[:, 0] = 300.0
    assert torch.equal(written(changed, signed=True).read(ALL)[:, 1:], kept[:, 1:])


def test_what_is_too_small_for_its_block_is_zero_with_a_sign_and_the_least_without() -> None:
    values = torch.zeros(1, 128)
    values[0, :3] = torch.tensor([1.0, 1e-12, 0.0])
    assert written(values, signed=True).read(ALL)[0, :3].tolist() == [1.0, 0.0, 0.0]
    least = written(values, signed=False).read(ALL)[0]
    assert least[0] == 1.0
    assert bool((least[1:] == least[1]).all())
    assert 2.0**-32 < float(least[1]) < 2.0**-30


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_of_zeros_are_zeros_and_blocks_are_alone(signed: bool) -> None:
    values = torch.zeros(2, 2 * BLOCK_VALUES)
    assert not BlockFloats(values, signed=signed).read(ALL).any()
    values[0, :BLOCK_VALUES] = 2.0**33
    read = written(values, signed=signed).read(ALL)
    assert torch.equal(read, values)


def test_some_rows_are_read_and_written_alone() -> None:
    values = drawn((6, 300), signed=True)
    made, whole = BlockFloats(values, signed=True), written(values, signed=True)
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        made.write(rows, values[rows], words((6, 300), 1)[rows])
    assert torch.equal(made.codes, whole.codes)
    assert torch.equal(made.read(slice(2, 5)), whole.read(ALL)[2:5])
    assert made.codes.numel() + made.exponents.numel() < 1.02 * values.numel()
