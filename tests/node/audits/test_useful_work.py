"""Useful work: the loss on a member's own batches falls by what it learnt, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.node.audits.useful_work import WorkMeter
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.errors import LocalError

CPU = torch.device("cpu")


class Line:
    """y = 2x by least squares; member m sees x = m + 1 only."""

    metric = "mean squared error"

    def __init__(self, batches: int = 5) -> None:
        self._batches = batches

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False)

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        for number in range(self._batches):
            yield torch.full((number + 1, 1), float(assignment.member + 1))

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) - 2 * batch).square().mean(), len(batch)

    def evaluate(self, model: torch.nn.Module) -> float:
        return 0.0


def share(member: int) -> Assignment:
    return Assignment(seed=1, round=3, member=member, members=2)


def vector(value: float) -> F32:
    return np.array([value], np.float32)


def test_loss_is_of_the_members_own_first_batches_before_and_after() -> None:
    meter = WorkMeter(Line(), CPU)
    work = meter.weigh(vector(0), vector(-1), share(0))  # base − local: the member moved from 0 to 1
    assert (work.before, work.after) == (4.0, 1.0)
    assert work.useful
    other = meter.weigh(vector(0), vector(-1), share(1))
    assert (other.before, other.after) == (16.0, 4.0)


def test_batches_in_tuples_are_weighed() -> None:
    workload = RegressionWorkload()
    meter = WorkMeter(workload, CPU)
    anchor = np.zeros(workload.inputs * workload.outputs + workload.outputs, np.float32)
    assert meter.weigh(anchor, anchor, share(0)).before > 1.0
    assert not meter.weigh(anchor, anchor, share(0)).useful


@pytest.mark.parametrize("contribution", [1.0, 0.0, -5.0])
def test_turned_sign_nothing_and_too_much_are_no_work(contribution: float) -> None:
    assert not WorkMeter(Line(), CPU).weigh(vector(0), vector(contribution), share(0)).useful


def test_a_loss_that_is_no_number_is_no_work() -> None:
    assert not WorkMeter(Line(), CPU).weigh(vector(0), vector(3e38), share(0)).useful


def test_vectors_of_another_model_and_an_empty_share_are_refused() -> None:
    with pytest.raises(LocalError, match="model of 1"):
        WorkMeter(Line(), CPU).weigh(np.zeros(2, np.float32), vector(0), share(0))
    with pytest.raises(LocalError, match="without a batch"):
        WorkMeter(Line(batches=0), CPU).weigh(vector(0), vector(0), share(0))


class Scaled(torch.nn.Linear):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class ScaledLine(Line):
    def build(self) -> torch.nn.Module:
        return Scaled()


def test_buffers_are_weighed_as_the_values_that_they_are() -> None:
    meter = WorkMeter(ScaledLine(), CPU, chunk_values=4)
    anchor, contribution = np.array([[1, 0, 0, 0, 1], [0, 0, 0, 0, 2]], np.float32)
    work = meter.weigh(anchor, contribution, share(0))
    assert (work.before, work.after) == (1.0, 0.0)
