"""`strategy = "ddp"`: a whole history against training in one process, and real nodes of which one is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.collectives.state import ADAMW_KINDS
from shoal.lab.bench.train_local import LocalSwarm
from shoal.lab.bench.train_spec import inner_settings
from shoal.lab.bench.train_sync import SynchronousTraining
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, load_manifest, validate_manifest
from shoal.testnet.scenario import Fault, Scenario
from tests.node.forks import FORKED
from tests.testnet.real_nodes import run_real

OPTIONS = {"inputs": 100, "outputs": 100}
WHO = [Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3)]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def manifest_of(clip_norm: float) -> Manifest:
    tables = {
        "swarm": {"name": "test", "founders": [one.peer_id for one in WHO]},
        "workload": {"name": "regression", "seed": 7, "options": OPTIONS},
        "sync": {"strategy": "ddp"},
        "inner": {"lr": 0.01, "clip_norm": clip_norm},
        "round": {"chunk_values": 4096},
    }
    return validate_manifest(tables, source="swarm.toml")


def flat(model: torch.nn.Module) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.concatenate([value.detach().numpy().ravel() for _, value in sorted(model.named_parameters())])


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_history_of_three_nodes_is_adamw_on_the_joined_batch(clip_norm: float) -> None:
    """Contributions, plans, sums and certified steps are those of nodes; the other side is one torch model."""
    manifest = manifest_of(clip_norm)
    workload = RegressionWorkload(**OPTIONS)
    swarm = LocalSwarm(manifest, WHO)
    alone = SynchronousTraining(workload, seed=manifest.workload.seed, inner=inner_settings(manifest), members=3)
    start = flat(alone.model)
    assert swarm.state.anchor.tobytes() == start.tobytes()
    for _ in range(10):
        swarm.run_round()
        alone.train_round(1)
    assert swarm.state.tokens == alone.tokens
    assert swarm.state.kinds == ADAMW_KINDS
    np.testing.assert_allclose(swarm.state.anchor, flat(alone.model), rtol=0, atol=1e-5)
    assert np.abs(swarm.state.anchor - start).max() > 0.05  # so that 1e-5 says something


SCENARIO = Scenario(
    nodes=3,
    rounds=5,
    strategy="ddp",
    workload="regression",
    options={"inputs": 64, "outputs": 32},
    inner={"lr": 0.05, "warmup_tokens": 0},
    faults=(Fault(kind="kill", node=2, round=2, phase="reduce", progress=0.4),),
)


def test_rounds_are_exact_though_one_is_killed(tmp_path: Path) -> None:
    report = run_real(SCENARIO, tmp_path, FORKED)
    assert report.digests_equal
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed"]
    assert load_manifest(tmp_path / "swarm.toml").sync.inner_steps == 1
