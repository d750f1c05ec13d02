"""The learning rate as a function of tokens: values by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shoal.collectives.schedule import learning_rate
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest
from tests.manifests import manifest_of
from tests.node.training.test_inner_loop import CPU

FOUNDER = Identity.from_seed(bytes(32)).peer_id


def rates(schedule: str, *tokens: int) -> list[float]:
    falls: dict[str, Any] = {} if schedule == "constant" else {"decay_tokens": 1000, "min_lr": 0.2}
    settings = InnerSettings(lr=1.0, warmup_tokens=100, schedule=schedule, **falls)  # type: ignore[arg-type]
    return [learning_rate(settings, t) for t in tokens]


def test_every_schedule_warms_up_alike() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule, 0, 49, 99, 100) == [0.01, 0.5, 1.0, 1.0]


def test_constant_stays_linear_falls_evenly_and_cosine_in_half_a_wave() -> None:
    assert rates("constant", 600, 10**9) == [1.0, 1.0]
    assert rates("linear", 350, 600, 850, 1100, 10**9) == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates("cosine", 350, 600, 850, 1100, 10**9) == pytest.approx(
        [0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2, 0.2]
    )


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    settings = InnerSettings(lr=0.5, schedule="cosine", decay_tokens=8)
    assert [learning_rate(settings, t) for t in (0, 4, 8)] == pytest.approx([0.5, 0.25, 0.0])


def test_steps_follow_the_certified_tokens_and_those_of_the_node_since() -> None:
    """With a decay to nothing at 1000 tokens the last step that moves anything is the one before."""
    inner = InnerSettings(lr=0.1, weight_decay=0.0, schedule="linear", decay_tokens=1000)

    def moved(certified: int, steps: int) -> float:
        replica = Replica(RegressionWorkload(batch=100), seed=3, inner=inner, device=CPU)
        anchor = np.zeros(replica.layout.numel, np.float32)
        replica.write_initial(anchor)
        replica.apply(anchor)
        share = Assignment(seed=3, round=1, member=0, members=1)
        replica.begin(Train(round=1, steps=steps, assignment=share, certified_tokens=certified))
        out = np.zeros_like(anchor)
        for _ in range(steps):
            replica.step(out)
        return float(np.abs(out).max())

    assert moved(900, 1) == 0.0  # 900 certified and 100 of its own: the schedule is over
    assert moved(400, 1) == pytest.approx(0.1 * 0.5, rel=1e-3)  # AdamW's first step is the learning rate
    assert moved(800, 5) == pytest.approx(moved(800, 1))


def settings_of(**inner: object) -> Manifest:
    return manifest_of([FOUNDER], {"inner": inner})


def test_the_trainer_is_told_all_of_the_manifests_optimizer() -> None:
    inner: dict[str, object] = {
        "lr": 0.5,
        "weight_decay": 0.25,
        "betas": [0.5, 0.75],
        "clip_norm": 2.0,
        "warmup_tokens": 7,
        "schedule": "linear",
        "decay_tokens": 8,
        "min_lr": 0.125,
    }
    told = InnerSettings.of(settings_of(**inner))
    assert {name: getattr(told, name) for name in told.__struct_fields__} == {
        "optimizer": "adamw",
        **inner,
        "betas": (0.5, 0.75),
    }


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"schedule": "cosine"}, "needs decay_tokens"),
        ({"decay_tokens": 5}, 'schedule = "cosine" or "linear" only'),
        ({"min_lr": 1e-5}, 'schedule = "cosine" or "linear" only'),
        ({"schedule": "linear", "decay_tokens": 5, "min_lr": 0.5, "lr": 0.1}, "above lr, 0.1"),
        ({"schedule": "step", "decay_tokens": 5}, "schedule"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(inner: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(**inner)
    assert said in str(caught.value)
    assert "inner" in str(caught.value)
    assert "\n" not in str(caught.value)
