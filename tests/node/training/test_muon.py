"""Muon is the published arithmetic, moves the parameters that it should, and is gone on with after a restart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.node.training.adamw import AdamW
from shoal.node.training.muon import ITERATIONS, MOMENTUM, RMS, Muon, matrices, orthogonalised

BETAS, DECAY = (0.9, 0.95), 0.1
SHAPES = ((6, 9), (9, 6), (5, 5), (1, 7))


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_singular_values(matrix: torch.Tensor) -> np.ndarray:
    """The same in float64 by another way: the polynomial of each singular value, which keeps the vectors."""
    left, values, right = np.linalg.svd(matrix.numpy().astype(np.float64), full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(ITERATIONS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


class Model(torch.nn.Module):
    """A little of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = torch.nn.Embedding(11, 6)
        self.hidden = torch.nn.Linear(6, 4)
        self.convolution = torch.nn.Conv1d(2, 3, 2)
        self.head = torch.nn.Linear(6, 11, bias=False)


def step(model: torch.nn.Module, optimizer: Muon | AdamW, seed: int, lr: float) -> None:
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = drawn(tuple(parameter.shape), 100 * seed + place)
    optimizer.step(lr)


def optimizer_of(model: torch.nn.Module) -> Muon:
    return Muon(model, list(model.parameters()), betas=BETAS, weight_decay=DECAY)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalised_matrix_has_its_vectors_and_values_near_one(shape: tuple[int, int]) -> None:
    matrix = drawn(shape, 1)
    found = orthogonalised(matrix)
    np.testing.assert_allclose(found, by_singular_values(matrix), rtol=0, atol=2e-5)
    assert np.linalg.svd(found.numpy(), compute_uv=False).min() > 0.6
    assert np.linalg.svd(found.numpy(), compute_uv=False).max() < 1.3


def test_no_momentum_moves_nothing() -> None:
    assert not orthogonalised(torch.zeros(3, 5)).any()


def test_hidden_matrices_alone_are_muons() -> None:
    model = Model()
    chosen = matrices(model, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, is_matrix in zip(names, chosen, strict=True) if is_matrix] == ["hidden.weight"]
    kept = [name for name, _ in optimizer_of(model).state(names)]
    assert [name for name in kept if "hidden.weight" in name] == ["momentum.hidden.weight"]
    assert {"first.tokens.weight", "second.head.weight", "first.hidden.bias", "steps"} <= set(kept)


def test_matrix_moves_by_the_equations_and_all_else_as_adamw_moves_it() -> None:
    model, plain = Model(), Model()
    optimizer, adamw = optimizer_of(model), AdamW(plain.parameters(), betas=BETAS, weight_decay=DECAY)
    expected, momentum = model.hidden.weight.detach().double().numpy().copy(), np.zeros((4, 6))
    place = [name for name, _ in model.named_parameters()].index("hidden.weight")
    for number in range(1, 8):
        lr = 0.01 * number
        step(model, optimizer, number, lr)
        step(plain, adamw, number, lr)
        gradient = drawn((4, 6), 100 * number + place).double().numpy()
        momentum = MOMENTUM * momentum + gradient
        update = by_singular_values(torch.from_numpy(gradient + MOMENTUM * momentum))
        expected = expected * (1 - lr * DECAY) - lr * RMS * math.sqrt(6) * update
        np.testing.assert_allclose(model.hidden.weight.detach(), expected, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)) == (name != "hidden.weight")


def test_update_is_torchs_to_what_bf16_can_tell() -> None:
    ours, theirs = (torch.nn.Linear(24, 40, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    optimizer = optimizer_of(ours)
    reference = torch.optim.Muon(
        theirs.parameters(), lr=0.1, momentum=MOMENTUM, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for number in range(3):
        step(ours, optimizer, number, 0.1)
        theirs.weight.grad = drawn((40, 24), 100 * number)
        reference.step()
    moved = (ours.weight - before).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved


def test_parameter_without_a_gradient_stays() -> None:
    model = Model()
    before = model.hidden.weight.detach().clone()
    optimizer = optimizer_of(model)
    optimizer.step(0.1)
    assert torch.equal(model.hidden.weight, before)


def test_state_taken_over_is_gone_on_with_to_the_bit() -> None:
    first, second = Model(), Model()
    names = [name for name, _ in first.named_parameters()]
    one, other = optimizer_of(first), optimizer_of(second)
    for number in range(3):
        step(first, one, number, 0.02)
    second.load_state_dict(first.state_dict())
    for (name, kept), (again, live) in zip(one.state(names), other.state(names), strict=True):
        assert name == again
        live.copy_(kept)
    one.decay(0.3)
    other.decay(0.3)
    for number in range(3, 6):
        step(first, one, number, 0.02)
        step(second, other, number, 0.02)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
