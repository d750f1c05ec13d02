"""A paused trainer leaves the accelerator, and goes on as if it had not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.node.training.adamw import AdamW
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import Assignment, InnerSettings, Train
from shoal.node.workloads.regression import RegressionWorkload

SHARE = Assignment(seed=3, round=1, member=0, members=1)
META = torch.device("meta")


def replica_on(device: str) -> tuple[Replica, np.ndarray]:
    replica = Replica(RegressionWorkload(), seed=3, inner=InnerSettings(), device=torch.device(device))
    out = np.zeros(replica.layout.numel, np.float32)
    replica.write_initial(out)
    replica.apply(out)
    replica.begin(Train(round=1, steps=6, assignment=SHARE))
    return replica, out


def contribution(device: str, *, moves: bool) -> bytes:
    """What six steps lead to, with a pause after the third."""
    replica, out = replica_on(device)
    for step in range(6):
        if step == 3:
            replica.rest()
            replica.evaluate()
            replica.wake()
        if step == 3 and moves:
            before = [id(parameter) for parameter in replica.model.parameters()]
            replica._move(torch.device("cpu"))
            assert [id(parameter) for parameter in replica.model.parameters()] == before
            assert all(parameter.grad is None for parameter in replica.model.parameters())
            replica._move(torch.device(device))
        replica.step(out)
    return out.tobytes()


def test_a_pause_changes_nothing_of_what_is_learnt() -> None:
    assert contribution("cpu", moves=True) == contribution("cpu", moves=False)


def test_moments_go_where_the_parameters_go() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.move(META)
    moments = dict(optimizer.state(["a", "b"]))
    assert {name for name, tensor in moments.items() if tensor.device == META} == {
        *("first.a", "first.b", "second.a", "second.b")
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_resting_replica_holds_no_memory_of_the_device() -> None:
    torch._C._cuda_clearCublasWorkspaces()  # of other tests in this process
    before = torch.cuda.memory_allocated()
    replica, out = replica_on("cuda")
    replica.step(out)
    assert torch.cuda.memory_allocated() > before
    replica.rest()
    assert torch.cuda.memory_allocated() == before
    replica.wake()
    replica.step(out)
    assert all(tensor.device.type == "cuda" for name, tensor in replica.inner_state_tensors() if name != "steps")
