"""`shoal export` and `shoal verify` on the data folder of a node of the strategy `gossip`, which nobody certified."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.cli.main import execute
from shoal.node.state.checkpoints import LAYOUT
from shoal.node.state.states import StateCache
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.donors import flipped
from tests.node.ledger import GRID, state_of

PARAMETERS = Layout(names=("bias", "weight"), shapes=((1000,), (90, 100)), numel=GRID.numel)


def node_folder(folder: Path) -> Path:
    """What a node that made seven rounds leaves."""
    for part in ("state", "finals"):
        (folder / part).mkdir(parents=True)
    cache = StateCache(folder, GRID.chunk_values)
    for round in (6, 7):
        cache.save_state(state_of(round, seed=round, layout=PARAMETERS.digest))
    (folder / LAYOUT).write_bytes(msgspec.json.encode(PARAMETERS))
    tables = {
        "swarm": {"name": "test", "founders": [Identity.from_seed(bytes(32)).peer_id]},
        "workload": {"name": "no-such-workload"},
        "sync": {"inner_steps": 30, "strategy": "gossip"},
    }
    (folder / "swarm.toml").write_text(render_manifest(validate_manifest(tables, source="the test's manifest")))
    return folder


def test_export_writes_the_nodes_own_newest_state(tmp_path: Path) -> None:
    assert execute(["export", str(node_folder(tmp_path / "node")), "--out", str(tmp_path / "model")]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")
    state = state_of(7, seed=7, layout=PARAMETERS.digest)
    np.testing.assert_array_equal(exported["bias"], state.anchor[:1000])
    np.testing.assert_array_equal(exported["weight"], state.anchor[1000:].reshape(90, 100))


def test_export_of_a_damaged_state_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = node_folder(tmp_path / "node") / "state" / "7.safetensors"
    path.write_bytes(flipped(path.read_bytes(), 5000))
    assert execute(["export", str(tmp_path / "node"), "--out", str(tmp_path / "model")]) == 1
    assert "7.safetensors is damaged" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_export_for_another_swarm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = node_folder(tmp_path / "node")
    other = tmp_path / "swarm.toml"
    other.write_text((folder / "swarm.toml").read_text().replace("inner_steps = 30", "inner_steps = 31"))
    arguments = ["export", str(folder), "--out", str(tmp_path / "model"), "--manifest", str(other)]
    assert execute(arguments) == 2
    assert "another swarm" in capsys.readouterr().err


def test_verify_says_that_there_is_no_certificate_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["verify", str(node_folder(tmp_path / "node"))]) == 2
    assert "nothing is certified" in capsys.readouterr().err
