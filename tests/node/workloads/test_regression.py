"""The example workload learns, deals distinct samples, and is the same under the same seed."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.node.workload import Assignment, Scalar, load_workload
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.errors import ConfigError


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


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        ("regression", "inputs", 1 << 40, "expected a whole number from 1 to 1048576"),
        ("regression", "batch", True, "expected a whole number from 1 to 65536"),
        ("regression", "noise", -1.0, "expected a number from 0 to 1000"),
        ("text", "width", 10**9, "expected a whole number from 1 to 16384"),
        ("text", "context", 10**9, "expected a whole number from 1 to 131072"),
    ],
)
def test_an_option_out_of_its_range_is_refused_in_one_line_with_that(
    name: str, option: str, value: Scalar, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(name, {option: value}, None)
    assert str(caught.value) == f"workload {name!r}: {option} is {value!r}, {expected}"
