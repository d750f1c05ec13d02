"""The example workload learns, deals distinct samples, and is the same under the same seed."""

from __future__ import annotations

import itertools

import torch

from shoal.node.workload import Assignment
from shoal.node.workloads.regression import RegressionWorkload


def share(member: int, round_: int = 1) -> Assignment:
    return Assignment(seed=7, round=round_, member=member, members=2)


def test_regression_deals_each_member_and_round_its_own_samples() -> None:
    workload = RegressionWorkload()
    first = [next(workload.batches(share(member, round_)))[0] for member in (0, 1) for round_ in (1, 2)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    assert torch.equal(first[0], next(workload.batches(share(0)))[0])


def test_regression_weighs_samples() -> None:
    workload = RegressionWorkload(batch=5)
    loss, tokens = workload.loss(workload.build(), next(workload.batches(share(0))))
    assert tokens == 5
    assert loss.ndim == 0


def test_regression_reaches_the_noise() -> None:
    torch.manual_seed(0)
    workload = RegressionWorkload()
    model = workload.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with torch.no_grad():
        before = workload.evaluate(model)
    for batch in itertools.islice(workload.batches(share(0)), 100):
        optimizer.zero_grad()
        workload.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert before > 1.0
    with torch.no_grad():
        assert workload.evaluate(model) < 2 * workload.noise**2
