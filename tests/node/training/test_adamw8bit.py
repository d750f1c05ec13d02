"""AdamW with moments in 8 bits moves by AdamW's equations but for what rounding them may change, and learns as well."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.node.training import adamw8bit
from shoal.node.training.adamw import EPSILON, AdamW
from shoal.node.training.adamw8bit import AdamW8bit
from shoal.node.training.inner_loop import Replica
from shoal.node.training.memory_need import MOMENT_BYTES, trainer_bytes
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train, Trained
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.manifest import OptimizerName

BETAS, DECAY = (0.9, 0.95), 0.1
SHAPES = ((40, 128), (16, 300), (9, 16, 40))
STEP_OF_LEVELS = 1 / 8
"""By so much of itself, at most, rounding changes a moment."""


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Columns differ by some 50 times."""
    return drawn(shape, seed) * torch.exp(2 * drawn(shape[1:], 0))


def pair(shape: tuple[int, ...], betas: tuple[float, float] = BETAS) -> tuple[torch.nn.Parameter, AdamW8bit]:
    parameter = torch.nn.Parameter(drawn(shape, 1))
    return parameter, AdamW8bit([parameter], betas=betas, weight_decay=DECAY)


def test_large_matrices_alone_are_kept_in_8_bits_and_take_two_bytes_a_parameter() -> None:
    shapes = {"matrix": (64, 80), "rows": (2000, 8), "small": (10, 40), "vector": (9000,), "kernel": (20, 30, 9)}
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
    kept = dict(AdamW8bit(parameters, betas=BETAS, weight_decay=DECAY).state(list(shapes)))
    in_8_bits = {name.partition(".")[2] for name, tensor in kept.items() if tensor.dtype == torch.uint8}
    assert in_8_bits == {"matrix", "kernel"}
    assert kept["second.vector"].dtype == kept["first.rows"].dtype == kept["first.small"].dtype == torch.float32
    for name, parameter in zip(shapes, parameters, strict=True):
        size = sum(tensor.nbytes for key, tensor in kept.items() if key.endswith(f".{name}"))
        assert size <= (2.1 if name in in_8_bits else 8) * parameter.numel()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at_a_time", [1, 1000, 1 << 18])
def test_every_step_differs_from_adamws_by_what_rounding_changed_at_most(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], at_a_time: int
) -> None:
    """Of moments m and v beside those of float32 before the last rounding, by the equations in float64."""
    monkeypatch.setitem(adamw8bit._AT_A_TIME, "cpu", at_a_time)
    parameter, optimizer = pair(shape)
    moments, (beta1, beta2) = optimizer._moments[0], BETAS
    exact_first, exact_second = (np.zeros((shape[0], math.prod(shape[1:]))) for _ in range(2))
    for steps in range(1, 13):
        lr = 0.01 * steps
        before = parameter.detach().double().numpy().reshape(exact_first.shape)
        first, second = (kept.read(slice(None)).double().numpy() for kept in (moments.first, moments.second))
        parameter.grad = gradient(shape, steps)
        given = parameter.grad.double().numpy().reshape(exact_first.shape)
        optimizer.step(lr)
        updates = []
        for m, v in ((first, second), (exact_first, exact_second)):
            m, v = beta1 * m + (1 - beta1) * given, beta2 * v + (1 - beta2) * given**2
            spread = np.sqrt(v / (1 - beta2**steps)) + EPSILON
            updates.append((m, v, m / (1 - beta1**steps) / spread))
        (m8, v8, ours), (m, v, theirs) = updates
        after = parameter.detach().double().numpy().reshape(exact_first.shape)
        np.testing.assert_allclose(after, before * (1 - lr * DECAY) - lr * ours, rtol=0, atol=1e-6)
        by_first = STEP_OF_LEVELS * beta1 * np.abs(exact_first) + 2.0**-15 * beta1 * np.abs(exact_first).max()
        least = v - STEP_OF_LEVELS * beta2 * exact_second
        bound = by_first / np.sqrt(least) + np.abs(m) * np.abs(1 / np.sqrt(least) - 1 / np.sqrt(v))
        scale = math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
        assert (np.abs(ours - theirs) <= scale * bound + 1e-6).all()
        assert steps == 1 or np.abs(ours - theirs).max() > 1e-3  # it is not float32
        exact_first, exact_second = m8, v8


def test_parameters_of_few_values_move_as_adamw_moves_them() -> None:
    shapes = ((10, 40), (7,))
    ours, theirs = ([torch.nn.Parameter(drawn(shape, 2)) for shape in shapes] for _ in range(2))
    one, other = (kind(some, betas=BETAS, weight_decay=DECAY) for kind, some in ((AdamW8bit, ours), (AdamW, theirs)))
    for steps in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = gradient(tuple(a.shape), steps) if a.dim() > 1 else drawn(tuple(a.shape), steps)
            b.grad = a.grad.clone()
        one.step(0.01)
        other.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_moment_that_forgets_slowly_forgets_nevertheless() -> None:
    """By three thousandths a step: to the nearest level, it would stand still for ever."""
    parameter, optimizer = pair((64, 128), betas=(0.997, 0.997))
    parameter.grad = drawn((64, 128), 1).sign() * (1 + drawn((64, 128), 2).abs())
    optimizer.step(0.0)
    kept = optimizer._moments[0]
    before = [moment.read(slice(None)).double() for moment in (kept.first, kept.second)]
    parameter.grad = torch.zeros(64, 128)
    for _ in range(300):
        optimizer.step(0.0)
    for moment, old in zip((kept.first, kept.second), before, strict=True):
        share = float(moment.read(slice(None)).double().abs().sum() / old.abs().sum())
        assert share == pytest.approx(0.997**300, rel=0.02)


