"""What is copied from a CUDA device beside the computation is what was there when the copy was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.trainer_messages import Assignment, InnerSettings, SyncSettings, Train
from shoal.node.workloads.text import TextWorkload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STREAMING = SyncSettings(fragments=2, mixing=0.5, chunk_values=8192)
SHARE = Assignment(seed=3, round=1, member=0, members=1)


def replica_on_device() -> tuple[Replica, np.ndarray]:
    workload = TextWorkload(width=512, layers=8, heads=8, context=64, batch=2)
    replica = Replica(workload, seed=3, inner=InnerSettings(), device=torch.device("cuda"), sync=STREAMING)
    out = np.zeros(replica.layout.numel, np.float32)
    replica.write_initial(out)
    replica.apply(out)
    replica.begin(Train(round=1, steps=100, assignment=SHARE))
    return replica, out


@pytest.mark.parametrize("midway", [False, True])
def test_a_snapshot_is_of_its_moment_whatever_steps_follow(tmp_path: Path, midway: bool) -> None:
    replica, out = replica_on_device()
    for _ in range(3):
        replica.step(out)
    wanted = {name: tensor.detach().cpu().clone() for name, tensor in replica.inner_state_tensors()}
    local = replica.accounts.local()
    state = replica.inner_state(1, midway=midway)
    writing = Snapshotter().take(state, tmp_path / "inner")
    del state
    replica.copied_at(writing.events)
    for _ in range(5):
        replica.step(out)
    assert not writing.write().failure
    saved = SavedInner(tmp_path / "inner")
    for name, tensor in wanted.items():
        found = torch.zeros_like(tensor)
        saved.copy_to(name, found)
        assert torch.equal(found, tensor), name
    kept, base = saved.accounts(replica.layout.numel), replica.accounts.base
    assert base is not None
    progress, expected = (kept.kept, local - base) if midway else (kept.local, local)
    assert progress is not None
    assert torch.equal(progress, expected)


def test_an_evaluation_leaves_the_replica_as_it_was() -> None:
    replica, out = replica_on_device()
    for _ in range(3):
        replica.step(out)
    before = replica.accounts.local()
    base = replica.evaluate()
    assert torch.equal(replica.accounts.local(), before)
    fresh, _ = replica_on_device()
    assert fresh.evaluate() == base
