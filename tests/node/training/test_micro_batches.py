"""A batch in parts gives the gradient of the whole, and what cannot be split is said in one line."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.node.training.inner_loop import Replica
from shoal.node.training.micro_batches import deal_batch, split_batch
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train
from shoal.node.workload import Workload
from shoal.node.workloads.regression import RegressionWorkload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError
from tests.node.training.test_inner_loop import CPU

SHARE = Assignment(seed=3, round=1, member=0, members=1)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Pair(NamedTuple):
    inputs: torch.Tensor
    lengths: torch.Tensor


class Uneven(RegressionWorkload):
    """Rows that weigh differently, as texts of different length do: a row's first input says whether it counts."""

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        counts = inputs[:, 0] > 0.5
        errors = (model(inputs) - targets).square().mean(dim=1)
        return errors[counts].mean(), int(counts.sum())


def gradients(workload: Workload, parts: int, *, steps: int = 1) -> tuple[list[torch.Tensor], int, float]:
    replica = Replica(workload, seed=3, inner=InnerSettings(clip_norm=1e9), device=CPU, accumulate=parts)
    anchor = np.zeros(replica.layout.numel, np.float32)
    replica.write_initial(anchor)
    replica.apply(anchor)
    replica.begin(Train(round=1, steps=steps, assignment=SHARE))
    report = None
    for _ in range(steps):
        report = replica.step(np.zeros_like(anchor))
    assert report is not None
    found = [parameter.grad.clone() for parameter in replica.model.parameters() if parameter.grad is not None]
    return found, report.tokens, report.loss  # type: ignore[union-attr]


WORKLOADS = [
    RegressionWorkload(),
    Uneven(),
    TextWorkload(width=32, layers=2, heads=2, context=32, batch=8),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_give_the_gradient_of_the_whole(workload: Workload, parts: int) -> None:
    whole, tokens, loss = gradients(workload, 1)
    cut, cut_tokens, cut_loss = gradients(workload, parts)
    assert max(float(g.abs().max()) for g in whole) > 1e-2
    assert cut_tokens == tokens
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    for mine, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_part_without_tokens_counts_nothing() -> None:
    workload = Uneven(batch=4)
    batch = next(iter(workload.batches(SHARE)))
    assert 0 < int((batch[0][:, 0] > 0.5).sum()) < 4
    whole, tokens, _ = gradients(workload, 1)
    cut, cut_tokens, _ = gradients(workload, 4)
    assert cut_tokens == tokens
    for mine, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_every_tensor_is_cut_and_the_rest_goes_along() -> None:
    rows = torch.arange(5)
    batch = {"pair": Pair(rows, rows * 10), "list": [rows, (rows,)], "name": "x", "none": None, "scale": 2.0}
    parts = split_batch(batch, 2)
    assert [part["pair"].lengths.tolist() for part in parts] == [[0, 10, 20], [30, 40]]
    assert [part["list"][1][0].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all((part["name"], part["none"], part["scale"]) == ("x", None, 2.0) for part in parts)


def test_processes_beyond_the_rows_get_copies_that_do_not_count() -> None:
    whole, counted = deal_batch((torch.arange(5), "x"), 2)
    assert ([part[0].tolist() for part in whole], counted) == ([[0, 1, 2], [3, 4]], 2)
    short, counted = deal_batch(torch.arange(2), 4)
    assert ([part.tolist() for part in short], counted) == ([[0], [1], [0], [0]], 2)
    with pytest.raises(ConfigError, match="--processes: the workload's batches hold no tensors"):
        deal_batch("text", 2)


@pytest.mark.parametrize(
    ("batch", "parts", "said"),
    [
        ((torch.zeros(4), torch.zeros(5)), 2, "tensors of 4, 5 rows"),
        ((torch.zeros(4), torch.zeros(())), 2, "tensors of 0, 4 rows"),
        ("text", 2, "no tensors"),
        (torch.zeros(3), 4, "have 3 rows; give at most that many"),
        ((torch.zeros(4), object()), 2, "hold a object, which cannot be split"),
    ],
)
def test_what_cannot_be_split_is_said_in_one_line(batch: Any, parts: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_batch(batch, parts)
    assert said in str(caught.value)
    assert "--accumulate" in str(caught.value)
    assert "\n" not in str(caught.value)