def test_rows_held_apart_are_rounded_as_they_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of 70 rows, in parts of 40 and 30: each as the process that holds it has it."""
    whole, optimizer = pair((70, 200))
    parts = [torch.nn.Parameter(rows.clone()) for rows in whole.detach().split(40)]
    apart = [AdamW8bit([part], betas=BETAS, weight_decay=DECAY) for part in parts]
    for steps in range(3):
        whole.grad = gradient((70, 200), steps)
        optimizer.step(0.01)
        for first, part, one in zip((0, 40), parts, apart, strict=True):
            monkeypatch.setattr(adamw8bit, "first_row", lambda _, first=first: first)
            part.grad = whole.grad[first : first + len(part)].clone()
            one.step(0.01)
        monkeypatch.undo()
    assert torch.equal(torch.cat(parts), whole)
    for (name, together), *others in zip(optimizer.state("w"), *(one.state("w") for one in apart), strict=True):
        if name != "steps_8bit" and together.dim() > 1:
            assert torch.equal(torch.cat([tensor for _, tensor in others]), together), name


def test_row_without_a_gradient_does_not_move_and_neither_does_a_parameter() -> None:
    parameter, optimizer = pair((64, 128))
    before = parameter.detach().clone()
    optimizer.step(0.1)
    assert torch.equal(parameter, before)
    optimizer.decay(0.0)
    for steps in range(5):
        parameter.grad = gradient((64, 128), steps)
        parameter.grad[7], parameter.grad[:, 9] = 0, 0
        optimizer.step(0.1)
    still = parameter.detach() == before
    assert bool(still[7].all())
    assert bool(still[:, 9].all())
    assert int(still.sum()) == 64 + 127


def test_state_taken_over_is_gone_on_with_to_the_bit() -> None:
    shapes = (*SHAPES, (5,))
    ours, theirs = ([torch.nn.Parameter(drawn(shape, 2)) for shape in shapes] for _ in range(2))
    names = [str(number) for number in range(len(shapes))]
    one, other = (AdamW8bit(some, betas=BETAS, weight_decay=DECAY) for some in (ours, theirs))

    def step(parameters: list[torch.nn.Parameter], optimizer: AdamW8bit, number: int) -> None:
        for parameter in parameters:
            parameter.grad = drawn(tuple(parameter.shape), number)
        optimizer.step(0.02)

    for number in range(3):
        step(ours, one, number)
    for (name, kept), (again, live) in zip(one.state(names), other.state(names), strict=True):
        assert name == again
        live.copy_(kept)
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    for number in range(3, 6):
        step(ours, one, number)
        step(theirs, other, number)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_trainer_takes_for_moments_and_snapshots_what_the_formula_says(optimizer: OptimizerName) -> None:
    workload = TextWorkload(width=256, layers=2)
    inner = InnerSettings(optimizer=optimizer)
    replica = Replica(workload, seed=1, inner=inner, device=torch.device("cpu"))
    numel = replica.layout.numel
    moments = sum(tensor.nbytes for _, tensor in replica.inner_state_tensors()) / numel
    most = MOMENT_BYTES[optimizer]
    assert moments == pytest.approx({"adamw": 8, "adamw8bit": 2.02, "muon": 4.62}[optimizer], abs=0.005)
    assert moments < most + 0.001
    assert trainer_bytes(optimizer) == 12 + most


def learnt(optimizer: OptimizerName) -> float:
    """Held-out bits per byte of the standard library's text after 100 steps of 512 bytes."""
    workload = TextWorkload(width=64, layers=1, heads=2, context=64, batch=8)
    inner = InnerSettings(optimizer=optimizer, lr=3e-3)
    replica = Replica(workload, seed=1, inner=inner, device=torch.device("cpu"))
    anchor = replica.new_vector().numpy()
    replica.write_initial(anchor)
    replica.apply(anchor)
    share = Assignment(seed=1, round=1, member=0, members=1)
    replica.begin(Train(round=1, steps=100, assignment=share, contribute=False))
    while not isinstance(replica.step(anchor), Trained):
        pass
    replica.apply(replica.accounts.local().numpy(), fresh=True)
    return replica.evaluate()


@pytest.mark.usefixtures("one_torch_thread")
def test_text_is_learnt_as_well_as_by_adamw() -> None:
    plain, small = learnt("adamw"), learnt("adamw8bit")
    assert plain < 4.5  # of 8.0
    assert small == pytest.approx(plain, rel=0.01)
