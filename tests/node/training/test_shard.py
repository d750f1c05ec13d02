"""Tensors that leave their device and come back: their memory is free meanwhile, and nothing of them has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.node.training.shard import HostCopies
from tests.node.lab import environment


def test_storages_are_empty_until_they_are_put_back_and_views_stay_valid() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    view, other, nothing = whole.view(3, 4)[1], torch.full((5,), 7, dtype=torch.int64), torch.empty(0)
    before = view.clone(), other.clone()
    copies = HostCopies([whole, view, other, nothing])
    assert copies.nbytes == 12 * 4 + 5 * 8  # each storage once
    assert [tensor.untyped_storage().nbytes() for tensor in (whole, other)] == [0, 0]
    copies.put_back()
    assert torch.equal(view, before[0])
    assert torch.equal(other, before[1])
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    copies.put_back()  # once is enough
    assert torch.equal(view, before[0])


PAUSED = """
import os
from pathlib import Path
import numpy as np
import torch
from torch import distributed
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.ranks import Ranks
from shoal.node.training.shard import Shard
from shoal.node.training.sharded_replica import ShardedReplica
from shoal.node.training.trainer_messages import Assignment, Contribution, InnerSettings, Start, Train
from tests.node.uneven import Uneven

START = Start(workload="", options={}, seed=3, inner=InnerSettings(lr=1e-2), data=None,
              device="cpu", threads=1, contributions=0)
Shard.rest = Shard.give_back  # as on an accelerator


def stretch(replica, round, anchor):
    share = Assignment(seed=3, round=round, member=0, members=1)
    replica.begin(Train(round=round, steps=3, assignment=share))
    out = np.zeros_like(anchor)
    while not isinstance(replica.step(out), Contribution):
        pass
    return out


def rows(replica):
    return [one.to_local().untyped_storage().nbytes() for one in replica.model.parameters()]


def begun(rests):
    replica = ShardedReplica(Uneven(), START, ranks=Ranks(1))
    if rests:  # as on a node that is paused when it starts
        replica.rest()
    return replica


def run(rests):
    replica = begun(rests)
    anchor = np.zeros(replica.layout.numel, np.float32)
    replica.write_initial(anchor)
    replica.apply(anchor, round=0, fresh=True)
    replica.wake()
    first = stretch(replica, 1, anchor)
    if rests:
        replica.rest()
        replica.rest()  # as by a user who says it twice
        assert not any(rows(replica))
    anchor = anchor - first
    replica.apply(anchor, round=1, taken=1)
    value = replica.evaluate()
    replica.inner_state(1)
    if rests:
        assert not any(rows(replica))
        replica.wake()
    # Read afterwards: of one process on the processor the copies are the parts themselves.
    kept = {name: tensor.clone() for name, tensor in replica.inner_state(1).tensors}
    Snapshotter().take(replica.inner_state(1), Path("1.trainer")).write()
    second = stretch(replica, 2, anchor)
    distributed.destroy_process_group()
    replica = begun(rests)
    replica.restore(SavedInner(Path("1.trainer")), exact=True)
    replica.apply(anchor, round=1)
    replica.wake()
    assert np.array_equal(stretch(replica, 2, anchor), second)
    distributed.destroy_process_group()
    return first, second, value, kept


went_on, rested = run(False), run(True)
assert np.abs(went_on[1]).max() > 1e-3
assert all(np.array_equal(one, other) for one, other in zip(went_on[:3], rested[:3], strict=True))
assert went_on[3].keys() == rested[3].keys()
assert all(torch.equal(value, rested[3][name]) for name, value in went_on[3].items())
print("equal", len(went_on[3]))
os._exit(0)
"""


@pytest.mark.long
def test_a_model_in_parts_that_rests_takes_an_anchor_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """It is evaluated while it rests, and before and after that holds nothing of the model.

    Its initial parameters are asked for, and it is restored, while it rests too.
    """
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    command = [sys.executable, "-X", "faulthandler", str(script)]
    places = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=places, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal ")
