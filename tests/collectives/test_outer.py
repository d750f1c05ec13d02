from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3

from shoal.collectives.codecs import F32
from shoal.collectives.outer import OuterSettings, nesterov_step
from shoal.protocol.errors import LocalError


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def step(anchor: F32, momentum: F32, update: F32, settings: OuterSettings) -> tuple[F32, F32]:
    out_anchor, out_momentum = np.empty_like(anchor), np.empty_like(anchor)
    nesterov_step(anchor, momentum, update, settings, out_anchor, out_momentum)
    return out_anchor, out_momentum


def test_step_of_round_numbers_by_hand() -> None:
    anchor, momentum = step(f32(10), f32(4), f32(2), OuterSettings(lr=0.5, momentum=0.25))
    assert momentum.tolist() == [3.0]  # 0.25·4 + 2
    assert anchor.tolist() == [8.625]  # 10 − 0.5·(2 + 0.25·3)


def test_step_rounds_every_operation_by_itself() -> None:
    """Each fp32 operation again, as a double rounded to fp32: correct for one operation, not for fused ones."""
    mixed = np.arange(1, 4001, dtype=np.uint32) * np.uint32(2_654_435_761)
    values = (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    anchor, momentum, update = values[:1000], values[1000:2000], values[2000:3000] * np.float32(2.0**-9)
    lr, mu = float(np.float32(0.7)), float(np.float32(0.9))

    def rounded(doubles: np.ndarray) -> np.ndarray:
        return doubles.astype(np.float32).astype(np.float64)

    a, m, g = (x.astype(np.float64) for x in (anchor, momentum, update))
    want_m = rounded(rounded(m * mu) + g)
    want_a = rounded(a - rounded(lr * rounded(g + rounded(mu * want_m))))
    got_a, got_m = step(anchor, momentum, update, OuterSettings(lr=0.7, momentum=0.9))
    assert got_m.tobytes() == want_m.astype(np.float32).tobytes()
    assert got_a.tobytes() == want_a.astype(np.float32).tobytes()
    assert blake3(got_a.tobytes() + got_m.tobytes()).hexdigest()[:16] == "c60f8fe6915a0696"


def test_step_keeps_subnormals() -> None:
    tiny = np.array([1, 3, 0x8000_0002], np.uint32).view(np.float32)
    anchor, momentum = step(f32(0, 0, 0), f32(0, 0, 0), tiny, OuterSettings(lr=1, momentum=0))
    assert momentum.tobytes() == tiny.tobytes()
    assert anchor.tobytes() == (-tiny).tobytes()


def test_steps_agree_with_torch_sgd() -> None:
    generator = np.random.default_rng(7)
    anchor = generator.standard_normal(500).astype(np.float32)
    momentum = np.zeros(500, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(6):
        update = (generator.standard_normal(500) * 0.01).astype(np.float32)
        anchor, momentum = step(anchor, momentum, update, OuterSettings(lr=0.7, momentum=0.9))
        parameter.grad = torch.from_numpy(update)
        optimizer.step()
    np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(0, 0.9), (-1, 0.9), (float("nan"), 0), (0.7, 1), (0.7, -0.1)])
def test_settings_that_cannot_train_are_refused(lr: float, momentum: float) -> None:
    with pytest.raises(LocalError):
        OuterSettings(lr=lr, momentum=momentum)
