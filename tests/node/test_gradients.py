"""Strategy ddp in one node: what its trainer contributes is the gradient at the anchor, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.loops.external_trainer import trainer_of
from shoal.node.options import NodeConfig
from shoal.node.state.contributions import Contributions
from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import Assignment, Contribution, InnerSettings, SyncSettings, Train
from shoal.node.workloads.regression import Batch, RegressionWorkload
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import validate_manifest
from tests.node.ledger import identity

CPU = torch.device("cpu")
SHARE = Assignment(seed=3, round=1, member=0, members=2)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def new_replica(workload: RegressionWorkload | None = None, *, contributions: int = 0, accumulate: int = 1) -> Replica:
    return Replica(
        workload or RegressionWorkload(),
        seed=3,
        inner=InnerSettings(clip_norm=1e-3),
        device=CPU,
        sync=SyncSettings(gradients=True),
        contributions=contributions,
        accumulate=accumulate,
    )


def started(workload: RegressionWorkload | None = None, *, accumulate: int = 1) -> tuple[Replica, Vector, Vector]:
    replica = new_replica(workload, accumulate=accumulate)
    anchor = np.zeros(replica.layout.numel, np.float32)
    replica.write_initial(anchor)
    replica.apply(anchor)
    return replica, anchor, np.full_like(anchor, np.nan)


def contribute(replica: Replica, out: Vector, *, share: Assignment = SHARE) -> Contribution:
    replica.begin(Train(round=share.round, steps=1, assignment=share))
    while (report := replica.step(out)) is None:
        pass  # it skipped batches
    assert isinstance(report, Contribution)
    return report


def gradient(workload: RegressionWorkload, anchor: Vector, share: Assignment = SHARE, batch: int = 0) -> F32:
    """Computed apart: of that batch of the share, at the anchor."""
    model = workload.build()
    named = sorted(model.named_parameters())
    torch.nn.utils.vector_to_parameters(torch.from_numpy(anchor.copy()), [value for _, value in named])
    stream = workload.batches(share)
    for _ in range(batch + 1):
        data = next(stream)
    loss, _ = workload.loss(model, data)
    loss.backward()  # type: ignore[no-untyped-call]
    return np.concatenate([value.grad.numpy().ravel() for _, value in named])  # type: ignore[union-attr]


def test_contribution_is_the_unclipped_gradient_and_the_replica_stays_where_it_is() -> None:
    replica, anchor, out = started()
    report = contribute(replica, out)
    assert out.tobytes() == gradient(RegressionWorkload(), anchor).tobytes()
    assert np.linalg.norm(out) > 1  # far above clip_norm
    assert (report.number, report.steps, report.tokens) == (1, 1, RegressionWorkload().batch)
    assert replica.accounts.local().numpy().tobytes() == anchor.tobytes()
    assert replica.waiting
    assert not replica.training


def test_after_the_next_anchor_it_is_that_ones_gradient_and_nothing_of_the_last() -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    moved = anchor + np.float32(0.25)
    replica.apply(moved, round=1, taken=1)
    assert not replica.waiting
    assert contribute(replica, out).number == 2
    # The same order goes on in the same stream of batches.
    assert out.tobytes() == gradient(RegressionWorkload(), moved, batch=1).tobytes()


@pytest.mark.parametrize("fresh", [False, True])
def test_gradient_that_no_round_took_is_dropped(fresh: bool) -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    replica.apply(anchor, round=0, taken=0, fresh=fresh)
    assert replica.accounts.local().numpy().tobytes() == anchor.tobytes()
    share = Assignment(seed=3, round=2, member=0, members=2)
    report = contribute(replica, out, share=share)
    assert report.tokens == RegressionWorkload().batch
    assert out.tobytes() == gradient(RegressionWorkload(), anchor, share).tobytes()


def test_batch_in_parts_is_the_batch() -> None:
    _, anchor, _ = started()
    replica, _, parts = started(accumulate=4)
    contribute(replica, parts)
    np.testing.assert_allclose(parts, gradient(RegressionWorkload(), anchor), rtol=1e-5, atol=1e-6)


class Broken(RegressionWorkload):
    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        loss, tokens = super().loss(model, batch)
        return loss * float("nan"), tokens


def test_loss_that_is_no_number_contributes_nothing() -> None:
    replica, _, out = started(Broken())
    report = contribute(replica, out)
    assert report.tokens == 0
    assert not out.any()


class Partly(torch.nn.Module):
    def __init__(self, whole: torch.nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self.frozen = torch.nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.whole(inputs)  # type: ignore[no-any-return]


class PartlyWorkload(RegressionWorkload):
    def build(self) -> torch.nn.Module:
        return Partly(super().build())


def test_frozen_parameters_stay_and_unused_ones_have_no_gradient() -> None:
    replica, _, out = started(PartlyWorkload())
    assert "frozen" not in replica.layout.names
    assert "unused" in replica.layout.names
    contribute(replica, out)
    at = sum(int(np.prod(s)) for n, s in zip(replica.layout.names, replica.layout.shapes, strict=True) if n < "unused")
    assert not out[at : at + 3].any()
    assert out[at + 3 :].any()
    assert np.isfinite(out).all()


def test_nothing_is_contributed_without_an_anchor_nor_restored_after_one() -> None:
    replica = new_replica()
    with pytest.raises(LocalError, match="before any anchor"):
        replica.accounts.contribute(np.zeros(replica.layout.numel, np.float32), 1)
    with pytest.raises(LocalError, match="before any anchor"):
        replica.accounts.saved(1)
    standing, _, _ = started()
    with pytest.raises(LocalError, match="after an anchor"):
        standing.accounts.write_initial(np.zeros(standing.layout.numel, np.float32))


def test_restart_goes_on_in_its_batches(tmp_path: Path) -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    snapshotter = Snapshotter()
    assert not snapshotter.take(replica.inner_state(1), tmp_path / "1.trainer").write().failure
    snapshotter.done()
    replica.apply(anchor, round=1, taken=1)
    contribute(replica, out)
    again, second = new_replica(contributions=1), np.zeros_like(out)
    again.restore(SavedInner(tmp_path / "1.trainer"), exact=True)
    again.apply(anchor, round=1)
    assert contribute(again, second).number == 2
    assert second.tobytes() == out.tobytes() != gradient(RegressionWorkload(), anchor).tobytes()


# -- the daemon's part ---------------------------------------------------------------------------------------

GRID = Grid(10_000, 4096)
ALL, SOME, NONE = (True, True, True), (True, False, True), (False, False, False)


def contributions(codec: str) -> Contributions:
    return Contributions(Fragments(GRID), codec, 3, sender=PeerId("me"), gradients=True)


def real(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(GRID.numel).astype(np.float32)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("included", [NONE, SOME, ALL, None])
def test_of_an_excluded_gradient_nothing_comes_again(codec: str, included: tuple[bool, ...] | None) -> None:
    mine = contributions(codec)
    first = mine.make(1, 1, 100, real(1), base=bytes(32))
    lost = first.values - first.encoded.decoded()
    mine.settle(1, included)
    second = mine.make(2, 2, 50, real(2), base=bytes(32))
    assert second.tokens == 50
    for chunk, bit in enumerate(included or NONE):
        here = slice(*GRID.span(chunk))
        carried = lost[here] if bit else np.zeros_like(lost[here])
        assert second.values[here].tobytes() == (real(2)[here] + carried).tobytes()


def test_a_loop_of_ones_own_cannot_exchange_gradients(tmp_path: Path) -> None:
    tables: dict[str, object] = {
        "swarm": {"name": "test", "founders": [identity(1).peer_id]},
        "workload": {"name": "own-loop"},
        "sync": {"strategy": "ddp"},
    }
    config = NodeConfig(manifest=validate_manifest(tables, source="swarm.toml"), data_dir=tmp_path)
    with pytest.raises(ConfigError, match="steps by itself"):
        trainer_of(config, identity(1), None, abandoned=lambda: None)  # type: ignore[arg-type]
